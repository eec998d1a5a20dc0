"""Measures a served BERT beside keras-nlp, transformers, ONNX Runtime and OpenVINO.

    python benchmarks/serving.py --data=DIR [--baselines=PYTHON] [--precision=bfloat16]
    [--output=OUT]

Classification of texts into three labels: strings in, probabilities out, tokenizing included, on
two processors. BERT-base with the same weights on all sides, which are checked to give the same
probabilities before anything is timed. DIR holds text/books.txt, a sentence a line. PYTHON is the
interpreter of an environment with torch, transformers, tokenizers, onnx, onnxscript, onnxruntime
and openvino; what is not installed is left out.

    ours            the SavedModel that the export writes, by tf.saved_model.load
    keras-nlp       a BertTextClassifier in a SavedModel, of 128 tokens (long texts: 512)
    transformers    on PyTorch, batches padded to their longest text
    onnxruntime, openvino    the same model, exported by PyTorch, dynamic shapes, same padding

In bfloat16 ours is the export in it, the Keras and PyTorch models have it as dtype, openvino as its
precision hint; a processor without bfloat16 takes long over it, and says nothing of its speed.
Every side, kind of texts and round has a process of its own, the sides in turn; figures are medians
of the rounds. A process answers a text (cold start: from its first moment), then eight, then up to
five of other lengths, then for each batch size and order all texts twice, of which the second time
counts: a server's shapes have been met before. A batch size that is over the number of texts is
left out. Prints Markdown tables; in OUT are serving.jsonl, a line a measurement, and serving.png.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

# Nothing heavy: a new process' ru_maxrss begins with that of the one that has started it.
import serving_report
from serving_process import THREADS, WARM_UP

HERE = pathlib.Path(__file__).resolve().parent
BASELINES = {  # And what they need beside numpy.
    "transformers": ("torch", "transformers"),
    "onnxruntime": ("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    "openvino": ("torch", "transformers", "tokenizers", "openvino"),
}
NEEDS = {"ours": (), "keras-nlp": ("keras_nlp",), **BASELINES}
COUNTS = {"short": 256, "mixed": 128, "long": 32}
BATCHES = (1, 16, 64)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
CHECKED = 16  # Texts of a kind.


def main(options):
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:THREADS])  # All that is started inherits it.
    backends = present(options)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        prepare(directory, backends, options)
        texts = json.loads((directory / "texts.json").read_text(encoding="utf-8"))
        check(directory, backends, texts, options)
        lines = list(measure(directory, backends, texts, options))
    title = (
        f"BERT-{options.model_size}, {options.precision}, on two processors; "
        f"medians of {options.rounds} rounds"
    )
    if options.output:
        serving_report.draw(lines, backends, title, options.output / "serving.png")
    for kind, (_, lengths) in texts.items():
        mean = sum(lengths) / len(lengths)
        print(f"{kind}: {len(lengths)} texts, {min(lengths)} to {max(lengths)} tokens, {mean:.1f}")
    print(f"{title}\n")
    print(serving_report.throughput_table(lines, backends))
    print(serving_report.process_table(lines, backends))


def measure(directory, backends, texts, options):
    """Yields a dict a measurement, which is in serving.jsonl by then."""
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    with open(options.output / "serving.jsonl" if options.output else os.devnull, "w") as file:
        for number in range(options.rounds):
            for kind, (chosen, lengths) in texts.items():
                for backend in backends:
                    print(f"round {number}: {kind}, {backend}", file=sys.stderr, flush=True)
                    about = {"backend": backend, "texts": kind, "precision": options.precision}
                    result = ask(directory, backend, kind, chosen, lengths, "times", options)
                    for metrics in (result["process"], *result["passes"]):
                        line = {**about, "round": number, **rounded(metrics)}
                        print(json.dumps(line), file=file, flush=True)
                        yield line


def present(options):
    """The sides that can be measured here; of each other one a line says why not."""
    backends = []
    for backend in options.backends:
        if backend in BASELINES and not options.baselines:
            reason = "--baselines names no interpreter"
        elif backend == "onnxruntime" and options.precision == "bfloat16":
            reason = "it computes no bfloat16 on processors"
        elif missing := not_installed(python_of(backend, options), NEEDS[backend]):
            reason = f"{', '.join(missing)} not installed"
        else:
            backends.append(backend)
            continue
        print(f"{backend} is left out: {reason}")
    if not backends:
        sys.exit("no side is left to be measured")
    return backends


def not_installed(python, names):
    code = (
        "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
    )
    done = subprocess.run([python, "-c", code, *names], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


def python_of(backend, options):
    return options.baselines if backend in BASELINES else sys.executable


def prepare(directory, backends, options):
    """The texts, and every side's model, in `directory`."""
    plan = {
        "directory": str(directory),
        "data": str(options.data),
        "texts": options.texts,
        "backends": backends,
        "model_size": options.model_size,
        "precision": options.precision,
        "wanted": "models",
    }
    run(sys.executable, "serving_models.py", directory, plan)
    if set(backends) & set(BASELINES):
        run(options.baselines, "serving_baselines.py", directory, plan)


def check(directory, backends, texts, options):
    """Ends the program unless all sides give the same probabilities to some texts of each kind."""
    for kind, (chosen, lengths) in texts.items():
        predictions = {
            backend: ask(
                directory, backend, kind, chosen[:CHECKED], lengths[:CHECKED], "answers", options
            )
            for backend in backends
        }
        expected = predictions[backends[0]]
        columns = list(zip(*expected, strict=True))
        spread = max(max(column) - min(column) for column in columns)
        for backend in backends[1:]:
            difference = max(
                abs(actual - want)
                for rows in zip(predictions[backend], expected, strict=True)
                for actual, want in zip(*rows, strict=True)
            )
            print(
                f"{kind}: a probability of {backend} is at most {difference:.1e} from "
                f"{backends[0]}; they range over {spread:.2f}",
                flush=True,
            )
            if not difference <= TOLERANCE[options.precision]:
                sys.exit(f"more than {TOLERANCE[options.precision]}: not the same model")


def ask(directory, backend, kind, texts, lengths, expected, options):
    """What a process of serving_process.py's has to say."""
    model = {"keras-nlp": f"keras-nlp-{512 if kind == 'long' else 128}"}
    model["transformers"] = "huggingface"
    result = directory / "result.json"
    plan = {
        "backend": backend,
        "model": str(directory / model.get(backend, backend)),
        "precision": options.precision,
        "texts": texts,
        "lengths": lengths,
        "batches": [batch for batch in BATCHES if batch <= len(texts)],
        "wanted": expected,
        "result": str(result),
    }
    script = "serving_baselines.py" if backend in BASELINES else "serving_backends.py"
    run(python_of(backend, options), script, directory, plan)
    return json.loads(result.read_text(encoding="utf-8"))


def run(python, script, directory, plan):
    path = directory / "plan.json"
    path.write_text(json.dumps({**plan, "started": time.time()}), encoding="utf-8")
    log = directory / "log.txt"
    with open(log, "wb") as output:
        done = subprocess.run(
            [python, HERE / script, path], stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"{said}\n{script} ended with {done.returncode}: {plan.get('backend', 'models')}")


def rounded(metrics):
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in metrics.items()
    }


def list_of(names):
    def parse(value):
        chosen = value.split(",")
        if unknown := sorted(set(chosen) - set(names)):
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return chosen

    return parse


def counts(value):
    """ "short:64,long" -> {"short": 64, "long": 32}."""
    result = {}
    for part in value.split(","):
        kind, _, count = part.partition(":")
        if kind not in COUNTS or not (count or "16").isdigit() or int(count or 16) < 2 * WARM_UP:
            raise argparse.ArgumentTypeError(
                f"{part!r}: wanted {', '.join(COUNTS)}, or a kind and a number from {2 * WARM_UP}, "
                "short:64"
            )
        result[kind] = int(count) if count else COUNTS[kind]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("BERT_TF_DATA")
    parser.add_argument("--data", type=pathlib.Path, default=data, required=data is None)
    parser.add_argument("--baselines", metavar="PYTHON")
    parser.add_argument("--backends", type=list_of(NEEDS), default=list(NEEDS))
    parser.add_argument("--texts", type=counts, default=dict(COUNTS), help="short:64,mixed,long:16")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--model_size", choices=("tiny", "base"), default="base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if not (pathlib.Path(arguments.data) / "text" / "books.txt").is_file():
        parser.error(f"--data={arguments.data}: has no text/books.txt")
    if arguments.baselines and not shutil.which(arguments.baselines):
        parser.error(f"--baselines={arguments.baselines}: no such program")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds}: wanted a number from 1")
    main(arguments)
