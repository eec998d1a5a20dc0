"""Losses and metrics of `compile`, for outputs that are logits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses as keras_losses
from keras import metrics as keras_metrics

from bert_tf import UserError
from bert_tf.train.step import OWN_LOSSES
from tasks.model.compile_arguments import LossMeans, losses_by_output, metrics_by_output
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.masked_lm import MaskedLmTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.ranking import RankingTask
from tasks.types.regression import RegressionTask
from tasks.types.tagging import TaggingTask

THREE = ClassificationTask(max_seq_length=8, labels=("a", "b", "c"))
TWO = ClassificationTask(max_seq_length=8, labels=("a", "b"))
MULTI = ClassificationTask(max_seq_length=8, labels=("a", "b", "c"), multi_label=True)
NUMBER = RegressionTask(max_seq_length=8)
TAGS = TaggingTask(max_seq_length=8, labels=("O", "B-X", "I-X"), doc_stride=2)
CHOICE = MultipleChoiceTask(max_seq_length=8)
SPAN = QuestionAnsweringTask(max_seq_length=8, doc_stride=2, max_query_length=2)
MASKED = MaskedLmTask(max_seq_length=8)
RANKS = RankingTask(max_seq_length=8)
LABELS = {
    THREE: np.array([2, 0, 1, 1]),
    TWO: np.array([1, 0, 1, 1]),
    MULTI: np.array([[1, 0, 1]] * 4),
    NUMBER: np.array([0.5, 1, 2, -1], np.float32),
}
LOGITS = {
    task: np.random.default_rng(0).normal(0, 2, (4, size)).astype(np.float32)
    for task, size in ((THREE, 3), (TWO, 1), (MULTI, 3), (NUMBER, 1))
}


def metrics_of(task, metrics=None, weighted_metrics=None, outputs=None):
    return metrics_by_output(task, outputs or list(task.losses), metrics, weighted_metrics)


@pytest.mark.parametrize("task", LABELS, ids=["three", "two", "multi", "number"])
def test_the_loss_of_the_task_is_a_mean(task):
    (function,) = task.losses.values()
    expected = np.mean(function(LABELS[task], tf.constant(LOGITS[task])))
    (found,) = losses_by_output(task, "auto").values()
    assert float(found(LABELS[task], LOGITS[task])) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        keras_losses.SparseCategoricalCrossentropy(from_logits=True),
        keras_losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        keras_losses.Huber(),
        lambda labels, logits: labels - logits,
    ],
)
def test_objects_and_functions_are_left_as_they_are(loss):
    assert losses_by_output(THREE, loss) == {"label": loss}
    assert losses_by_output(THREE, {"label": loss}) == {"label": loss}
    assert losses_by_output(THREE, [loss]) == {"label": loss}


@pytest.mark.parametrize(("task", "outputs"), [(TAGS, 1), (CHOICE, 1), (SPAN, 2), (MASKED, 1)])
def test_all_outputs_get_the_loss(task, outputs):
    found = losses_by_output(task, "auto")
    assert [loss.function for loss in found.values()] == list(task.losses.values())
    assert len(found) == len(metrics_of(task)[1]) == outputs


def test_an_output_without_a_loss_has_no_metric():
    losses = losses_by_output(SPAN, {"start": "auto", "end": None})
    assert list(losses) == ["start"]
    for metrics in ({}, {"weighted_metrics": ["accuracy"]}, {"metrics": "accuracy"}):
        unweighted, weighted = metrics_of(SPAN, **metrics, outputs=losses)
        assert list(weighted) == ["start"] and not any(unweighted.values())
    message = "^metrics: 'end' is no output of span_qa with a loss; expected start$"
    with pytest.raises(UserError, match=message):
        metrics_of(SPAN, {"end": "accuracy"}, outputs=losses)


@pytest.mark.parametrize("value", ["auto", keras_losses.MeanSquaredError()])
def test_names_that_are_no_outputs_are_refused_before_training(value):
    expected = "'logits' is no output of span_qa with a loss; expected start, end$"
    with pytest.raises(UserError, match=f"^loss: {expected}"):
        losses_by_output(SPAN, {"start": "auto", "logits": value})
    for argument in ("metrics", "weighted_metrics"):
        with pytest.raises(UserError, match=f"^{argument}: {expected}"):
            metrics_of(SPAN, **{argument: {"logits": value}})


SPARSE = r"keras\.losses\.SparseCategoricalCrossentropy\(from_logits=True\)"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("sparse_categorical_crossentropy", f"expected 'auto' or an object, such as {SPARSE}$"),
        ("mse", r"object, such as keras\.losses\.MeanSquaredError\(\)$"),
        ("mean_squared_error", r"object, such as keras\.losses\.MeanSquaredError\(\)$"),
        ("unknown", "^loss='unknown': expected 'auto' or an object$"),
        (keras_losses.SparseCategoricalCrossentropy(), "probabilities, .*from_logits=True"),
        (keras_losses.BinaryCrossentropy(), "^loss: BinaryCrossentropy expects probabilities"),
        (keras_losses.categorical_crossentropy, "^loss: categorical_crossentropy expects prob"),
        ({"label": "mse"}, "^loss='mse': expected 'auto'"),
    ],
)
def test_names_and_losses_of_probabilities_are_refused_before_training(loss, message):
    with pytest.raises(UserError, match=message):
        losses_by_output(THREE, loss)


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
@pytest.mark.parametrize("name", ["accuracy", "acc"])
@pytest.mark.parametrize("task", [THREE, TWO, MULTI], ids=["three", "two", "multi"])
def test_the_accuracy_is_that_of_the_labels(task, name, argument):
    """Compare with the decisions by argmax, or by the sign of a logit."""
    logits = LOGITS[task]
    if task is THREE:
        expected = np.mean(logits.argmax(1) == LABELS[task])
    else:
        expected = np.mean((logits > 0) == LABELS[task].reshape(logits.shape))
    unweighted, weighted = metrics_of(task, **{argument: [name]})
    assert not any(unweighted.values())  # Padding and missing labels have the weight 0.
    (metric,) = weighted["label"]
    assert metric.name == "accuracy"
    metric.update_state(LABELS[task], logits)
    assert float(metric.result()) == pytest.approx(expected)


def test_metrics_of_the_user_and_of_keras():
    assert sorted(metrics_of(SPAN, ["accuracy"])[1]) == ["end", "start"]
    top = keras_metrics.SparseTopKCategoricalAccuracy(2)
    assert metrics_of(THREE, [top]) == ({"label": [top]}, {"label": []})
    assert metrics_of(NUMBER, weighted_metrics=top) == ({}, {"value": [top]})
    assert metrics_of(NUMBER) == ({}, {})
    assert metrics_of(THREE, []) == ({"label": []}, {"label": []})
    function = keras_metrics.MeanAbsoluteError()
    unweighted, weighted = metrics_of(THREE, ["accuracy", function])
    assert unweighted == {"label": [function]} and len(weighted["label"]) == 1
    precision = keras_metrics.Precision(thresholds=0)
    assert metrics_of(TWO, {"label": precision})[0] == {"label": [precision]}
    others = [
        keras_metrics.AUC(from_logits=True),
        keras_metrics.TruePositives(thresholds=[0]),
        keras_metrics.BinaryIoU(threshold=0),
        keras_metrics.Precision(top_k=2),  # Which has a threshold below all logits.
    ]
    assert metrics_of(MULTI, others)[0] == {"label": others}


@pytest.mark.parametrize(
    ("task", "metric", "message"),
    [
        (NUMBER, "accuracy", "^metrics='accuracy': expected an object, such as keras.metrics.Acc"),
        (
            NUMBER,
            "mae",
            r"an object, such as keras\.metrics\.MeanAbsoluteError\(\); the task's",
        ),
        (THREE, "binary_accuracy", r"'accuracy' or an object, .*metrics\.BinaryAccuracy\(\); the"),
        (TWO, "AUC", r"such as keras\.metrics\.AUC\(from_logits=True\); the task's metrics on val"),
        (MULTI, "AUC", r"such as keras\.metrics\.AUC\(from_logits=True\); the task's metrics on v"),
        (
            THREE,
            "macro_f1",
            "'accuracy' or an object; the task's metrics on validation rows are",
        ),
        (TWO, keras_metrics.BinaryAccuracy(), "BinaryAccuracy compares logits with 0.5; pass thre"),
        (TWO, keras_metrics.Precision(), "Precision compares logits with 0.5; pass thresholds=0"),
        (TWO, keras_metrics.Recall(thresholds=0.3), "Recall compares logits with 0.3; pass thresh"),
        *(
            (TWO, getattr(keras_metrics, f"{which}s")(), f"{which}s compares .* 0.5; pass thresh")
            for which in ("TruePositive", "TrueNegative", "FalsePositive", "FalseNegative")
        ),
        (TWO, keras_metrics.BinaryIoU(), "BinaryIoU compares logits with 0.5; pass threshold=0"),
        (MULTI, keras_metrics.F1Score(threshold=0.5), "F1Score compares logits with 0.5; pass thr"),
        (TWO, keras_metrics.AUC(), "metrics: AUC expects probabilities, .* with from_logits=True"),
        (TWO, keras_metrics.BinaryCrossentropy(), "BinaryCrossentropy expects probabilities"),
        (SPAN, keras_metrics.MeanSquaredError(), "metrics: expected a dict by output: start, end"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_training(task, metric, message):
    with pytest.raises(UserError, match=message):
        metrics_of(task, [metric])


def test_means_of_an_epoch_are_weighted():
    """Over all batches: (6 + 2) / (3 + 1), and 4 / 2 of the other term, of the factor 0.5."""
    means = LossMeans(["start", "end"])
    means.loss_weights = {"start": 1.0, "end": 0.5}
    start = [(6.0, 3.0), (2.0, 1.0)]
    for (total, divisor), end in zip(start, [(4.0, 1.0), (0.0, 1.0)], strict=True):
        of_batch = {"start": (total, divisor), "end": end, OWN_LOSSES: (0.5, 1.0)}
        means.update_state({name: tuple(map(tf.constant, pair)) for name, pair in of_batch.items()})
    found = {name: float(value) for name, value in means.result().items()}
    assert found == {"loss": 2.0 + 0.5 * 2.0 + 0.5, "start_loss": 2.0, "end_loss": 2.0}
    assert isinstance(means, keras.metrics.Metric)
