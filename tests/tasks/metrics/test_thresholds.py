"""Thresholds: each objective by hand and against brute force; ties, edges and rounding."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.metrics.thresholds import best_threshold, parse_objective, threshold_for_false_alarms

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.2])
IS_POSITIVE = np.array([1, 0, 1, 1, 0], bool)


@pytest.mark.parametrize(
    ("objective", "threshold", "precision", "recall"),
    [
        ("f1", 0.4, 3 / 4, 1),
        ("precision=0.75", 0.4, 3 / 4, 1),
        ("precision=0.76", 0.85, 1, 1 / 3),
        ("recall=0.6", 0.65, 2 / 3, 2 / 3),
        ("recall=0.7", 0.4, 3 / 4, 1),
        ("recall=0.1", 0.85, 1, 1 / 3),
    ],
)
def test_each_objective_by_hand(objective, threshold, precision, recall):
    if objective == "recall=0.6":  # If 0.6 were a positive, it would have the higher precision.
        is_positive = np.array([1, 0, 1, 0, 1], bool)
    else:
        is_positive = IS_POSITIVE
    found, achieved = best_threshold(is_positive, SCORES, objective)
    assert found == pytest.approx(threshold)
    assert achieved["reached"]
    assert achieved["precision"] == pytest.approx(precision)
    assert achieved["recall"] == pytest.approx(recall)
    assert achieved["f1"] == pytest.approx(2 * precision * recall / (precision + recall))


def test_a_precision_out_of_reach_is_reported():
    found, achieved = best_threshold(np.array([0, 1, 1]), np.array([0.9, 0.7, 0.5]), "precision=1")
    assert found < 0.5
    assert achieved == {
        "precision": pytest.approx(2 / 3),
        "recall": 1,
        "f1": pytest.approx(0.8),
        "reached": False,
    }


def metrics_at(threshold, is_positive, scores):
    chosen = scores >= threshold
    hits = np.sum(chosen & is_positive)
    precision = hits / chosen.sum() if chosen.any() else 0.0
    return precision, hits / is_positive.sum(), 2 * hits / (chosen.sum() + is_positive.sum())


def test_thresholds_equal_the_best_of_all():
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        is_positive = rng.random(rng.integers(1, 30)) < 0.4
        is_positive[0] = True
        scores = np.round(0.5 * is_positive + rng.random(len(is_positive)), rng.integers(1, 4))
        # In descending order: max returns the first, which is the highest, of equals.
        every = [metrics_at(t, is_positive, scores) for t in np.unique(scores)[::-1]]
        expected = rng.choice([0.3, 0.5, 0.8, 0.95, 1.0])
        precise = [metrics for metrics in every if metrics[0] >= expected]
        for objective, best in (
            ("f1", max(every, key=lambda metrics: metrics[2])),
            (
                f"precision={expected}",
                max(precise, key=lambda metrics: metrics[1]) if precise else max(every),
            ),
            (
                f"recall={expected}",
                max([f for f in every if f[1] >= expected], key=lambda metrics: metrics[0]),
            ),
        ):
            threshold, achieved = best_threshold(is_positive, scores, objective)
            reached = bool(precise) or "precision" not in objective
            missed += not reached
            assert achieved.pop("reached") is reached
            assert tuple(achieved.values()) == pytest.approx(best), objective
            assert metrics_at(threshold, is_positive, scores) == pytest.approx(best), objective
    assert missed


def test_of_equal_thresholds_the_highest_is_chosen_and_never_a_score():
    # F1 is 2/3 both below 0.9 and below 0.6.
    found, _ = best_threshold(np.array([1, 0, 0, 1]), np.array([0.9, 0.8, 0.7, 0.6]), "f1")
    assert found == pytest.approx(0.85)
    rng = np.random.default_rng(1)
    for _ in range(100):
        scores = rng.random(20)
        found, _ = best_threshold(rng.random(20) < 0.5, scores, "f1")
        nearest = np.abs(scores - found).min()
        np.testing.assert_array_equal(scores >= found, scores + nearest / 2 >= found)
        np.testing.assert_array_equal(scores >= found, scores - nearest / 2 >= found)


def test_adjacent_float32_scores_are_separated_in_float32():
    for low in np.float32([0.5, 0.99999994, 1e-30, 3.0]):
        for _ in range(2):
            high = np.nextafter(low, np.float32(10))
            found, _ = best_threshold(np.array([1, 0]), np.array([high, low]), "f1")
            assert low < np.float32(found) <= high
            low = high  # One pass with an even last bit, one with an odd last bit.


def test_without_positives_nothing_is_selected():
    for scores in ([0.1, 0.5], [0.0], [-2.0, -2.0]):
        for objective in ("f1", "precision=0.5", "recall=0.5"):
            found, achieved = best_threshold(
                np.zeros(len(scores), bool), np.array(scores), objective
            )
            assert found > max(scores)
            assert achieved == {"precision": 0, "recall": 0, "f1": 0, "reached": False}


def test_positives_only_are_all_selected():
    for scores in ([0.1, 0.5], [0.0], [-2.0, -2.0]):
        for objective in ("f1", "precision=0.5", "recall=1"):
            found, achieved = best_threshold(
                np.ones(len(scores), bool), np.array(scores), objective
            )
            assert found < min(scores)
            assert achieved == {"precision": 1, "recall": 1, "f1": 1, "reached": True}


def test_false_alarms_by_hand():
    scores = np.array([5.0, 1, 4, 2, 3])
    assert threshold_for_false_alarms(scores, 0.4) == 3.5
    assert threshold_for_false_alarms(scores, 0.39) == 4.5
    assert threshold_for_false_alarms(scores, 0.1) == 5.5
    assert threshold_for_false_alarms(scores, 1) == 0.5
    # Two equal scores are both alarms or neither is.
    assert threshold_for_false_alarms(np.array([3.0, 3, 2, 1]), 0.25) == 3.5
    assert threshold_for_false_alarms(np.array([3.0, 3, 2, 1]), 0.5) == 2.5
    assert threshold_for_false_alarms(np.arange(100) / 1.0, 0.29) == 70.5  # 0.29 * 100 < 29.


def test_the_number_of_false_alarms_is_the_maximum_allowed():
    rng = np.random.default_rng(2)
    for _ in range(200):
        scores = np.round(rng.normal(size=rng.integers(1, 40)), 1)
        rate = rng.choice([0.0, 0.01, 0.05, 0.3, 1.0])
        found = threshold_for_false_alarms(scores, rate)
        assert np.mean(scores >= found) <= rate
        lower = scores[scores < found]
        if len(lower):
            assert np.mean(scores >= lower.max()) > rate


@pytest.mark.parametrize(
    "objective",
    "F1 f1=0.5 precision precision= precision=0 precision=1.5 recall=nan recall=9% a=1 =1".split(),
)
def test_an_unknown_objective_is_rejected(objective):
    with pytest.raises(
        UserError, match="^--threshold_objective=.*: expected f1, precision=P or recall=R"
    ):
        parse_objective(objective)


def test_objectives_are_parsed():
    assert parse_objective("f1") == ("f1", None)
    assert parse_objective("precision=0.9") == ("precision", 0.9)
    assert parse_objective("recall=1") == ("recall", 1.0)


def test_scores_without_a_threshold_are_rejected():
    with pytest.raises(UserError, match="threshold: expected at least one score"):
        best_threshold(np.array([], bool), np.array([]), "f1")
    with pytest.raises(UserError, match="threshold: expected at least one score"):
        threshold_for_false_alarms(np.array([]), 0.1)
    with pytest.raises(UserError, match="false alarm rate 5: expected a number from 0 to 1"):
        threshold_for_false_alarms(SCORES, 5)
    with pytest.raises(UserError, match="scores: expected finite numbers, received 1 of 2"):
        best_threshold(np.array([1, 0]), np.array([np.inf, 0.5]), "f1")
