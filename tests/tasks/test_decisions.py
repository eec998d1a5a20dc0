"""Decisions from logits, by hand, and agreement of metrics and predictions."""

import math
import types

import numpy as np
import pytest
import tensorflow as tf

from tasks.types.classification.text_classifier import (
    ClassificationTask,
    decide_each,
    decide_one,
)

THREE = tf.math.log([[0.2, 0.5, 0.3], [0.35, 0.25, 0.4], [0.1, 0.3, 0.6]])


def test_a_temperature_divides_the_logits():
    """Use odds of 9 and of 1 to 16: at temperature 2 they become 3 and 1 to 4."""
    logits = tf.constant([[math.log(9)], [-math.log(16)]])
    plain, calibrated = decide_one(logits), decide_one(logits, temperature=2.0)
    np.testing.assert_allclose(plain.probabilities, [[0.1, 0.9], [16 / 17, 1 / 17]], rtol=1e-5)
    np.testing.assert_allclose(calibrated.probabilities, [[0.25, 0.75], [0.8, 0.2]], rtol=1e-5)
    np.testing.assert_allclose(calibrated.score, [0.75, 0.8], rtol=1e-5)
    # Ratios of 16 to 4 to 1 become 4 to 2 to 1.
    three = decide_one(tf.math.log([[16.0, 4.0, 1.0]]), temperature=2.0)
    np.testing.assert_allclose(three.probabilities, [[4 / 7, 2 / 7, 1 / 7]], rtol=1e-5)
    each = decide_each(logits, temperature=2.0)
    np.testing.assert_allclose(each.probabilities, [[0.75], [0.2]], rtol=1e-5)


def test_of_two_labels_the_second_is_predicted_from_its_threshold_on():
    logits = tf.constant([[0.0], [-1.0], [1.0]])  # Probabilities 0.5, 0.2689.., 0.7310..
    assert decide_one(logits, 1.0, 1, 0.5).label.numpy().tolist() == [1, 0, 1]
    just = float(decide_one(logits).probabilities[1, 1])
    assert decide_one(logits, 1.0, 1, just).label.numpy().tolist() == [1, 1, 1]
    above = float(np.nextafter(np.float32(just), np.float32(1)))
    decision = decide_one(logits, 1.0, 1, above)
    assert decision.label.numpy().tolist() == [1, 0, 1]
    np.testing.assert_allclose(decision.score, [0.5, 1 - just, 0.731059], rtol=1e-5)


def test_a_rare_label_is_predicted_from_its_threshold_on_else_the_most_likely_other():
    def labels(threshold, positive=2):
        return decide_one(THREE, 1.0, positive, threshold).label.numpy().tolist()

    assert decide_one(THREE).label.numpy().tolist() == [1, 2, 2]
    assert labels(0.25) == [2, 2, 2]
    assert labels(0.35) == [1, 2, 2]
    assert labels(0.5) == [1, 0, 2]  # The most likely label of the second row, 0.4, is not enough.
    assert labels(0.9) == [1, 0, 1]
    assert labels(0.15, positive=0) == [0, 0, 2]
    # The score is that of the predicted label.
    np.testing.assert_allclose(decide_one(THREE, 1.0, 2, 0.5).score, [0.5, 0.35, 0.6], rtol=1e-5)


def test_of_several_labels_each_has_a_threshold():
    logits = tf.constant([[math.log(3), 0.0, -math.log(3)], [-9.0, -8.0, -9.0]])
    decision = decide_each(logits, thresholds_C=(0.7, 0.6, 0.25))
    np.testing.assert_allclose(decision.probabilities[0], [0.75, 0.5, 0.25], rtol=1e-6)
    assert decision.selected.numpy().tolist() == [[True, False, True], [False] * 3]
    assert decision.label.numpy().tolist() == [0, 1]  # The most likely, selected or not.
    np.testing.assert_allclose(decision.score, [0.75, tf.sigmoid(-8.0)], rtol=1e-6)
    assert decide_each(logits).selected.numpy().tolist() == [[True, True, False], [False] * 3]


@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ("no yes", {}),
        ("no yes", {"temperature": 1.7, "threshold_objective": "f1", "thresholds": (0.3,)}),
        ("a b c d", {"temperature": 0.6}),
        ("a b c d", {"threshold_objective": "f1", "rare_label": "c"}),  # Not tuned yet.
        (
            "a b c d",
            {
                "threshold_objective": "f1",
                "rare_label": "c",
                "thresholds": (0.2,),
                "temperature": 3.0,
            },
        ),
        ("a b c", {"multi_label": True}),
        ("a b c", {"multi_label": True, "thresholds": (0.2, 0.5, 0.8), "temperature": 2.0}),
        (
            "a b",
            {"multi_label": True, "threshold_objective": "recall=0.9", "thresholds": (0.4, 0.6)},
        ),
    ],
)
def test_metrics_are_computed_from_the_predictions(labels, options, rows):
    """Count the predictions of a traced graph in plain Python."""
    rng = np.random.default_rng(rows)
    task = ClassificationTask(labels=tuple(labels.split()), max_seq_length=12, **options)
    count = len(task.labels)
    logits = rng.normal(0, 2, (rows, 1 if task.is_binary else count)).astype(np.float32)
    shape, top = ((rows, count), 2) if task.multi_label else ((rows,), count)
    expected = rng.integers(0, top, shape).astype(np.int32)
    data = types.SimpleNamespace(labels={"label": expected})
    serve = tf.function(
        lambda logits: task.predictions({}, None, {"label": logits}),
        input_signature=[tf.TensorSpec([None, logits.shape[1]], tf.float32)],
    )
    prediction = {name: value.numpy() for name, value in serve(logits).items()}
    metrics = task.metrics(data, {"label": logits})
    assert all(type(value) is float for value in metrics.values())
    assert prediction["labels"].shape == prediction["probabilities"].shape == (rows, count)
    if task.multi_label:
        right = [
            given.tolist() == reference.tolist()
            for given, reference in zip(prediction["selected"], expected, strict=True)
        ]
        metric = "exact_match"
        assert prediction["selected"].shape == (rows, count)
    else:
        right = [
            given.decode() == task.labels[reference]
            for given, reference in zip(prediction["label"], expected, strict=True)
        ]
        metric = "accuracy"
        scores = zip(
            prediction["probabilities"].tolist(), prediction["score"].tolist(), strict=True
        )
        chosen = [task.labels[row.index(score)].encode() for row, score in scores]
        assert chosen == prediction["label"].tolist()
    assert metrics[metric] == pytest.approx(sum(right) / rows if rows else 0.0)
