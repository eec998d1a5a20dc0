"""`fit`, `evaluate` and `predict` with XLA: packed batches of few shapes, and equal results."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as runtime

import tasks
from bert_tf.train.distribution import gather
from tasks.graph import chunking, evaluation
from tasks.graph.evaluation import Evaluator
from tasks.model import task_model
from tests import small
from tests.tasks.test_task_model import CASES, NAMES, ROWS, compiled
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of

# Class, options and rows.
PREDICTED = {
    **{name: (options, rows) for name, (options, rows, _) in CASES.items()},
    "TextEmbedder": ({}, ROWS),
    "TextRanker": ({}, {"query": ["the bill", "my app"], "texts": [["is high", "a"], ["b"]]}),
}

# Only these read a dataset batch by batch.
STREAMED = ("TextClassifier", "TextRegressor")
FORMS = [("rows", name) for name in CASES]
FORMS += [("dataset", name) for name in STREAMED]


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("compiled") / "weights"
    return small.write_huggingface(directory, config, vocabulary, **NO_DROPOUT)


@pytest.mark.medium
@pytest.mark.parametrize("is_streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fit_compiled_by_xla_packs_rows_and_trains_equally(weights, is_streamed):
    plain, packed = (compiled("TextClassifier", weights, learning_rate=1e-3) for _ in range(2))
    assert not plain.jit_compile  # "auto" on a CPU.
    packed.compile(learning_rate=1e-3, jit_compile=True)
    rows = {"x": ROWS, "y": NAMES, "batch_size": 4}
    if is_streamed:
        rows = {"x": tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(4)}
    for model in (plain, packed):
        model.fit(**rows, epochs=2, verbose=0)
    assert_equal_weights(weights_of(plain), weights_of(packed), rtol=1e-4, atol=2e-6)


@pytest.mark.medium
@pytest.mark.parametrize("form, name", small.fast(FORMS, FORMS[0]))
def test_fit_compiled_on_two_replicas_trains_like_one(form, name, weights, mirrored):
    """Train with SGD, because Adam hides a wrong scale of gradients."""
    options, x, y = CASES[name]
    create = functools.partial(getattr(tasks, name).from_pretrained, weights, max_seq_length=12)
    alone = create(**options)
    with mirrored.scope():
        together = create(**options)
    rate = 0.02 if name == "TextRegressor" else 0.1
    for model, is_compiled in ((alone, False), (together, True)):
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.SGD(rate), jit_compile=is_compiled)
        before, rows = weights_of(model), {"x": x, "y": y, "batch_size": 4}
        if form == "dataset":
            rows = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(4)}
        model.fit(**rows, epochs=2, verbose=0)
    assert together._step.is_compiled and not together.jit_compile
    expected = weights_of(alone)
    assert any(np.abs(value - before[key]).max() > 1e-3 for key, value in expected.items())
    assert_equal_weights(expected, weights_of(together), rtol=1e-4, atol=1e-5)
    assert "sequence_ids" in inputs_of(together._evaluation_rows(x, y))


@pytest.mark.medium
def test_evaluate_is_compiled_on_packed_rows_and_reads_a_batch_late(weights, monkeypatch):
    model = compiled("TextClassifier", weights)
    expected = model.evaluate(ROWS, NAMES, batch_size=3)
    assert "row_splits" in inputs_of(model._evaluation_rows(ROWS, NAMES))
    model.compile(jit_compile=True)
    encoded = model._evaluation_rows(ROWS, NAMES)
    assert "sequence_ids" in inputs_of(encoded)
    assert model.evaluate(encoded, batch_size=3) == pytest.approx(expected, rel=1e-5)
    events, forward = [], Evaluator._forward

    def launch(self, batch, is_compiled):
        events.append("launch" if is_compiled else "launch without XLA")
        return forward(self, batch, is_compiled)

    def read(*args):
        events.append("read")
        return gather(*args)

    monkeypatch.setattr(Evaluator, "_forward", launch)
    monkeypatch.setattr(evaluation, "gather", read)
    monkeypatch.setattr(evaluation, "is_accelerated", lambda strategy: True)
    assert model.evaluate(encoded, batch_size=3) == pytest.approx(expected, rel=1e-5)
    assert events[:4] == ["launch", "launch", "read", "read"]  # Outputs, and which are padding.


def inputs_of(encoded):
    (inputs, _), *_ = encoded.evaluation_batches(encoded.by_length(), 3)
    return inputs


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*untrained head")
@pytest.mark.parametrize("name", small.fast(PREDICTED, "TextClassifier"))
def test_predict_is_compiled_on_packed_rows_and_predicts_equally(name, weights, monkeypatch):
    options, x = PREDICTED[name]
    expected, model = (
        getattr(tasks, name).from_pretrained(weights, max_seq_length=12, **options)
        for _ in range(2)
    )
    if name == "AnomalyDetector":
        for of in (expected, model):
            of._set_tuned(dataclasses.replace(of.task, threshold=1.0))
    expected = expected.predict_rows(x)
    monkeypatch.setattr(chunking, "SEQUENCES_PER_BATCH", 4)  # Several batches.
    monkeypatch.setattr(task_model, "is_accelerated", lambda strategy: True)
    found = model.predict_rows(x)
    assert model.serving.pipeline.is_on_gpu
    assert len(found) == len(expected) > 1
    for row, expected_row in zip(found, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for output, values in expected_row.items():
            if np.asarray(values).dtype.kind == "f":
                np.testing.assert_allclose(row[output], values, rtol=1e-4, atol=1e-5)
            else:
                assert row[output] == values, output


def test_keras_compiles_steps_of_token_ids_and_none_of_strings(weights, monkeypatch):
    """Keras asks the layers, by itself on a GPU; XLA fails on strings."""
    model = compiled("TextClassifier", weights)
    text = keras.Input((), dtype="string")
    pooled = model.encoder(model.preprocessor(text))["pooled"]
    own = keras.Model(text, keras.layers.Dense(3)(pooled))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        own.compile("sgd", "mse", jit_compile=True)
    assert not own.jit_compile
    monkeypatch.setattr(runtime, "is_op_determinism_enabled", lambda: True)
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile(jit_compile=True)
    assert not model.jit_compile
    monkeypatch.undo()
    model.compile(jit_compile=True)
    assert model.jit_compile
