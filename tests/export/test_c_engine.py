"""The engine on the C API: predictions as in Python, errors instead of crashes, and threads."""

import base64
import concurrent.futures
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from export.checks import isolated_runner
from tests.export import c_engine

TEXTS = [b"", b"the bill", b"\xff\xfe\x00 bad", "caf\u00e9 \U0001f600".encode(), b"long " * 9000]
REQUESTS = (
    ("serving_default", {"text": TEXTS}),
    ("serving_default", {"text": []}),
    ("tokenize", {"text": TEXTS}),
    ("tokenize", {"text": []}),
    ("choose", {"prompt": [b"a", b"b"], "choices": [[b"c", b""], [b"d", b"\xff"]]}),
    ("one", {"text": [b"1", b"-2.5"]}),
    ("raw", {"text": TEXTS}),
    ("numbers", {"text": TEXTS}),
    ("twice", {"x": [[1.0, 2.0], [3.0, -4.0]]}),
    ("single", {"text": TEXTS}),
)

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def engine(echo_dir):
    return c_engine.Engine(echo_dir / "3")


@pytest.fixture(scope="module")
def python_signatures(echo_dir):
    return tf.saved_model.load(str(echo_dir / "3")).signatures


def test_signatures_equal_those_read_in_python(engine, python_signatures):
    def of(specs):
        return {
            name: (spec.dtype.name, tuple(-1 if size is None else size for size in spec.shape))
            for name, spec in specs.items()
        }

    assert {
        name: {
            key: {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
            for key, specs in parts.items()
        }
        for name, parts in engine.signatures.items()
    } == {
        name: {
            "inputs": of(function.structured_input_signature[1]),
            "outputs": of(function.structured_outputs),
        }
        for name, function in python_signatures.items()
    }


@pytest.mark.parametrize(("signature", "inputs"), REQUESTS)
def test_predictions_equal_those_of_python(engine, python_signatures, signature, inputs):
    specs = python_signatures[signature].structured_input_signature[1]
    expected = python_signatures[signature](
        **{name: tf.constant(values, specs[name].dtype) for name, values in inputs.items()}
    )
    prediction = engine.predict(inputs, signature)
    assert set(prediction) == set(expected)
    for name, values in prediction.items():
        assert values.dtype == expected[name].numpy().dtype
        np.testing.assert_array_equal(values, expected[name].numpy())


def test_the_command_predicts_without_the_python_of_tensorflow(
    echo_dir, python_signatures, tmp_path
):
    """Run it in another process, which asserts that TensorFlow has not been imported."""
    cases = [
        {"signature": name, "inputs": {"text": [base64.b64encode(text).decode() for text in TEXTS]}}
        for name in ("tokenize", "serving_default")
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-I", c_engine.__file__, echo_dir / "3", "cases.json", "results.npz"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = isolated_runner.load(tmp_path / "results.npz")
    assert len(results) == 6
    for number, case in enumerate(cases):
        for name, tensor in python_signatures[case["signature"]](tf.constant(TEXTS)).items():
            np.testing.assert_array_equal(results[f"{number}/{name}"], tensor.numpy())


@pytest.mark.parametrize(
    ("signature", "inputs", "message"),
    [
        ("sing", {"text": [b"a"]}, 'Serving signature name: "sing" not found in signature def'),
        ("one", {"texts": [b"a"]}, "one takes text, not texts"),
        ("one", {}, "one takes text, not nothing"),
        ("one", {"text": [b"many"]}, "could not correctly convert string: many"),
        ("one", {"text": [1]}, "text: int where a string is expected"),
        ("twice", {"x": [["a", "b"]]}, "x: no float32: could not convert string"),
        (
            "choose",
            {"prompt": [b"a"], "choices": [[b"a"], [b"b", b"c"]]},
            "list where a string",
        ),
        # Two operations fail, and the first one to do so is reported.
        (
            "choose",
            {"prompt": [b"a"], "choices": [b"a", b"b"]},
            "Expected dimension in the range|slice index 1 of dimension 0 out of bounds",
        ),
        ("choose", {"prompt": b"a", "choices": [[b"a", b"b"]]}, "slice"),
    ],
)
def test_a_wrong_request_is_an_error_instead_of_a_crash(engine, signature, inputs, message):
    with pytest.raises(c_engine.EngineError, match=message) as raised:
        engine.predict(inputs, signature)
    assert raised.value.code == c_engine.INVALID_ARGUMENT
    assert engine.predict({"text": [b"2"]}, "one")["value"].tolist() == [2]


def test_a_path_without_a_saved_model_is_an_error(tmp_path):
    with pytest.raises(c_engine.EngineError, match=r"Could not find SavedModel .pb") as raised:
        c_engine.Engine(tmp_path)
    assert raised.value.code == 5  # TF_NOT_FOUND.


def test_threads_get_their_own_predictions(engine):
    def asked(number):
        texts = [f"{number} {word} {'x' * number}".encode() for word in range(20)]
        prediction = engine.predict({"text": texts}, "tokenize")["words"].tolist()
        with pytest.raises(c_engine.EngineError, match=f": no{number}\n"):
            engine.predict({"text": [f"no{number}"]}, "one")
        return prediction == [text.split() for text in texts]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(asked, range(1, 200)))
