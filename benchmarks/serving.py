"""Compare a served BERT with keras-nlp, transformers, ONNX Runtime, OpenVINO and CTranslate2.

    python benchmarks/serving.py --data=DIR [--baselines=PYTHON] [--precision=bfloat16|int8]
    [--output=OUT]

The task is classification of texts into three labels, from strings to probabilities with
tokenizing, on two processors. All backends have a BERT-base with the same weights. Before timing,
their probabilities are compared with those of the trained model in float32. DIR contains
text/books.txt with one sentence per line. PYTHON is the interpreter of an environment with torch,
transformers, tokenizers, onnx, onnxscript, onnxruntime, openvino, nncf and ctranslate2. Backends
that are not installed, or that do not have the precision, are skipped with a reason.

    ours            the exported SavedModel, with tf.saved_model.load
    litert          the file of export_litert (int8: dynamic), tokens and padding by bert_tf
    keras-nlp       a BertTextClassifier in a SavedModel, with 128 tokens (long texts: 512)
    transformers    on PyTorch, batches padded to their longest text
    onnxruntime, openvino    the same model, exported by PyTorch, dynamic shapes, same padding
    ctranslate2     the same encoder, padded by CTranslate2; the head is computed in numpy

With --precision=bfloat16, ours is the bfloat16 export, the Keras and PyTorch models have this
dtype, and openvino has it as precision hint. A processor without bfloat16 emulates it slowly, so
that times are meaningless there. With --precision=int8, keras-nlp has Keras' and transformers
PyTorch's dynamic quantization; for the others see serving_conversions.py.

Every backend, kind of text and round has a separate process; the backends alternate. Metrics are
medians of the rounds. A process receives one text (cold start: time since the start of the
process, of which imports are a part that a server without Python does not have), then eight, then
up to five of other lengths. Then it receives all texts twice for each batch size. Only the second
pass counts, since a running server has seen the shapes before. Batch sizes above the number of
texts are skipped. Prints Markdown tables; writes serving.jsonl, one line per measurement,
and serving.png to OUT.
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

# No heavy imports here: the ru_maxrss of a process starts with that of its parent.
import serving_report
from serving_catalog import BACKENDS, PRECISIONS, present, python_of
from serving_process import THREADS, WARM_UP

HERE = pathlib.Path(__file__).resolve().parent
COUNTS = {"short": 256, "mixed": 128, "long": 32}
BATCHES = (1, 16, 64)
# Of probabilities. A BERT-base with random weights predicts nothing clearly, so roundings show:
# int8 differs by up to 0.16. Without the attention mask, with the other segment or with two layers
# swapped it is 0.36 to 0.93. Smaller mistakes are found in float32, in which the same code runs.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.25}
CHECKED = 16  # Number of texts per kind.


def main(options):
    """Run the benchmark from the command line."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:THREADS])  # Child processes inherit it.
    backends = present(options.backends, options.precision, options.baselines)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        machine = json.loads(run(sys.executable, "serving_machine.py", directory, {}))
        print(serving_report.machine(machine), flush=True)
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
    print(serving_report.latency_table(lines, backends))
    print(serving_report.start_up_table(lines, backends))


def measure(directory, backends, texts, options):
    """Yield one dict per measurement, after writing it to serving.jsonl."""
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


def prepare(directory, backends, options):
    """Write the texts and the models of all backends to `directory`."""
    plan = {
        "directory": str(directory),
        "data": str(options.data),
        "texts": options.texts,
        "checked": CHECKED,
        "backends": backends,
        "model_size": options.model_size,
        "precision": options.precision,
    }
    run(sys.executable, "serving_models.py", directory, plan)
    if any(BACKENDS[backend].is_baseline for backend in backends):
        run(options.baselines, "serving_conversions.py", directory, plan)


def check(directory, backends, texts, options):
    """Exit unless all backends return the expected probabilities for some texts of each kind."""
    expected = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    tolerance = TOLERANCE[options.precision]
    for kind, (chosen, lengths) in texts.items():
        some = chosen[:CHECKED], lengths[:CHECKED]
        spread = max(max(column) - min(column) for column in zip(*expected[kind], strict=True))
        for backend in backends:
            actual = ask(directory, backend, kind, *some, "predictions", options)
            difference = max(
                abs(value - reference)
                for rows in zip(actual, expected[kind], strict=True)
                for value, reference in zip(*rows, strict=True)
            )
            print(
                f"{kind}: probabilities of {backend} differ by at most {difference:.1e} from "
                f"the trained model in float32; their range is {spread:.2f}",
                flush=True,
            )
            if not difference <= tolerance:
                sys.exit(f"difference above {tolerance}: the models are not equal")


def ask(directory, backend, kind, texts, lengths, expected, options):
    """Run a plan in a separate process, see serving_process.py, and return its result."""
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
        "output": expected,
        "result": str(result),
    }
    script = "serving_baselines.py" if BACKENDS[backend].is_baseline else "serving_backends.py"
    run(python_of(backend, options.baselines), script, directory, plan)
    return json.loads(result.read_text(encoding="utf-8"))


def run(python, script, directory, plan):
    """Run a script with a plan, return its output, and exit with it if the script fails."""
    path = directory / "plan.json"
    path.write_text(json.dumps({**plan, "started": time.time()}), encoding="utf-8")
    done = subprocess.run(
        [python, HERE / script, path], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        sys.exit(
            f"{said}\n{script}: exit status {done.returncode}: {plan.get('backend', 'models')}"
        )
    return done.stdout


def rounded(metrics):
    """Round the floats to four digits."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in metrics.items()
    }


def list_of(names):
    """Return a parser of comma-separated names."""

    def parse(value):
        chosen = value.split(",")
        if unknown := sorted(set(chosen) - set(names)):
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected one of {', '.join(names)}")
        return chosen

    return parse


def counts(value):
    """Parse numbers of texts: "short:64,long" becomes {"short": 64, "long": 32}."""
    result = {}
    for part in value.split(","):
        kind, _, count = part.partition(":")
        if kind not in COUNTS or not (count or "16").isdigit() or int(count or 16) < 2 * WARM_UP:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected one of {', '.join(COUNTS)}, or KIND:NUMBER with a number >= "
                f"{2 * WARM_UP}"
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
    parser.add_argument("--backends", type=list_of(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--texts", type=counts, default=dict(COUNTS), help="short:64,mixed,long:16")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--model_size", choices=("tiny", "base"), default="base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if not (pathlib.Path(arguments.data) / "text" / "books.txt").is_file():
        parser.error(f"--data={arguments.data}: text/books.txt is missing")
    if arguments.baselines and not shutil.which(arguments.baselines):
        parser.error(f"--baselines={arguments.baselines}: no such program")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds}: expected an integer >= 1")
    main(arguments)
