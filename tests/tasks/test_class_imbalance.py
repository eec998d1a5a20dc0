"""Rare classes: options, losses, metrics, and values tuned on dev."""

import dataclasses
import json
import math
import types
import unittest.mock

import numpy as np
import pytest
import sklearn.utils.class_weight
import tensorflow as tf

from bert_tf import UserError
from bert_tf.text.encoder_inputs import Packed, to_flat
from bert_tf.train import losses
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.windows import one_window_each
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small

# Eight rows: 4 a, 3 b, 1 c.
ROWS = [("the bill", "a")] * 4 + [("my screen", "b")] * 3 + [("the app", "c")]


@pytest.fixture
def train(tmp_path):
    return small.write_rows(tmp_path / "train.csv", ROWS)


def from_data(path, **options):
    return ClassificationTask.from_data(path, max_seq_length=12, **options)


def data_of(labels):
    return types.SimpleNamespace(labels={"label": np.array(labels, np.int32)})


# Options.


def test_class_weights_are_those_given_or_balanced(train):
    task = from_data(train, class_weights=("balanced",))
    assert task.class_weights == pytest.approx((8 / 12, 8 / 9, 8 / 3))
    weights = task.sample_weights(task.load_examples(train), None)
    np.testing.assert_allclose(weights, [8 / 12] * 4 + [8 / 9] * 3 + [8 / 3])
    sklearns = sklearn.utils.class_weight.compute_class_weight(
        "balanced", classes=np.array(list("abc")), y=[label for _, label in ROWS]
    )
    np.testing.assert_allclose(task.class_weights, sklearns)
    task = from_data(train, class_weights=("1", "2.5", "1e1"), labels=("c", "b", "a"))
    np.testing.assert_allclose(
        task.sample_weights(task.load_examples(train), None), [10] * 4 + [2.5] * 3 + [1]
    )
    assert from_data(train).sample_weights(task.load_examples(train), None) is None


def test_every_class_is_drawn_equally_often(train):
    task = from_data(train, balanced_sampling=True)
    windows = one_window_each(Packed(tf.ragged.constant([[1]] * 8), None))
    data = EncodedExamples(task, task.load_examples(train), windows, None, to_flat)
    rng = unittest.mock.Mock()
    assert task.epoch_order(data, rng) is rng.choice.return_value
    expected = [1 / 12] * 4 + [1 / 9] * 3 + [1 / 3]
    np.testing.assert_allclose(rng.choice.call_args.kwargs["p"], expected)
    assert from_data(train).epoch_order(data, rng) is rng.permutation.return_value


@pytest.mark.parametrize("shuffle", [True, False])
def test_classes_are_drawn_with_and_without_shuffling(shuffle):
    task = ClassificationTask(labels=("a", "b"), max_seq_length=12, balanced_sampling=True)
    examples = Examples({"text": ["the app"] * 100}, [0] * 95 + [1] * 5)
    windows = one_window_each(Packed(tf.ragged.constant([[1]] * 100), None))
    encoded = EncodedExamples(task, examples, windows, None, to_flat)
    orders = [encoded._order(epoch, 100, 0, shuffle=shuffle) for epoch in range(20)]
    rows = np.concatenate(orders)
    assert 0.4 < np.mean(rows >= 95) < 0.6
    assert np.all(np.diff(rows) >= 0) == (not shuffle)
    assert np.any(rows[0] != rows[1])


@pytest.mark.parametrize(
    ("labels", "multi_label", "expected"),
    [
        ("a b", False, losses.sigmoid_cross_entropy),
        ("a b c", False, losses.softmax_cross_entropy),
        ("a b c", True, losses.multi_label_cross_entropy),
    ],
)
def test_the_focal_loss_matches_the_kind_of_labels(labels, multi_label, expected):
    task = ClassificationTask(
        labels=tuple(labels.split()), multi_label=multi_label, focal_gamma=2.0, max_seq_length=8
    )
    loss = task.losses["label"]
    assert (loss.func, loss.keywords) == (expected, {"gamma": 2.0})
    assert dataclasses.replace(task, focal_gamma=0.0).losses["label"] is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"class_weights": ("1", "2")},
            "--class_weights=1,2: 2 weights; expected 3, in the order of",
        ),
        (
            {"class_weights": ("1", "2", "x")},
            "--class_weights=1,2,x: 'x': expected a number > 0",
        ),
        (
            {"class_weights": ("1", "2", "0")},
            "--class_weights=1,2,0: '0': expected a number > 0",
        ),
        ({"class_weights": ("inf", "2", "1")}, "'inf': expected a number > 0"),
        ({"class_weights": ("balanced", "1")}, "'balanced': expected a number > 0"),
        (
            {"class_weights": ("balanced",), "balanced_sampling": True},
            "--balanced_sampling: with --class_weights=balanced",
        ),
        ({"rare_label": "d"}, "--rare_label=d: expected one of a, b, c"),
        (
            {"threshold_objective": "f1"},
            "--threshold_objective=f1: requires --rare_label, the label that has the threshold",
        ),
        (
            {"threshold_objective": "f2", "rare_label": "c"},
            "--threshold_objective=f2: expected f1, precision=P or recall=R",
        ),
        (
            {"multi_label": True, "class_weights": ("balanced",)},
            "--class_weights: not supported with --multi",
        ),
        (
            {"multi_label": True, "balanced_sampling": True},
            "--balanced_sampling: not supported with --multi",
        ),
        (
            {"multi_label": True, "rare_label": "c"},
            "--rare_label: not supported with --multi_label",
        ),
        (
            {"multi_label": True, "file_format": "sst2"},
            "--multi_label: rows of sst2 have exactly one label",
        ),
    ],
)
def test_conflicting_options_are_reported_in_one_line(train, options, message):
    with pytest.raises(UserError, match=message) as raised:
        from_data(train, **options)
    assert "\n" not in str(raised.value)


def test_of_two_labels_the_rare_one_is_the_second(tmp_path):
    path = small.write_rows(tmp_path / "two.csv", [("the bill", "x"), ("my app", "a")])
    for label, labels in (("a", ("x", "a")), ("x", ("a", "x"))):
        for given in ((), labels):
            task = from_data(
                path, rare_label=label, labels=given, class_weights=("1", "3"), focal_gamma=2.0
            )
            assert (task.labels, task.threshold_objective) == (labels, "f1")
            assert task.labels[task.positive] == label and task.best_metric == "pr_auc"
    message = "rare_label=a: of two labels, the second is the positive label; set --labels=x,a"
    with pytest.raises(UserError, match=message):
        from_data(path, rare_label="a", labels=("a", "x"))
    with pytest.raises(UserError, match=message):
        ClassificationTask.from_options(max_seq_length=12, labels=["a", "x"], rare_label="a")
    assert from_data(path, labels=("a", "x")).labels == ("a", "x")


def test_an_objective_of_one_threshold_requires_its_label(tmp_path):
    path = small.write_rows(tmp_path / "two.csv", [("the bill", "x"), ("my app", "a")])
    message = "threshold_objective=recall=0.5: requires --rare_label, the label"
    with pytest.raises(UserError, match=message):
        from_data(path, threshold_objective="recall=0.5")
    with pytest.raises(UserError, match=message):
        ClassificationTask.from_options(
            max_seq_length=12, labels=["a", "x"], threshold_objective="recall=0.5"
        )


def test_the_log_names_the_label_of_each_threshold():
    binary = ClassificationTask(
        max_seq_length=12, labels=("ok", "fraud"), rare_label="fraud", thresholds=(0.25,)
    )
    assert binary.tuned_summary() == "threshold 0.25 of label 'fraud'"
    rare = dataclasses.replace(binary, labels=("a", "fraud", "b"), calibrate=True, temperature=1.5)
    assert rare.tuned_summary() == "temperature 1.5, threshold 0.25 of label 'fraud'"
    several = ClassificationTask(
        max_seq_length=12, labels=("a", "b"), multi_label=True, thresholds=(0.1, 0.2)
    )
    assert several.tuned_summary() == "threshold 0.1 of label 'a', threshold 0.2 of label 'b'"


def test_a_rare_label_in_python_has_a_threshold_too():
    def create(labels, **options):
        return ClassificationTask.from_options(max_seq_length=12, labels=labels, **options)

    for labels, rare_label in ((["a", "b", "c"], "c "), ([0, 1, 2], 2), (["a", "b"], "b")):
        task = create(labels, rare_label=rare_label)
        assert task.rare_label == task.labels[-1]
        assert (task.threshold_objective, task.tunable_fields) == ("f1", {"thresholds": (1,)})
    task = create(["a", "b", "c"], rare_label="c", threshold_objective="recall=0.5")
    assert task.threshold_objective == "recall=0.5"
    assert not create(["a", "b", "c"]).tunable_fields


def test_flags_are_rejected_before_any_file_is_read(huggingface_dir, complaints, tmp_path):
    for changes, message in (
        ({"class_weights": ("1", "x")}, "'x': expected a number > 0"),
        (
            {"threshold_objective": "precision=2", "rare_label": "billing"},
            "--threshold_objective=precision=2",
        ),
        (
            {"multi_label": True, "rare_label": "billing"},
            "--rare_label: not supported with --multi_label",
        ),
        ({"rare_label": "billing", "dev": ()}, "--rare_label: requires --dev"),
    ):
        with pytest.raises(UserError, match=message):
            small.settings(huggingface_dir, complaints, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({}, "accuracy"),
        ({"calibrate": True}, "accuracy"),
        ({"focal_gamma": 2.0}, "macro_f1"),
        ({"class_weights": (1.0, 2.0, 3.0)}, "macro_f1"),
        ({"balanced_sampling": True}, "macro_f1"),
        ({"rare_label": "c", "threshold_objective": "f1", "focal_gamma": 2.0}, "rare_pr_auc"),
        ({"file_format": "mnli"}, "accuracy"),
        ({"file_format": "cola"}, "matthews"),
        ({"file_format": "cola", "focal_gamma": 2.0}, "macro_f1"),
        ({"multi_label": True}, "micro_f1"),
        ({"multi_label": True, "threshold_objective": "f1"}, "pr_auc"),
    ],
)
def test_the_best_metric_is_among_the_metrics(options, best):
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=8, **options)
    assert task.best_metric == best
    rows = np.eye(3) if task.multi_label else [0, 1, 2]
    assert best in task.metrics(data_of(rows), {"label": np.eye(3, dtype=np.float32)})
    assert task_from_dict(json.loads(json.dumps(task.to_dict()))) == task


# Metrics.


def test_metrics_of_a_rare_class_by_hand():
    """Use p(c) = 0.7, 0.38, 0.4, 0.1 in four rows; from 0.35 on, c is predicted."""
    task = ClassificationTask(
        labels=("a", "b", "c"),
        rare_label="c",
        threshold_objective="f1",
        thresholds=(0.35,),
        max_seq_length=8,
    )
    logits = np.log([[0.2, 0.1, 0.7], [0.5, 0.12, 0.38], [0.1, 0.5, 0.4], [0.8, 0.1, 0.1]])
    metrics = task.metrics(data_of([2, 2, 1, 0]), {"label": logits.astype(np.float32)})
    confidence = [0.7, 0.5, 0.5, 0.8]  # Whether the most likely label is right: yes, no, yes, yes.
    expected = {
        "accuracy": 3 / 4,
        "f1_a": 1,
        "f1_b": 0,
        "f1_c": 4 / 5,
        "macro_f1": (1 + 0 + 4 / 5) / 3,
        "matthews": 5 / math.sqrt(10 * 6),  # (3 * 4 - (1 + 0 + 2 * 3)) of 16 - 10 and 16 - 6.
        "rare_f1": 4 / 5,
        "rare_precision": 2 / 3,
        "rare_recall": 1,
        "rare_pr_auc": 1 / 2 + 1 / 2 * 2 / 3,
        "rare_roc_auc": 3 / 4,
        "ece": (abs(confidence[0] - 1) + abs(0.5 + 0.5 - 1) + abs(0.8 - 1)) / 4,
        "degenerate": 0,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert task.report(data_of([2, 2, 1, 0]), {"label": logits.astype(np.float32)}) == {
        "labels": ["a", "b", "c"],
        "per_label": {
            "precision": [1.0, 0.0, 2 / 3],
            "recall": [1.0, 0.0, 1.0],
            "f1": [1.0, 0.0, 0.8],
            "support": [1, 1, 2],
            # p(a) is 0.2, 0.5, 0.1, 0.8; its row is the last. The row of b has the highest p(b).
            "pr_auc": [1.0, 1.0, 1 / 2 + 1 / 2 * 2 / 3],
        },
        "confusion_matrix": [[1, 0, 0], [0, 0, 1], [0, 0, 2]],
    }


def test_with_many_labels_there_is_no_curve_per_label():
    labels = tuple(f"intent {number}" for number in range(21))
    task = ClassificationTask(labels=labels, max_seq_length=8)
    metrics = task.metrics(data_of(range(21)), {"label": np.eye(21, dtype=np.float32)})
    assert set(metrics) == {"accuracy", "macro_f1", "matthews", "ece", "degenerate"}


def test_equal_predictions_for_all_rows_are_reported_in_words():
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=8)
    same = {"label": np.array([[2.0, 0, 0], [1.0, 0, 0]], np.float32)}
    metrics = task.metrics(data_of([0, 1]), same)
    assert metrics["degenerate"] == 1.0
    assert task.warning(metrics).startswith("every row has the same predicted label")
    metrics = task.metrics(data_of([0, 0]), same)  # Here it is right.
    assert metrics["degenerate"] == 0.0 and task.warning(metrics) is None
    several = dataclasses.replace(task, multi_label=True)
    metrics = several.metrics(data_of([[1, 0, 0], [0, 1, 0]]), {"label": -np.ones((2, 3))})
    assert metrics["degenerate"] == 1.0 and "the same predicted labels" in several.warning(metrics)


# Values tuned on dev.


def test_the_threshold_is_tuned_on_calibrated_probabilities():
    """Use logits twice too large: at temperature 2, rows with odds of 16 are right in 80%."""
    sure = math.log(16)
    logits = np.array([[sure]] * 10 + [[-sure]] * 10, np.float32)
    labels = [1] * 8 + [0] * 2 + [0] * 8 + [1] * 2
    task = ClassificationTask(
        labels=("no", "yes"), calibrate=True, threshold_objective="recall=1", max_seq_length=8
    )
    assert task.tunable_fields == {"temperature": (), "thresholds": (1,)}
    tuned = task.tune(data_of(labels), {"label": logits})
    assert tuned.temperature == pytest.approx(2.0, rel=1e-4)
    # Probabilities are 0.8 and 0.2, not 16/17 and 1/17: the threshold is below the lowest by half
    # of their distance.
    assert tuned.thresholds == pytest.approx((-0.1,), abs=1e-5)
    metrics = tuned.metrics(data_of(labels), {"label": logits})
    assert (metrics["recall"], metrics["precision"]) == (1.0, 0.5)
    assert metrics["ece"] < 1e-4 < task.metrics(data_of(labels), {"label": logits})["ece"]
    assert tuned.warning({**metrics, "degenerate": 0.0}) is None
    only = dataclasses.replace(task, threshold_objective=None).tune(
        data_of(labels), {"label": logits}
    )
    assert only.thresholds is None and only.temperature == tuned.temperature
    assert task_from_dict(json.loads(json.dumps(tuned.to_dict()))) == tuned


def test_a_label_without_dev_rows_is_never_predicted():
    task = ClassificationTask(
        labels=("a", "b", "c"), multi_label=True, threshold_objective="f1", max_seq_length=8
    )
    logits = np.array([[3, -3, -4], [-3, 3, -4]], np.float32)
    tuned = task.tune(data_of([[1, 0, 0], [0, 1, 0]]), {"label": logits})
    found = tuned.decision({"label": np.array([[9, 9, 99]], np.float32)})
    assert found.selected.numpy().tolist() == [[True, True, False]]
    assert task_from_dict(json.loads(json.dumps(tuned.to_dict()))) == tuned


@pytest.mark.parametrize("threshold_objective", ["f1", "precision=0.8", "recall=0.7"])
@pytest.mark.parametrize("form", ["binary", "rare", "multi"])
def test_tuned_thresholds_reach_the_objective(form, threshold_objective):
    """Compare with all thresholds; none of them has a higher F1."""
    rng = np.random.default_rng(7)
    options = {
        "binary": {"labels": ("no", "yes")},
        "rare": {"labels": ("a", "b", "c"), "rare_label": "b"},
        "multi": {"labels": ("a", "b", "c"), "multi_label": True},
    }[form]
    task = ClassificationTask(max_seq_length=8, threshold_objective=threshold_objective, **options)
    if form == "multi":
        labels = (rng.random((80, 3)) < 0.3).astype(np.int32)
        logits = rng.normal(0, 1, (80, 3)) + 2.5 * labels
    else:
        labels = rng.integers(0, len(task.labels), 80)
        logits = rng.normal(0, 1, (80, len(task.labels)))
        logits += 2.0 * np.eye(len(task.labels))[labels]
        logits = logits[:, 1:] - logits[:, :1] if form == "binary" else logits
    outputs, data = {"label": logits.astype(np.float32)}, data_of(labels)
    tuned = task.tune(data, outputs)
    assert len(tuned.thresholds) == (3 if form == "multi" else 1)
    names = task._objective_metrics()
    metrics = tuned.metrics(data, outputs)
    assert tuned.warning(metrics) is None
    if threshold_objective == "f1":
        for threshold in np.linspace(0.01, 0.99, 50):
            # The F1 of a label depends on its own threshold only.
            other = dataclasses.replace(tuned, thresholds=(threshold,) * len(tuned.thresholds))
            others = other.metrics(data, outputs)
            assert all(others[name] <= metrics[name] + 1e-12 for name in names)
    else:
        expected = float(threshold_objective.split("=")[1])
        assert all(metrics[name] >= expected for name in names)


def test_a_dev_file_without_errors_leaves_the_temperature_at_1_with_a_warning():
    task = ClassificationTask(labels=("no", "yes"), calibrate=True, max_seq_length=8)
    outputs = {"label": np.array([[2.0], [1.0], [-3.0]], np.float32)}
    tuned = task.tune(data_of([1, 1, 0]), outputs)
    assert tuned.temperature == 1.0
    (warning,) = task.tuning_warnings(data_of([1, 1, 0]), outputs)
    assert warning.startswith("--calibrate: file with too few errors")
    (warning,) = task.tuning_warnings(data_of([0, 0, 1]), outputs)
    assert warning.startswith("--calibrate: file with labels unrelated to the logits")
    assert task.tuning_warnings(data_of([1, 0, 0]), outputs) == []
    assert dataclasses.replace(task, calibrate=False).tuning_warnings(None, outputs) == []


def test_an_objective_that_is_not_reached_is_reported():
    task = ClassificationTask(
        labels=("no", "yes"), threshold_objective="precision=0.9", max_seq_length=8
    )
    data, outputs = data_of([0, 1, 0]), {"label": np.array([[3.0], [1], [0]], np.float32)}
    tuned = task.tune(data, outputs)
    warning = tuned.warning(tuned.metrics(data, outputs))
    assert warning == "--threshold_objective=precision=0.9 missed: precision is 0.5000"
    nothing = data_of([0, 0, 0])
    tuned = dataclasses.replace(task, threshold_objective="f1").tune(nothing, outputs)
    assert not tuned.decision(outputs).label.numpy().any()
    assert "--threshold_objective=f1 missed: f1 is 0.0000" in tuned.warning(
        tuned.metrics(nothing, outputs)
    )
