"""`fit` and `evaluate` with XLA: packed batches of few shapes, and equal results."""

import pytest

from bert_tf.train.distribution import gather
from tasks.graph import evaluation
from tasks.graph.evaluation import Evaluator
from tests import small
from tests.tasks.test_task_model import NAMES, ROWS, compiled
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("compiled") / "weights"
    return small.write_huggingface(directory, config, vocabulary, **NO_DROPOUT)


@pytest.mark.medium
def test_fit_compiled_by_xla_packs_rows_and_trains_equally(weights):
    plain, packed = (compiled("TextClassifier", weights, learning_rate=1e-3) for _ in range(2))
    assert not plain.jit_compile  # "auto" on a CPU.
    packed.compile(learning_rate=1e-3, jit_compile=True)
    for model in (plain, packed):
        model.fit(ROWS, NAMES, batch_size=4, epochs=2, verbose=0)
    assert_equal_weights(weights_of(plain), weights_of(packed), rtol=1e-4, atol=2e-6)


@pytest.mark.medium
def test_evaluate_is_compiled_on_packed_rows_and_reads_a_batch_late(weights, monkeypatch):
    model = compiled("TextClassifier", weights)
    expected = model.evaluate(ROWS, NAMES, batch_size=3)
    assert "row_splits" in inputs_of(model.encode(ROWS, NAMES))
    model.compile(jit_compile=True)
    encoded = model.encode(ROWS, NAMES)
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
