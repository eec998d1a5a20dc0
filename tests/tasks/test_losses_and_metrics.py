"""Names of losses and metrics of Keras, for outputs that are logits."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tasks.model.keras_names import compile_arguments as resolve

from bert_tf import UserError
from tasks.model import keras_names
from tasks.types.anomaly import AnomalyTask
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.masked_lm import MaskedLmTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.ranking import RankingTask
from tasks.types.regression import RegressionTask
from tasks.types.similarity.text_embedder import SimilarityTask
from tasks.types.tagging import TaggingTask
from tests.rating_task import RatingTask

THREE = ClassificationTask(max_seq_length=8, labels=("a", "b", "c"))
TWO = ClassificationTask(max_seq_length=8, labels=("a", "b"))
MULTI = ClassificationTask(max_seq_length=8, labels=("a", "b", "c"), multi_label=True)
FOCAL = ClassificationTask(max_seq_length=8, labels=("a", "b", "c"), focal_gamma=2.0)
NUMBER = RegressionTask(max_seq_length=8)
TAGS = TaggingTask(max_seq_length=8, labels=("O", "B-X", "I-X"), doc_stride=2)
CHOICE = MultipleChoiceTask(max_seq_length=8)
SPAN = QuestionAnsweringTask(max_seq_length=8, doc_stride=2, max_query_length=2)
MASKED = MaskedLmTask(max_seq_length=8)
RANKS = RankingTask(max_seq_length=8)
LISTS = RankingTask(max_seq_length=8, ranking_loss="listwise")
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
SPARSE, BINARY = "sparse_categorical_crossentropy", "binary_crossentropy"
keras_losses, keras_metrics = keras.losses, keras.metrics


@pytest.mark.parametrize(
    ("task", "loss"),
    [
        (THREE, SPARSE),
        (THREE, keras_losses.sparse_categorical_crossentropy),
        (THREE, {"label": SPARSE}),
        (THREE, keras_losses.SparseCategoricalCrossentropy(from_logits=True)),
        (TWO, BINARY),
        (TWO, SPARSE),
        (TWO, keras_losses.BinaryCrossentropy(from_logits=True)),
        (MULTI, BINARY),
        (MULTI, keras_losses.BinaryCrossentropy(from_logits=True)),
        (NUMBER, "mse"),
        (NUMBER, "mean_squared_error"),
        (NUMBER, keras_losses.MeanSquaredError()),
    ],
)
def test_a_loss_of_keras_is_that_of_the_task(task, loss):
    (function,) = task.losses.values()
    expected = np.mean(function(LABELS[task], tf.constant(LOGITS[task])))
    (found,) = resolve(task, loss)["loss"].values()
    assert float(found(LABELS[task], LOGITS[task])) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["mae", "huber", keras_losses.LogCosh(), lambda y, x: y - x])
def test_other_losses_of_numbers_and_those_of_the_user_are_left_to_keras(loss):
    assert callable(keras_losses.get(resolve(NUMBER, loss)["loss"]["value"]))


def test_a_focal_loss_gets_logits():
    loss = resolve(TWO, "binary_focal_crossentropy")["loss"]["label"]
    assert loss.from_logits


@pytest.mark.parametrize(("task", "outputs"), [(TAGS, 1), (CHOICE, 1), (SPAN, 2), (MASKED, 2)])
def test_all_outputs_get_the_loss(task, outputs):
    assert len(resolve(task)["loss"]) == len(resolve(task)["weighted_metrics"]) == outputs
    found = resolve(task, SPARSE)["loss"]
    assert [loss.function for loss in found.values()] == list(task.losses.values())
    assert len(found) == outputs


@pytest.mark.parametrize(("task", "loss"), [(RANKS, BINARY), (LISTS, "categorical_crossentropy")])
def test_the_loss_of_a_query_leaves_out_missing_texts(task, loss):
    assert resolve(task, loss)["loss"]["score"].function is task.losses["score"]


@pytest.mark.parametrize(
    ("task", "loss", "message"),
    [
        (THREE, "mse", f"loss='mean_squared_error': does not fit .*; expected auto, {SPARSE}$"),
        (THREE, BINARY, "does not fit the output 'label' of classification; expected auto"),
        (THREE, "categorical_crossentropy", f"expected auto, {SPARSE}"),
        (THREE, "unknown", "loss='unknown': does not fit"),
        (THREE, keras_losses.SparseCategoricalCrossentropy(), "probabilities, .*from_logits=True"),
        (TWO, keras_losses.BinaryCrossentropy(), "loss: BinaryCrossentropy expects probabilities"),
        (
            TWO,
            keras_losses.SparseCategoricalCrossentropy(from_logits=True),
            r"with two labels, which is one logit; expected auto, BinaryCrossentropy\(\.\.\.\)",
        ),
        (MULTI, SPARSE, "of classification with multi_label; expected auto, binary_crossentropy"),
        (MULTI, keras_losses.MeanSquaredError(), r"expected auto, BinaryCrossentropy\(\.\.\.\)"),
        (NUMBER, SPARSE, "of regression; expected auto, mean_squared_error, mean_absolute_error"),
        (FOCAL, SPARSE, "expected auto$"),
        (SPAN, "mse", "of span_qa; expected auto, sparse_categorical_crossentropy"),
        (RANKS, "mse", "'score' of ranking; expected auto, binary_crossentropy$"),
        (RANKS, keras_losses.BinaryCrossentropy(from_logits=True), "of ranking; expected auto$"),
        (LISTS, BINARY, "'score' of ranking; expected auto, categorical_crossentropy$"),
        (AnomalyTask(max_seq_length=8), "mse", "'score' of anomaly; expected auto$"),
        (SimilarityTask(max_seq_length=8), keras_losses.CosineSimilarity(), "expected auto$"),
    ],
)
def test_losses_that_do_not_fit_are_refused_before_training(task, loss, message):
    with pytest.raises(UserError, match=message):
        resolve(task, loss)


@pytest.mark.parametrize("argument", ["loss", "metrics", "weighted_metrics"])
@pytest.mark.parametrize("value", ["auto", "mse"])
def test_names_that_are_no_outputs_are_refused_before_training(argument, value):
    message = f"^{argument}: 'logits' is no output of span_qa; expected start, end$"
    with pytest.raises(UserError, match=message):
        resolve(SPAN, **{argument: {"start": SPARSE, "logits": value}})


def test_metrics_are_those_of_outputs_with_a_loss():
    loss = {"start": SPARSE, "end": None}
    for metrics in ({}, {"weighted_metrics": ["accuracy"]}, {"metrics": "accuracy"}):
        assert list(resolve(SPAN, loss, **metrics)["weighted_metrics"]) == ["start"]
    message = "^metrics: 'end' is no output with a loss of span_qa; expected start$"
    with pytest.raises(UserError, match=message):
        resolve(SPAN, loss, metrics={"end": "accuracy"})


@pytest.mark.parametrize(
    ("task", "name"),
    [
        *((THREE, name) for name in ("accuracy", "acc", "sparse_categorical_accuracy")),
        *((TWO, name) for name in ("accuracy", "binary_accuracy", "sparse_categorical_accuracy")),
        *((MULTI, name) for name in ("accuracy", "binary_accuracy")),
    ],
)
def test_accuracies_are_those_of_the_labels(task, name):
    """Compare with the decisions by argmax, or by the sign of a logit."""
    logits = LOGITS[task]
    if task is THREE:
        expected = np.mean(logits.argmax(1) == LABELS[task])
    else:
        expected = np.mean((logits > 0) == LABELS[task].reshape(logits.shape))
    arguments = resolve(task, metrics=[name])
    assert arguments["metrics"] is None
    metrics = arguments["weighted_metrics"]["label"]
    names = {"accuracy", "accuracy" if name == "acc" else name}
    assert sorted(metric.name for metric in metrics) == sorted(names)
    for metric in metrics:
        metric.update_state(LABELS[task], logits)
        assert float(metric.result()) == pytest.approx(expected)


def test_metrics_of_the_user_and_of_keras():
    assert sorted(resolve(SPAN, metrics=["accuracy"])["weighted_metrics"]) == ["end", "start"]
    top = keras_metrics.SparseTopKCategoricalAccuracy(2)
    assert resolve(THREE, metrics=[top])["metrics"] == {"label": [top]}
    assert resolve(NUMBER, metrics="mae")["metrics"] == {"value": ["mae"]}
    assert resolve(NUMBER)["weighted_metrics"] is None
    assert resolve(THREE, weighted_metrics=None)["weighted_metrics"] is None
    (chosen,) = resolve(THREE, metrics=["acc"], weighted_metrics=None)["weighted_metrics"]["label"]
    assert chosen.name == "accuracy"
    both = resolve(NUMBER, metrics=["mae"], weighted_metrics=["mse"])
    assert both["weighted_metrics"] == {"value": ["mse"]}
    precision = keras_metrics.Precision(thresholds=0)
    assert resolve(TWO, metrics={"label": precision})["metrics"] == {"label": [precision]}
    others = [
        keras_metrics.AUC(from_logits=True),
        keras_metrics.TruePositives(thresholds=[0]),
        keras_metrics.BinaryIoU(threshold=0),
    ]
    assert resolve(TWO, metrics=others)["metrics"] == {"label": others}
    best = keras_metrics.Precision(top_k=2)  # Which has a threshold below all logits.
    assert resolve(MULTI, metrics=[best])["metrics"] == {"label": [best]}


@pytest.mark.parametrize(
    ("task", "metric", "message"),
    [
        (NUMBER, "accuracy", "metrics='accuracy': does not fit the output 'value' of regression"),
        (THREE, "binary_accuracy", "expected accuracy, sparse_categorical_accuracy, sparse_top"),
        (THREE, "mse", "metrics='mean_squared_error': does not fit"),
        (THREE, keras_metrics.CategoricalAccuracy(), "metrics='categorical_accuracy': does not"),
        (TWO, keras_metrics.BinaryAccuracy(), "BinaryAccuracy compares logits with 0.5; pass thre"),
        (TWO, keras_metrics.Precision(), "Precision compares logits with 0.5; pass thresholds=0"),
        (TWO, keras_metrics.Recall(thresholds=0.3), "Recall compares logits with 0.3; pass thresh"),
        *(
            (TWO, getattr(keras_metrics, f"{which}s")(), f"{which}s compares .* 0.5; pass thresh")
            for which in ("TruePositive", "TrueNegative", "FalsePositive", "FalseNegative")
        ),
        (TWO, keras_metrics.BinaryIoU(), "BinaryIoU compares logits with 0.5; pass threshold=0"),
        (MULTI, keras_metrics.F1Score(threshold=0.5), "metrics='f1score': does not fit the output"),
        (MULTI, keras_metrics.FBetaScore(), "metrics='fbeta_score': does not fit the output"),
        (TWO, keras_metrics.PrecisionAtRecall(0.5), "metrics='precision_at_recall': does not fit"),
        (TWO, keras_metrics.SensitivityAtSpecificity(0.5), "at_specificity': does not fit the out"),
        (TWO, keras_metrics.AUC(), "metrics: AUC expects probabilities, .* pass from_logits=True"),
        (TWO, keras_metrics.SparseCategoricalAccuracy(), "with two labels, which is one logit"),
        (TWO, "AUC", "metrics='auc': does not fit"),
        (SPAN, keras_metrics.MeanSquaredError(), "metrics: expected a dict by output: start, end"),
        (SPAN, "mse", "does not fit the output 'start' of span_qa; expected accuracy"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_training(task, metric, message):
    with pytest.raises(UserError, match=message):
        resolve(task, metrics=[metric])


def test_thresholds_of_values_are_those_of_the_user():
    metric = keras_metrics.Precision(thresholds=0.3)
    resolve(NUMBER, metrics=[metric])


@pytest.mark.parametrize(
    ("monitor", "logs", "best"),
    [
        ("val_accuracy", (0.5, 0.9), 0.9),
        ("val_macro_f1", (0.5, 0.9), 0.9),
        ("val_loss", (0.9, 0.5), 0.5),
        ("val_mean_squared_error", (0.9, 0.5), 0.5),
        ("val_ece", (0.9, 0.5), 0.5),
    ],
)
def test_callbacks_wait_for_better_metrics(monitor, logs, best):
    stop = keras.callbacks.EarlyStopping(monitor, patience=5)
    keras_names.set_directions(THREE, [stop, keras.callbacks.History()])
    stop.set_model(types.SimpleNamespace(stop_training=False))
    stop.on_train_begin()
    for epoch, value in enumerate((*logs, logs[0])):
        stop.on_epoch_end(epoch, {monitor: value})
    assert stop.best == best


def test_keras_asks_for_the_direction_of_a_metric_of_another_project():
    names = ("val_accuracy", "val_loss", "val_mean_absolute_error")
    callbacks = [keras.callbacks.EarlyStopping(name) for name in names]
    keras_names.set_directions(RatingTask(max_seq_length=8), callbacks)
    assert [callback.mode for callback in callbacks] == ["max", "min", "auto"]
