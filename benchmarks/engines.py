"""Run SavedModels in several engines and print the outputs next to each other.

    python -m benchmarks.engines MODEL...        (a minute each)

MODEL is an exported version, MODELS/name/1. Every signature receives three rows: with
tf.saved_model.load in this process, in a Session and through TensorFlow's C API. If
BERT_TF_OTHER_PYTHON names an interpreter, its TensorFlow runs them too, in Python and through the C
API. "equal" means equal strings and integers, and floats within 1e-5.
"""

import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from export.checks import isolated_runner
from tests.export import engines

TEXTS = (b"Where is Caf\xc3\xa9 Anna? My bill is too high.", b"the [MASK] is broken", b"")
WIDTH = 60


def main(models):
    """Print a Markdown table of the outputs of all engines for each SavedModel."""
    commands = engines.commands()
    if engines.OTHER in os.environ:
        print("other TensorFlow:", *engines.versions(os.environ[engines.OTHER])[1:])
    for model in models:
        print(f"\n{model}, TensorFlow {tf.__version__}\n")
        print("| signature | output | engine | value | equal |\n|---|---|---|---|---|")
        cases = [case for case in engines.cases_of(model, TEXTS) if _has_rows(case)]
        predictions = {"tf.saved_model.load": isolated_runner.run_cases(model, cases)}
        with tempfile.TemporaryDirectory() as scratch:
            for engine, command in commands.items():
                predictions[engine] = engines.run_cases(
                    command, os.path.abspath(model), cases, scratch
                )
        expected = predictions["tf.saved_model.load"]
        differing = {
            engine: engines.differences(expected, of) for engine, of in predictions.items()
        }
        for name in expected:
            number, output = name.split("/")
            for engine, of_engine in predictions.items():
                cells = (
                    cases[int(number)]["signature"],
                    output,
                    engine,
                    _shortened(of_engine[name]) if name in of_engine else "none",
                    differing[engine].get(name, "yes"),
                )
                print("|", " | ".join(cells), "|")


def _has_rows(case):
    return all(case["inputs"].values())


def _shortened(array):
    text = str(array.astype(float).round(5).tolist() if array.dtype.kind == "f" else array.tolist())
    text = text.replace("|", "\\|")
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}..."


if __name__ == "__main__":
    main(sys.argv[1:])
