"""Run a SavedModel in a process without this project's code, for the parity check.

    python -P isolated_runner.py MODEL CASES RESULTS

CASES is a JSON list of requests, {"signature": name, "inputs": {name: values}}. Values are strings
in base64, or lists of equal length of such strings. RESULTS is written as .npz, see `save`, with
output "name" of request i as "i/name". This file imports nothing from the project, and fails if
anything else does.
"""

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.


def main(model_path: str, cases_path: str, results_path: str) -> None:
    """Run the requests in a file and write the outputs to another file."""
    # GPUs would compute float32 products in TF32; the trained model is compared without it too.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with open(cases_path, encoding="ascii") as file:
        cases = json.load(file)
    results = run_cases(model_path, cases)
    ours = {"bert_tf", "tasks", "export"} & set(sys.modules)
    assert not ours, f"the isolated process imported {ours}"
    save(results_path, results)


def run_cases(
    model_path: os.PathLike | str, cases: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Run requests as in CASES, and return the outputs of request i as "i/name"."""
    model = tf.saved_model.load(model_path)
    results = {}
    for number, case in enumerate(cases):
        inputs = {
            name: tf.constant(decoded(values), tf.string) for name, values in case["inputs"].items()
        }
        for name, output in model.signatures[case["signature"]](**inputs).items():
            results[f"{number}/{name}"] = output.numpy()
    return results


def encoded(value: bytes | str | list | Mapping[str, Any]) -> Any:
    """Encode a string in base64, or the strings of nested lists and dicts."""
    if isinstance(value, Mapping):
        return {name: encoded(entry) for name, entry in value.items()}
    if isinstance(value, bytes | str):
        return base64.b64encode(tf.compat.as_bytes(value)).decode("ascii")
    return [encoded(entry) for entry in value]


def decoded(value: str | list) -> bytes | list:
    """Decode a base64 string, or the strings of nested lists."""
    return base64.b64decode(value) if isinstance(value, str) else [decoded(v) for v in value]


def save(path: os.PathLike | str, results: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz file without pickle; strings are `bytes` of dtype object.

    Of strings, the lengths are stored as "name" and the concatenated bytes as "name/bytes". numpy
    would store objects as a pickle, and fixed-width strings each with the length of the longest:
    a megabyte for each of thousands of entities.
    """
    arrays = {}
    for name, array in results.items():
        if array.dtype == object:
            arrays[f"{name}/bytes"] = np.frombuffer(b"".join(array.flat), np.uint8)
            array = np.vectorize(len, otypes=[np.int64])(array)
        arrays[name] = array
    # numpy's types take each name for `allow_pickle`, the only named argument.
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load(path: os.PathLike | str) -> dict[str, np.ndarray]:
    """Read a file of `save`. Strings are `bytes` in arrays of dtype object."""
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
