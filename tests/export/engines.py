"""Engines for a SavedModel other than tf.saved_model.load, as commands, and requests to them."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from export.checks import isolated_runner, parity
from tests.export import c_engine, serving_operations, session_runner

TOLERANCE = 1e-5
ROWS_PER_BATCH = 8
OTHER = "BERT_TF_OTHER_PYTHON"  # An interpreter with another TensorFlow and TF Text.


def commands():
    """Return {engine: the command in front of MODEL CASES RESULTS}."""
    engines = {
        "session": (sys.executable, "-I", session_runner.__file__),
        "C API": (sys.executable, "-I", c_engine.__file__),
    }
    if OTHER in os.environ:
        engines["other TensorFlow"] = (os.environ[OTHER], "-I", isolated_runner.__file__)
        packages = versions(os.environ[OTHER])[0]
        engines["other TensorFlow, C API"] = (*engines["C API"], packages)
    return engines


@functools.cache
def versions(python):
    """Return site-packages and the versions of TensorFlow and TF Text of an interpreter."""
    code = (
        "import importlib.metadata as m; t = m.distribution('tensorflow');"
        "print(t.locate_file(''), t.version, m.version('tensorflow-text'), sep='\\n')"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return tuple(done.stdout.split("\n")[:3])


def cases_of(directory, texts):
    """Return requests to each signature of a SavedModel, of texts and of none, for a runner."""
    cases = []
    signatures = serving_operations.read(directory).signature_def
    for signature in sorted(set(signatures) - {"__saved_model_init_op"}):
        specs = sorted(signatures[signature].inputs.items())
        ranks = [len(tensor.tensor_shape.dim) for _, tensor in specs]
        inputs = {}
        for number, ((name, _), rank) in enumerate(zip(specs, ranks, strict=True)):
            turned = [*texts[number:], *texts[:number]]  # Avoid pairs of a text and itself.
            inputs[name] = turned if rank == 1 else parity.in_lists(turned)
        starts = range(0, len(texts), ROWS_PER_BATCH)
        parts = [slice(start, start + ROWS_PER_BATCH) for start in starts]
        # Otherwise JSON could not express the number of columns of an array without rows.
        if max(ranks) == 1:
            parts.append(slice(0, 0))
        cases += [
            {
                "signature": signature,
                "inputs": isolated_runner.encoded(
                    {name: rows[part] for name, rows in inputs.items()}
                ),
            }
            for part in parts
        ]
    return cases


def run_cases(command, directory, cases, scratch):
    """Return {"i/output": array} predicted by a command; raise AssertionError with its stderr."""
    requests, results = pathlib.Path(scratch, "cases.json"), pathlib.Path(scratch, "results.npz")
    requests.write_text(json.dumps(cases), encoding="ascii")
    results.unlink(missing_ok=True)
    model, packages, probe_of = directory, command[3:], command[:3]
    done = subprocess.run(
        [*probe_of, model, requests, results, *packages],
        capture_output=True,
        text=True,
        cwd=scratch,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return isolated_runner.load(results)


def differences(expected, predictions):
    """Return {"i/output": difference} between the predictions of two engines."""
    found = dict.fromkeys(set(expected) ^ set(predictions), "only one has it")
    for name in set(expected) & set(predictions):
        reference, actual = expected[name], predictions[name]
        if (reference.dtype, reference.shape) != (actual.dtype, actual.shape):
            found[name] = (
                f"{actual.dtype}{list(actual.shape)} for {reference.dtype}{list(reference.shape)}"
            )
        elif reference.dtype.kind == "f":
            if not np.allclose(actual, reference, rtol=TOLERANCE, atol=TOLERANCE):
                found[name] = f"differs by {np.abs(actual - reference).max()}"
        elif not np.array_equal(actual, reference):
            found[name] = f"{np.count_nonzero(actual != reference)} of {reference.size} differ"
    return found
