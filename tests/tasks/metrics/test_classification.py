"""Metrics of classification: by hand, at the edges, and against their definitions in loops."""

import subprocess
import sys

import numpy as np
import pytest
import sklearn.metrics

from bert_tf import UserError
from tasks.metrics.classification import (
    accuracy,
    multi_label_metrics,
    multi_label_table,
    positive_class_metrics,
    pr_auc,
    roc_auc,
    single_label_metrics,
    single_label_table,
)
from tests.conftest import ROOT
from tests.tasks.metrics import brute_force

# Of three 0, two are found; of two 1, one; the only 2 is predicted as 1; there is no 3.
LABELS, PREDICTIONS = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 1])
NAMES = ("a", "b", "c", "d")
NOTHING = np.array([], int)


def certain(predictions, num_labels):
    """Return probabilities of 0 and 1."""
    return np.eye(num_labels)[predictions]


def single(labels, predictions, num_labels=4):
    labels, predictions = np.array(labels, int), np.array(predictions, int)
    names = NAMES[:num_labels]
    return single_label_metrics(labels, predictions, certain(predictions, num_labels), names)


def multi(labels_NC, selected_NC):
    names = NAMES[: selected_NC.shape[1]]
    return multi_label_metrics(labels_NC, selected_NC, selected_NC.astype(float), names)


def test_metrics_of_one_label_by_hand():
    metrics = single(LABELS, PREDICTIONS)
    assert list(metrics) == [
        *("accuracy", "macro_f1", "matthews", "f1_a", "f1_b", "f1_c", "f1_d", "ece", "degenerate")
    ]
    # hits N - labelled . predicted = 3 * 6 - (3 * 3 + 2 * 3 + 1 * 0) = 3; 36 - (9 + 4 + 1) = 22
    # for the labels and 36 - (9 + 9) = 18 for the predictions.
    assert metrics.pop("matthews") == pytest.approx(3 / np.sqrt(22 * 18), rel=1e-12)
    # The label d neither occurs nor is predicted: it does not count in the mean.
    assert metrics.pop("macro_f1") == pytest.approx((4 / 6 + 2 / 5 + 0) / 3, rel=1e-12)
    assert metrics == {
        "accuracy": 3 / 6,
        "f1_a": 4 / 6,  # 2 hits; 3 labelled and 3 predicted.
        "f1_b": 2 / 5,  # 1 hit; 2 labelled and 3 predicted.
        "f1_c": 0,
        "f1_d": 0,
        "ece": 0.5,  # Certain of all six, right in three.
        "degenerate": 0,
    }
    # Two classes: (TP TN - FP FN) / sqrt(3 * 3 * 2 * 2).
    two = single([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], 2)
    assert two["matthews"] == pytest.approx((2 * 1 - 1 * 1) / 6, rel=1e-12)


def test_table_of_one_label_by_hand():
    probabilities = np.array([[0.9, 0.1, 0, 0]] * 2 + [[0.2, 0.8, 0, 0]] * 4)
    assert single_label_table(LABELS, PREDICTIONS, probabilities, NAMES) == {
        "labels": list(NAMES),
        "per_label": {
            "precision": [2 / 3, 1 / 3, 0, 0],
            "recall": [2 / 3, 1 / 2, 0, 0],
            "f1": [4 / 6, 2 / 5, 0, 0],
            "support": [3, 2, 1, 0],
            # Each has two steps, two examples and then all six; equal scores of c are one step.
            "pr_auc": pytest.approx([2 / 3 * 1 + 1 / 3 * 3 / 6, 2 / 4, 1 / 6, 0], rel=1e-12),
        },
        "confusion_matrix": [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
    }


def test_metrics_of_sets_by_hand():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    selected = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]], bool)
    probabilities = np.array([[0.9, 0.1, 0], [0.8, 0.2, 0], [0.4, 0.6, 0]])
    metrics = multi_label_metrics(labels, selected, probabilities, NAMES[:3])
    assert metrics == pytest.approx(
        {
            "micro_f1": 2 * 2 / (3 + 3),
            "macro_f1": (1 + 0 + 0) / 3,  # The label c does not occur, but counts.
            "exact_match": 1 / 3,
            "pr_auc": (1 + 1 / 2) / 2,  # Of a and b; c does not count.
            "f1_a": 1,
            "f1_b": 0,
            "f1_c": 0,
            # Confidences, each in a bin of its own: 0.9 twice, both right; 0.8 twice, one right;
            # 0.6 twice, one right; 1 three times, all right.
            "ece": (2 * 0.1 + abs(1.6 - 1) + abs(1.2 - 1)) / 9,
            "degenerate": 0,
        },
        rel=1e-12,
    )
    table = multi_label_table(labels, selected, NAMES[:3])
    assert table == {
        "labels": ["a", "b", "c"],
        "per_label": {
            "precision": [1, 0, 0],
            "recall": [1, 0, 0],
            "f1": [1, 0, 0],
            "support": [2, 1, 0],
        },
        "confusion_matrix": [[[1, 0], [0, 2]], [[1, 1], [1, 0]], [[3, 0], [0, 0]]],
    }


def test_a_single_label_counts_its_own_rows():
    labels, selected = np.array([[1], [0], [0], [0]]), np.zeros((4, 1), bool)
    metrics = multi(labels, selected)
    assert [metrics[name] for name in ("f1_a", "micro_f1", "macro_f1")] == [0, 0, 0]
    assert metrics["exact_match"] == 3 / 4
    assert multi_label_table(labels, selected, NAMES[:1]) == {
        "labels": ["a"],
        "per_label": {"precision": [0], "recall": [0], "f1": [0], "support": [1]},
        "confusion_matrix": [[[3, 0], [1, 0]]],
    }


def test_metrics_equal_their_definitions():
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_labels, examples = rng.integers(2, 5), rng.integers(1, 40)
        gold = rng.integers(0, num_labels, examples)
        guess = np.where(rng.random(examples) < 0.5, gold, rng.integers(0, num_labels, examples))
        metrics = single(gold, guess, num_labels)
        of_each = [
            brute_force.precision_recall_f1(
                brute_force.numbers_of(gold == label), brute_force.numbers_of(guess == label)
            )
            for label in range(num_labels)
        ]
        table = single_label_table(gold, guess, certain(guess, num_labels), NAMES[:num_labels])
        for number, name in enumerate(("precision", "recall", "f1")):
            expected = [row[number] for row in of_each]
            assert table["per_label"][name] == pytest.approx(expected, rel=1e-12)
        assert [type(value) for value in table["per_label"]["support"]] == [int] * num_labels
        present = [label for label in range(num_labels) if label in gold or label in guess]
        macro_f1 = sum(of_each[label][2] for label in present) / len(present)
        assert metrics["macro_f1"] == pytest.approx(macro_f1, rel=1e-12)
        assert metrics["accuracy"] == pytest.approx(np.mean(gold == guess), rel=1e-12)
        # Matthews' coefficient is the correlation of the one-hot rows (Gorodkin 2004).
        both = [
            certain(ids, num_labels) - certain(ids, num_labels).mean(0) for ids in (gold, guess)
        ]
        spread = np.sqrt(np.sum(both[0] ** 2) * np.sum(both[1] ** 2))
        expected = np.sum(both[0] * both[1]) / spread if spread else 0
        assert metrics["matthews"] == pytest.approx(expected, abs=1e-12)


def test_metrics_of_sets_equal_their_definitions():
    rng = np.random.default_rng(1)
    for _ in range(60):
        shape = rng.integers(1, 30), rng.integers(2, 5)
        density = rng.choice([0.05, 0.3, 0.8])
        gold = rng.random(shape) < density
        guess = np.where(rng.random(shape) < 0.6, gold, rng.random(shape) < density)
        metrics = multi(gold, guess)
        every = [brute_force.numbers_of(cells.ravel()) for cells in (gold, guess)]
        micro = brute_force.precision_recall_f1(*every)[2]
        assert metrics["micro_f1"] == pytest.approx(micro, rel=1e-12)
        of_each = [
            brute_force.precision_recall_f1(*map(brute_force.numbers_of, columns))[2]
            for columns in zip(gold.T, guess.T, strict=True)
        ]
        assert metrics["macro_f1"] == pytest.approx(sum(of_each) / len(of_each), rel=1e-12)
        rows = [tuple(row) == tuple(other) for row, other in zip(gold, guess, strict=True)]
        assert metrics["exact_match"] == pytest.approx(sum(rows) / len(rows), rel=1e-12)
        table = multi_label_table(gold, guess, NAMES[: shape[1]])
        expected = sklearn.metrics.multilabel_confusion_matrix(gold, guess)
        assert table["confusion_matrix"] == expected.tolist()
        of_sklearn = sklearn.metrics.precision_recall_fscore_support(gold, guess, zero_division=0)
        for values, expected in zip(table["per_label"].values(), of_sklearn, strict=True):
            assert values == expected.tolist()


def test_undefined_metrics_are_0():
    nothing_NC = np.zeros((0, 3), bool)
    assert accuracy(NOTHING, NOTHING) == accuracy(nothing_NC, nothing_NC) == 0
    assert set(single(NOTHING, NOTHING, 2).values()) == {0}
    assert set(multi(nothing_NC, nothing_NC).values()) == {0}
    unselected = multi(np.zeros((2, 3), bool), np.zeros((2, 3), bool))
    assert (unselected.pop("exact_match"), set(unselected.values())) == (1, {0})
    assert single_label_table(NOTHING, NOTHING, np.zeros((0, 2)), NAMES[:2]) == {
        "labels": ["a", "b"],
        "per_label": {name: [0, 0] for name in ("precision", "recall", "f1", "support", "pr_auc")},
        "confusion_matrix": [[0, 0], [0, 0]],
    }
    table = multi_label_table(nothing_NC, nothing_NC, NAMES[:3])
    assert table["confusion_matrix"] == [[[0, 0], [0, 0]]] * 3
    assert positive_class_metrics(np.zeros(2, bool), np.zeros(2, bool), np.zeros(2)) == {
        **dict.fromkeys(("f1", "precision", "recall", "pr_auc"), 0),
        "roc_auc": 0.5,
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("labels", "predictions", "degenerate"),
    [
        ([1, 1], [1, 1], 0),
        ([0, 1], [1, 1], 1),
        ([1, 1], [0, 1], 0),
        ([0, 0], [1, 1], 0),
        ([0], [0], 0),
    ],
)
def test_one_class_has_no_correlation_and_no_warning(labels, predictions, degenerate):
    metrics = single(labels, predictions, 2)
    assert metrics["matthews"] == 0
    assert metrics["degenerate"] == degenerate
    single_label_table(np.array(labels), np.array(predictions), np.ones((len(labels), 2)), "ab")


def test_many_labels_have_no_metrics_each():
    for num_labels, named in ((20, 20), (21, 0)):
        names = [str(label) for label in range(num_labels)]
        ids, sets = np.arange(num_labels), np.eye(num_labels, dtype=bool)
        for metrics in (
            single_label_metrics(ids, ids, sets, names),
            multi_label_metrics(sets, sets, sets.astype(float), names),
        ):
            assert sum(name.startswith("f1_") for name in metrics) == named


def test_matthews_of_a_million_examples_does_not_overflow():
    gold = np.arange(10**6) % 3
    metrics = single_label_metrics(gold, gold, np.ones((10**6, 3)) / 3, NAMES[:3])
    assert metrics["matthews"] == pytest.approx(1)


def test_metrics_of_a_class_by_hand():
    is_positive, scores = np.array([1, 0, 1, 0, 0], bool), np.array([0.9, 0.8, 0.7, 0.2, 0.1])
    assert positive_class_metrics(is_positive, scores > 0.75, scores) == pytest.approx(
        {
            "f1": 2 * 1 / (2 + 2),
            "precision": 1 / 2,
            "recall": 1 / 2,
            "pr_auc": (1 / 1 + 2 / 3) / 2,
            "roc_auc": 5 / 6,  # One of 2 x 3 pairs is wrong.
        },
        rel=1e-12,
    )


def test_ties_do_not_depend_on_the_order_of_the_examples():
    scores = np.full(4, 0.5)
    for is_positive in ([1, 0, 0, 0], [0, 0, 0, 1]):
        assert roc_auc(np.array(is_positive, bool), scores) == 0.5
        assert pr_auc(np.array(is_positive, bool), scores) == 0.25


def test_areas_equal_their_definitions():
    rng = np.random.default_rng(0)
    for _ in range(60):
        is_positive = rng.random(rng.integers(2, 40)) < rng.choice([0.1, 0.5, 0.9])
        is_positive[:2] = False, True
        scores = is_positive * rng.random() + rng.normal(size=len(is_positive))
        scores = np.round(scores, rng.integers(0, 4)).astype(np.float32)
        for metric in ("roc_auc", "pr_auc"):
            expected = getattr(brute_force, metric)(is_positive, scores)
            found = {"roc_auc": roc_auc, "pr_auc": pr_auc}[metric](is_positive, scores)
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("is_positive", "precision"), [([True, True], 1), ([False, False], 0), ([True], 1), ([], 0)]
)
def test_areas_without_positives_or_negatives(is_positive, precision):
    scores = np.arange(len(is_positive)) / 3
    assert roc_auc(np.array(is_positive, bool), scores) == 0.5
    assert pr_auc(np.array(is_positive, bool), scores) == precision


def test_scores_that_are_not_finite_are_rejected():
    for metric in (roc_auc, pr_auc):
        with pytest.raises(UserError, match="scores: expected finite numbers, received 1 of 2"):
            metric(np.array([True, False]), np.array([np.nan, 0.5]))


def test_arrays_of_different_shapes_are_rejected():
    wrong, scores = PREDICTIONS[:, np.newaxis], np.ones((6, 4)) / 4
    with pytest.raises(ValueError, match=r"shapes \(6,\) and \(6, 1\): expected equal shapes"):
        accuracy(LABELS, wrong)
    with pytest.raises(ValueError, match=r"shapes \(6,\) and \(6, 1\): expected equal shapes"):
        single_label_metrics(LABELS, wrong, scores, NAMES)
    for metric in (roc_auc, pr_auc):
        with pytest.raises(ValueError, match=r"shapes \(6,\) and \(6, 1\): expected equal shapes"):
            metric(LABELS > 0, wrong / 6)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("modules", "package"),
    [
        (["calibration", "classification", "regression", "squad"], "tensorflow"),
        (["thresholds"], "sklearn"),  # Its objectives are flags, which are checked at once.
    ],
)
def test_metrics_import_no_package_in_vain(modules, package):
    code = "; ".join(f"import tasks.metrics.{name}" for name in modules)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, tasks.finetuning.settings; {code}; print({package!r} in sys.modules)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
