"""Metrics of labels: by hand, at the edges, and against scikit-learn."""

import subprocess
import sys

import numpy as np
import pytest
import sklearn.metrics

from tasks.metrics import labels
from tests.conftest import ROOT

# Of three 0, two are found; of two 1, one; the only 2 is predicted as 1.
LABELS, PREDICTIONS = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 1])
METRICS = (labels.accuracy, labels.macro_f1, labels.micro_f1, labels.matthews_correlation)
SETS_METRICS = (
    labels.multi_label_micro_f1,
    labels.multi_label_macro_f1,
    labels.exact_match_ratio,
)


def test_scores_by_hand():
    assert labels.accuracy(LABELS, PREDICTIONS) == 3 / 6
    assert labels.f1(LABELS, PREDICTIONS, positive=0) == 4 / 6
    assert labels.f1(LABELS, PREDICTIONS, positive=2) == 0
    assert labels.macro_f1(LABELS, PREDICTIONS) == pytest.approx((4 / 6 + 2 / 5 + 0) / 3)
    assert labels.confusion_matrix(LABELS, PREDICTIONS, 4).tolist() == [
        [2, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
    ]
    metrics = labels.per_class_f1(LABELS, PREDICTIONS, 4)
    assert metrics["precision"].tolist() == [2 / 3, 1 / 3, 0, 0]
    assert metrics["recall"].tolist() == [2 / 3, 1 / 2, 0, 0]
    assert metrics["f1"].tolist() == [4 / 6, 2 / 5, 0, 0]
    assert metrics["support"].tolist() == [3, 2, 1, 0]
    # Two classes: (TP TN - FP FN) / sqrt(3 * 3 * 2 * 2).
    assert labels.matthews_correlation(
        np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    ) == pytest.approx((2 * 1 - 1 * 1) / 6)


def test_scores_of_sets_by_hand():
    labels_NC = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    predictions_NC = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]], bool)
    assert labels.multi_label_micro_f1(labels_NC, predictions_NC) == 2 * 2 / (3 + 3)
    assert labels.multi_label_macro_f1(labels_NC, predictions_NC) == pytest.approx(1 / 3)
    assert labels.exact_match_ratio(labels_NC, predictions_NC) == pytest.approx(1 / 3)


@pytest.mark.filterwarnings("ignore:A single label was found")
def test_scores_equal_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(150):
        classes, examples = rng.integers(1, 6), rng.integers(1, 40)
        gold = rng.integers(0, classes, examples)
        guess = np.where(rng.random(examples) < 0.5, gold, rng.integers(0, classes, examples))
        every = {"labels": range(classes), "zero_division": 0}
        assert labels.accuracy(gold, guess) == sklearn.metrics.accuracy_score(gold, guess)
        for ours, average in ((labels.macro_f1, "macro"), (labels.micro_f1, "micro")):
            theirs = sklearn.metrics.f1_score(gold, guess, average=average, zero_division=0)
            assert ours(gold, guess) == pytest.approx(theirs)
        expected = sklearn.metrics.precision_recall_fscore_support(gold, guess, **every)
        np.testing.assert_allclose(
            list(labels.per_class_f1(gold, guess, classes).values()), expected, rtol=1e-12
        )
        for label in range(classes):
            assert labels.f1(gold, guess, label) == pytest.approx(expected[2][label])
        np.testing.assert_array_equal(
            labels.confusion_matrix(gold, guess, classes),
            sklearn.metrics.confusion_matrix(gold, guess, labels=range(classes)),
        )
        if len(np.union1d(gold, guess)) > 1:  # scikit-learn warns about a single class.
            assert labels.matthews_correlation(gold, guess) == pytest.approx(
                sklearn.metrics.matthews_corrcoef(gold, guess), abs=1e-12
            )


def test_scores_of_sets_equal_scikit_learn():
    rng = np.random.default_rng(1)
    for _ in range(150):
        shape = rng.integers(1, 30), rng.integers(2, 6)
        density = rng.choice([0.05, 0.3, 0.8])
        gold = rng.random(shape) < density
        guess = np.where(rng.random(shape) < 0.6, gold, rng.random(shape) < density)
        for ours, average in (
            (labels.multi_label_micro_f1, "micro"),
            (labels.multi_label_macro_f1, "macro"),
        ):
            theirs = sklearn.metrics.f1_score(gold, guess, average=average, zero_division=0)
            assert ours(gold, guess) == pytest.approx(theirs)
        assert labels.exact_match_ratio(gold, guess) == sklearn.metrics.accuracy_score(gold, guess)


def test_undefined_scores_are_0():
    nothing, ones = np.array([], int), np.ones(4, int)
    for metric in METRICS:
        assert metric(nothing, nothing) == 0
    for metric in SETS_METRICS:
        assert metric(np.zeros((0, 3), bool), np.zeros((0, 3), bool)) == 0
    assert labels.f1(ones, ones, positive=0) == 0
    assert labels.matthews_correlation(ones, ones) == 0
    assert labels.matthews_correlation(np.array([0, 1, 1, 0]), ones) == 0
    assert labels.multi_label_micro_f1(np.zeros((2, 3), bool), np.zeros((2, 3), bool)) == 0
    assert labels.confusion_matrix(nothing, nothing, 2).tolist() == [[0, 0], [0, 0]]
    for metric in labels.per_class_f1(nothing, nothing, 2).values():
        assert metric.tolist() == [0, 0]


def test_matthews_of_a_million_examples_does_not_overflow():
    gold = np.arange(10**6) % 3
    assert labels.matthews_correlation(gold, gold) == pytest.approx(1)


def test_arrays_of_different_lengths_are_rejected():
    for metric in METRICS:
        with pytest.raises(ValueError, match=r"shapes \(6,\) and \(6, 1\): expected equal shapes"):
            metric(LABELS, PREDICTIONS[:, np.newaxis])
    for label in (-1, 3):
        with pytest.raises(ValueError, match="invalid entry"):
            labels.confusion_matrix(np.array([0, 1]), np.array([0, label]), 3)


def test_metrics_need_no_tensorflow():
    names = "calibration entities labels ranking regression squad thresholds".split()
    code = "; ".join(f"import tasks.metrics.{name}" for name in names)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print('tensorflow' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
