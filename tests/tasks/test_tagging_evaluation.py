"""Evaluation of tagging: values kept per batch, in any layout and batch size."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.text.encoder_inputs import to_flat, to_padded
from tasks.graph.evaluation import Evaluator
from tasks.types.tagging import TaggingTask
from tests.tasks import test_tagging
from tests.tasks.test_tagging import write_columns

tiny, encoded_of = test_tagging.tiny, test_tagging.encoded_of  # Fixtures.


@pytest.mark.slow
@pytest.mark.parametrize("layout", [to_flat, to_padded])
def test_evaluation_is_equal_in_any_layout_and_batch_size(
    tmp_path, encoded_of, layout, monkeypatch
):
    """Use batches of windows of different lengths, and compare with single windows."""
    monkeypatch.setattr(TaggingTask, "metric_inputs", lambda self, outputs: outputs)
    data, pipeline = encoded_of(write_columns(tmp_path / "a.conll"), layout)
    lengths = data.windows.packed.input_ids.row_lengths().numpy()
    assert len(set(lengths)) > 2
    strategy = tf.distribute.get_strategy()
    for replica_batch_size in (3, 64):
        outputs = Evaluator(pipeline.task, pipeline.model, strategy, replica_batch_size).outputs(
            data
        )["tag"]
        assert outputs.shape == (len(lengths), 6, 5)
        for number, (inputs, _) in enumerate(data.evaluation_batches(np.arange(len(lengths)), 1)):
            alone = pipeline.model(inputs)["tag"][0]
            length = lengths[number]
            np.testing.assert_allclose(outputs[number, :length], alone[:length], atol=1e-5)


@pytest.mark.slow
def test_evaluation_keeps_the_labels_and_not_the_logits(tmp_path, encoded_of, monkeypatch):
    data, pipeline = encoded_of(write_columns(tmp_path / "a.conll"))
    task = pipeline.task
    evaluator = Evaluator(task, pipeline.model, tf.distribute.get_strategy(), 3)
    metrics, kept = evaluator.metrics(data), evaluator.outputs(data)["tag"]
    assert kept.dtype == np.int16 and kept.shape == (len(data), 6)

    # Compute the same metrics from all logits at once.
    monkeypatch.setattr(TaggingTask, "metric_inputs", lambda self, outputs: outputs)
    logits = evaluator.outputs(data)["tag"]
    monkeypatch.undo()
    labels, weights = (
        values["tag"].to_tensor(0, shape=logits.shape[:2]) for values in (data.labels, data.weights)
    )
    losses = task.losses["tag"](labels, logits).numpy()
    assert metrics.pop("loss") == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
    assert metrics == task.metrics(data, task.metric_inputs({"tag": logits}))
