"""Metrics of regression: by hand, at the edges, and against their definitions in loops."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.metrics.regression import mean_squared_error, pearson, spearman


def test_correlations_by_hand():
    labels, predictions = np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 40])
    assert mean_squared_error(labels, predictions) == (0 + 1 + 1 + 36**2) / 4
    assert spearman(labels, predictions) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert pearson(labels, 5 - 3 * labels) == pytest.approx(-1)
    # Deviations -1, 0, 1 and -4, -1, 5: 9 / sqrt(2 * 42).
    assert pearson([1, 2, 3], [1, 4, 10]) == pytest.approx(9 / np.sqrt(84), rel=1e-12)
    # Ranks 1, 2.5, 2.5 and 1, 2, 3: 1.5 / sqrt(1.5 * 2).
    assert spearman([1, 2, 2], [1, 2, 3]) == pytest.approx(1.5 / np.sqrt(3))


def correlation(first, second):
    """Return the covariance over the root of the product of variances."""
    means = sum(first) / len(first), sum(second) / len(second)
    pairs = [(x - means[0], y - means[1]) for x, y in zip(first, second, strict=True)]
    spread = sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)
    return sum(x * y for x, y in pairs) / spread**0.5


def ranks(values):
    """Return the mean ranks: one for the value, one per smaller value, a half per equal one."""
    return [
        1
        + sum(other < value for other in values)
        + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def test_correlations_equal_their_definitions():
    rng = np.random.default_rng(0)
    for _ in range(100):
        size, decimals = rng.integers(3, 50), rng.integers(0, 4)
        labels = np.round(rng.normal(size=size), decimals)
        predictions = np.round(labels * rng.normal() + rng.normal(size=size), decimals)
        labels[:2] = predictions[:2] = 0, 1
        expected = correlation(labels, predictions)
        assert pearson(labels, predictions) == pytest.approx(expected, abs=1e-12)
        expected = correlation(ranks(labels), ranks(predictions))
        assert spearman(labels, predictions) == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", [pearson, spearman])
def test_the_correlation_with_a_constant_is_0(metric):
    slope = np.arange(7.0)
    constant = np.full(7, 0.1)  # In float arithmetic its mean is not exactly 0.1.
    for pair in ((slope, constant), (constant, slope), (constant, constant), ([1.0], [2.0])):
        assert metric(*pair) == 0.0
    assert metric([], []) == 0.0
    assert mean_squared_error([], []) == 0.0


def test_tiny_and_distant_numbers_are_correlated():
    slope = np.arange(5.0)
    assert pearson(slope, slope * 1e-200) == pytest.approx(1)
    assert pearson(slope, slope * 1e300) == pytest.approx(1)
    assert pearson(slope, slope + 1e9) == pytest.approx(1)


def test_numbers_that_are_not_finite_are_rejected():
    with pytest.raises(UserError, match="predictions: expected finite numbers, received 1 of 2"):
        mean_squared_error([1.0, 2.0], [1.0, np.inf])
    for metric in (pearson, spearman):
        with pytest.raises(UserError, match="labels: expected finite numbers, received 1 of 2"):
            metric([np.nan, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="shapes"):
        pearson(np.arange(3), np.arange(3)[:, np.newaxis])
