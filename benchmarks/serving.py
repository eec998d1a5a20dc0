"""Measures a served BERT beside keras-nlp, transformers, ONNX Runtime and OpenVINO.

    python benchmarks/serving.py --data=DIR [--peers=PYTHON] [--precision=bfloat16] [--output=OUT]

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
PEERS = {  # And what they need beside numpy.
    "transformers": ("torch", "transformers"),
    "onnxruntime": ("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    "openvino": ("torch", "transformers", "tokenizers", "openvino"),
}
NEEDS = {"ours": (), "keras-nlp": ("keras_nlp",), **PEERS}
COUNTS = {"short": 256, "mixed": 128, "long": 32}
BATCHES = (1, 16, 64)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
CHECKED = 16  # Texts of a kind.


def main(options):
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:THREADS])  # All that is started inherits it.
    sides = present(options)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder, sides, options)
        texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        check(folder, sides, texts, options)
        lines = list(measure(folder, sides, texts, options))
    title = (
        f"BERT-{options.model_size}, {options.precision}, on two processors; "
        f"medians of {options.rounds} rounds"
    )
    if options.output:
        serving_report.draw(lines, sides, title, options.output / "serving.png")
    for kind, (_, lengths) in texts.items():
        mean = sum(lengths) / len(lengths)
        print(f"{kind}: {len(lengths)} texts, {min(lengths)} to {max(lengths)} tokens, {mean:.1f}")
    print(f"{title}\n")
    print(serving_report.throughput_table(lines, sides))
    print(serving_report.process_table(lines, sides))


def measure(folder, sides, texts, options):
    """Yields a dict a measurement, which is in serving.jsonl by then."""
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    with open(options.output / "serving.jsonl" if options.output else os.devnull, "w") as file:
        for number in range(options.rounds):
            for kind, (chosen, lengths) in texts.items():
                for side in sides:
                    print(f"round {number}: {kind}, {side}", file=sys.stderr, flush=True)
                    about = {"side": side, "texts": kind, "precision": options.precision}
                    result = ask(folder, side, kind, chosen, lengths, "times", options)
                    for figures in (result["process"], *result["passes"]):
                        line = {**about, "round": number, **rounded(figures)}
                        print(json.dumps(line), file=file, flush=True)
                        yield line


def present(options):
    """The sides that can be measured here; of each other one a line says why not."""
    sides = []
    for side in options.sides:
        if side in PEERS and not options.peers:
            reason = "--peers names no interpreter"
        elif side == "onnxruntime" and options.precision == "bfloat16":
            reason = "it computes no bfloat16 on processors"
        elif missing := not_installed(python_of(side, options), NEEDS[side]):
            reason = f"{', '.join(missing)} not installed"
        else:
            sides.append(side)
            continue
        print(f"{side} is left out: {reason}")
    if not sides:
        sys.exit("no side is left to be measured")
    return sides


def not_installed(python, names):
    code = (
        "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])"
    )
    done = subprocess.run([python, "-c", code, *names], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


def python_of(side, options):
    return options.peers if side in PEERS else sys.executable


def prepare(folder, sides, options):
    """The texts, and every side's model, in `folder`."""
    plan = {
        "folder": str(folder),
        "data": str(options.data),
        "texts": options.texts,
        "sides": sides,
        "model_size": options.model_size,
        "precision": options.precision,
        "wanted": "models",
    }
    run(sys.executable, "serving_models.py", folder, plan)
    if set(sides) & set(PEERS):
        run(options.peers, "serving_peers.py", folder, plan)


def check(folder, sides, texts, options):
    """Ends the program unless all sides give the same probabilities to some texts of each kind."""
    for kind, (chosen, lengths) in texts.items():
        answers = {
            side: ask(folder, side, kind, chosen[:CHECKED], lengths[:CHECKED], "answers", options)
            for side in sides
        }
        wanted = answers[sides[0]]
        columns = list(zip(*wanted, strict=True))
        spread = max(max(column) - min(column) for column in columns)
        for side in sides[1:]:
            difference = max(
                abs(got - want)
                for rows in zip(answers[side], wanted, strict=True)
                for got, want in zip(*rows, strict=True)
            )
            print(
                f"{kind}: a probability of {side} is at most {difference:.1e} from {sides[0]}; "
                f"they range over {spread:.2f}",
                flush=True,
            )
            if not difference <= TOLERANCE[options.precision]:
                sys.exit(f"more than {TOLERANCE[options.precision]}: not the same model")


def ask(folder, side, kind, texts, lengths, wanted, options):
    """What a process of serving_process.py's has to say."""
    model = {"keras-nlp": f"keras-nlp-{512 if kind == 'long' else 128}"}
    model["transformers"] = "huggingface"
    result = folder / "result.json"
    plan = {
        "side": side,
        "model": str(folder / model.get(side, side)),
        "precision": options.precision,
        "texts": texts,
        "lengths": lengths,
        "batches": [batch for batch in BATCHES if batch <= len(texts)],
        "wanted": wanted,
        "result": str(result),
    }
    script = "serving_peers.py" if side in PEERS else "serving_sides.py"
    run(python_of(side, options), script, folder, plan)
    return json.loads(result.read_text(encoding="utf-8"))


def run(python, script, folder, plan):
    path = folder / "plan.json"
    path.write_text(json.dumps({**plan, "started": time.time()}), encoding="utf-8")
    log = folder / "log.txt"
    with open(log, "wb") as output:
        done = subprocess.run(
            [python, HERE / script, path], stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"{said}\n{script} ended with {done.returncode}: {plan.get('side', 'models')}")


def rounded(figures):
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
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
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--sides", type=list_of(NEEDS), default=list(NEEDS))
    parser.add_argument("--texts", type=counts, default=dict(COUNTS), help="short:64,mixed,long:16")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--model_size", choices=("tiny", "base"), default="base")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if not (pathlib.Path(arguments.data) / "text" / "books.txt").is_file():
        parser.error(f"--data={arguments.data}: has no text/books.txt")
    if arguments.peers and not shutil.which(arguments.peers):
        parser.error(f"--peers={arguments.peers}: no such program")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds}: wanted a number from 1")
    main(arguments)
