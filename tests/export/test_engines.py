"""Exports in engines other than tf.saved_model.load of the installed TensorFlow.

The operations that servers know are read from a file. Predictions are compared in a Session, in
the C API, and in another TensorFlow, of the interpreter named by BERT_TF_OTHER_PYTHON. `make
test-slow` creates one with TensorFlow 2.20, which TF Serving 2.20 is linked with.
"""

import functools
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf

from export.checks import isolated_runner, parity
from export.graph.saved_model import write_saved_model
from tasks.base.task_types import TASK_TYPES
from tests.export import engines, serving_operations
from tests.export.test_every_kind import TASKS, of_pretraining, of_task

LIGHT = tuple(text for text in parity.ADVERSARIAL_TEXTS if len(text) < 5000)
ASKED = ("binary pairs", "span_qa with no answer", "tagging", "multiple_choice", "pretrained")
ENGINES = ("C API", "other TensorFlow, C API")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, config, vocabulary):
    """Return a function from a task type to a SavedModel of it, which is written once."""

    @functools.cache
    def write(kind, precision="float32"):
        directory = tmp_path_factory.mktemp("of_a_kind")
        if kind == "pretrained":
            run = of_pretraining(directory, config, vocabulary)
        else:
            run = of_task(kind, directory, config, vocabulary)
        write_saved_model(run, directory / "model", precision)
        return directory / "model"

    return write


@pytest.fixture(scope="module")
def predictions_of(model_of):
    """Return a function from (kind, texts) to (requests, the predictions of this process)."""

    @functools.cache
    def ask(kind, texts):
        cases = engines.cases_of(model_of(kind), texts)
        return cases, isolated_runner.run_cases(str(model_of(kind)), cases)

    return ask


def command_of(engine):
    if engine.startswith("other") and engines.OTHER not in os.environ:
        pytest.skip(f"{engines.OTHER} names no interpreter with another TensorFlow")
    return engines.commands()[engine]


def test_operations_that_servers_reject_are_reported(tmp_path):
    """Use a handwritten SavedModel with operations and outputs that exports must not have."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def of_python(text):
        half = tf.numpy_function(lambda x: x, [tf.ones([2])], tf.float16)
        return {"half": half, "text_bytes": tf.identity(text), "rows": tf.size(text)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], jit_compile=True)
    def compiled(x):
        return {"y": tf.matmul(x[:, None], x[:, None], grad_a=True)}

    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path), {"of_python": of_python, "compiled": compiled})
    found = serving_operations.problems(tmp_path)
    assert "no signature serving_default" in found
    assert "of_python: half is half, which JSON cannot say" in found
    assert "of_python: text_bytes would be sent as base64" in found
    assert "of_python: rows does not begin with the rows of a request" in found
    for generation in serving_operations.SERVERS:
        assert f"{generation}: PyFunc: no such operation in the list" in found
    assert "2.12: MatMul: no attribute grad_a" in found
    assert "2.20: MatMul: no attribute grad_a" not in found
    assert any(line.endswith("is compiled by XLA") for line in found)


def test_a_model_of_every_task_type_is_tested():
    assert {task.kind for task in TASKS.values()} == set(TASK_TYPES)


def test_differences_are_found():
    strings = np.array([b"a", b"b\x00"], object)
    predictions = {
        "0/label": strings,
        "0/score": np.float32([0.5, 20]),
        "0/start": np.int32([1, 2]),
    }
    near = {**predictions, "0/score": np.float32([0.500009, 20.0001])}
    assert engines.differences(predictions, near) == {}
    for name, other in (
        ("0/label", np.array([b"a", b"b"], object)),
        ("0/score", np.float32([0.5001, 20])),
        ("0/score", np.float32([np.nan, 20])),
        ("0/start", np.int64([1, 2])),
        ("0/start", np.int32([[1, 2]])),
        ("0/start", np.int32([1, 3])),
        ("0/end", np.int32([1, 2])),
    ):
        assert set(engines.differences(predictions, {**predictions, name: other})) == {name}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TASKS, "pretrained"])
def test_servers_know_all_operations(model_of, kind):
    assert serving_operations.problems(model_of(kind)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["several labels", "pretrained"])
def test_servers_know_all_operations_in_bfloat16(model_of, kind):
    assert serving_operations.problems(model_of(kind, "bfloat16")) == []


@pytest.mark.slow
def test_the_other_tensorflow_has_another_version():
    command_of("other TensorFlow")
    _, *others = engines.versions(os.environ[engines.OTHER])
    assert others[0] != tf.__version__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *itertools.product(ASKED, ENGINES),
        ("span_qa with no answer", "other TensorFlow"),
        ("tagging", "session"),
        ("multiple_choice", "session"),
    ],
)
def test_predictions_are_equal(model_of, predictions_of, tmp_path, kind, engine):
    command = command_of(engine)
    cases, expected = predictions_of(kind, LIGHT)
    for name, array in expected.items():
        inputs = cases[int(name.split("/")[0])]["inputs"]
        assert len(array) == len(next(iter(inputs.values()))), name
    predictions = engines.run_cases(command, model_of(kind), cases, tmp_path)
    assert engines.differences(expected, predictions) == {}
    # Make sure that there are requests to compare.
    assert any(len(set(array.ravel().tolist())) > 5 for array in expected.values())


@pytest.mark.slow
def test_predictions_for_a_megabyte_are_equal(model_of, predictions_of, tmp_path):
    command = command_of("other TensorFlow, C API")
    cases, expected = predictions_of("tagging", parity.ADVERSARIAL_TEXTS)
    predictions = engines.run_cases(command, model_of("tagging"), cases, tmp_path)
    assert engines.differences(expected, predictions) == {}
