"""Asks a SavedModel in a process that has none of our code; the parity check runs it.

    python -I probe.py MODEL CASES RESULTS

CASES is a JSON list of {"signature", "inputs": {name: [base64, ...]}}, or lists of lists of equal
length; RESULTS becomes an .npz, see `save`, with the outputs of case i under "i/name". This file
imports nothing of the project, and makes sure that nothing else does.
"""

import base64
import json
import sys

import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.


def main(model_path, cases_path, results_path):
    # As the trained model it is compared with: GPUs would else compute products in TF32.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with open(cases_path, encoding="ascii") as file:
        cases = json.load(file)
    results = run_cases(model_path, cases)
    ours = {"bert_tf", "tasks", "export"} & set(sys.modules)
    assert not ours, f"the probe has imported {ours}"
    save(results_path, results)


def run_cases(model_path, cases):
    """{"i/name": array} of a SavedModel's answers; cases as in the file."""
    model = tf.saved_model.load(model_path)
    results = {}
    for number, case in enumerate(cases):
        inputs = {
            name: tf.constant(decoded(values), tf.string) for name, values in case["inputs"].items()
        }
        for name, output in model.signatures[case["signature"]](**inputs).items():
            results[f"{number}/{name}"] = output.numpy()
    return results


def decoded(value):
    return base64.b64decode(value) if isinstance(value, str) else [decoded(v) for v in value]


def save(path, results):
    """Writes {name: array}; of strings the lengths, and under name/bytes the bytes in a row.

    numpy would store objects as a pickle, and fixed-width bytes each as large as the longest: of
    thousands of entities the one of a megabyte.
    """
    arrays = {}
    for name, array in results.items():
        if array.dtype == object:
            arrays[f"{name}/bytes"] = np.frombuffer(b"".join(array.flat), np.uint8)
            array = np.vectorize(len, otypes=[np.int64])(array)
        arrays[name] = array
    np.savez(path, **arrays)


def load(path):
    """What `save` has written, strings as bytes in arrays of objects."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    results = {}
    for name, array in arrays.items():
        if f"{name}/bytes" in arrays:
            data, end = arrays[f"{name}/bytes"].tobytes(), np.cumsum(array)
            strings = np.empty(array.shape, object)
            for index, (last, size) in enumerate(zip(end, array.flat, strict=True)):
                strings.flat[index] = data[last - size : last]
            results[name] = strings
        elif not name.endswith("/bytes"):
            results[name] = array
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
