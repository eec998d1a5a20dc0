"""Areas under curves: by hand, with ties, at the edges, and against scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics

from bert_tf import UserError
from tasks.metrics.ranking import pr_auc, roc_auc


def test_areas_by_hand():
    is_positive, scores = np.array([1, 0, 1, 0, 0], bool), np.array([0.9, 0.8, 0.7, 0.2, 0.1])
    assert roc_auc(is_positive, scores) == pytest.approx(5 / 6)  # One of 2 x 3 pairs is wrong.
    assert pr_auc(is_positive, scores) == pytest.approx((1 / 1 + 2 / 3) / 2)


def test_ties_do_not_depend_on_the_order_of_the_examples():
    scores = np.full(4, 0.5)
    for is_positive in ([1, 0, 0, 0], [0, 0, 0, 1]):
        assert roc_auc(np.array(is_positive, bool), scores) == 0.5
        assert pr_auc(np.array(is_positive, bool), scores) == 0.25


def test_areas_equal_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(200):
        is_positive = rng.random(rng.integers(2, 60)) < rng.choice([0.1, 0.5, 0.9])
        is_positive[:2] = False, True
        scores = is_positive * rng.random() + rng.normal(size=len(is_positive))
        scores = np.round(scores, rng.integers(0, 4)).astype(np.float32)
        assert roc_auc(is_positive, scores) == pytest.approx(
            sklearn.metrics.roc_auc_score(is_positive, scores), abs=1e-12
        )
        assert pr_auc(is_positive, scores) == pytest.approx(
            sklearn.metrics.average_precision_score(is_positive, scores), abs=1e-12
        )


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
