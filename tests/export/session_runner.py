"""Runs a SavedModel in a Session, like TF Serving, as export/checks/isolated_runner.py does.

    python -I session_runner.py MODEL CASES RESULTS

Besides NumPy it imports tensorflow and tensorflow_text only, and runs in TensorFlow 2.12 as well.
"""

import base64
import json
import sys

import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.


def main(model_path, cases_path, results_path):
    with open(cases_path, encoding="ascii") as file:
        cases = json.load(file)
    results = {}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta_graph = tf.compat.v1.saved_model.load(session, ["serve"], model_path)
        for number, case in enumerate(cases):
            signature = meta_graph.signature_def[case["signature"]]
            feeds = {
                signature.inputs[name].name: np.array(decoded(values), object)
                for name, values in case["inputs"].items()
            }
            fetches = {name: output.name for name, output in signature.outputs.items()}
            for name, output in session.run(fetches, feeds).items():
                results[f"{number}/{name}"] = output
    foreign = {"bert_tf", "tasks", "export"} & set(sys.modules)
    assert not foreign, f"the runner has imported {foreign}"
    save(results_path, results)


def decoded(value):
    return base64.b64decode(value) if isinstance(value, str) else [decoded(v) for v in value]


def save(path, results):
    """Save results like export/checks/isolated_runner.py."""
    arrays = {}
    for name, array in results.items():
        if array.dtype == object:
            arrays[f"{name}/bytes"] = np.frombuffer(b"".join(array.flat), np.uint8)
            array = np.vectorize(len, otypes=[np.int64])(array)
        arrays[name] = array
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
