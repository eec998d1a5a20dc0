"""Asks a SavedModel in a process that has none of our code; the parity gate runs it.

    python -I probe.py MODEL CASES RESULTS

CASES is a JSON list of {"signature", "inputs": {name: [base64, ...]}}, or lists of lists of equal
length; RESULTS becomes an .npz with the outputs of case i under "i/name". This file imports nothing
of the project, and makes sure that nothing else does.
"""

import base64
import json
import sys

import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.


def main(model_path, cases_path, results_path):
    model = tf.saved_model.load(model_path)
    with open(cases_path, encoding="ascii") as file:
        cases = json.load(file)
    results = {}
    for number, case in enumerate(cases):
        inputs = {
            name: tf.constant(decoded(values), tf.string) for name, values in case["inputs"].items()
        }
        for name, output in model.signatures[case["signature"]](**inputs).items():
            # As fixed-width bytes, since numpy would store objects as a pickle.
            results[f"{number}/{name}"] = (
                output.numpy().astype("S") if output.dtype == tf.string else output.numpy()
            )
    ours = {"bert_tf", "tasks", "export"} & set(sys.modules)
    assert not ours, f"the probe has imported {ours}"
    np.savez(results_path, **results)


def decoded(value):
    return base64.b64decode(value) if isinstance(value, str) else [decoded(v) for v in value]


if __name__ == "__main__":
    main(*sys.argv[1:])
