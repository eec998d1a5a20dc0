"""Metrics of predicted numbers. Shape suffixes: N examples."""

import numpy as np
from numpy.typing import ArrayLike

from tasks.metrics.checks import finite, same_shape
from tasks.metrics.ranking import average_ranks


def pearson(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return Pearson's correlation; 0 if either is constant or with less than two examples."""
    labels_N, predictions_N = _finite_pair(labels_N, predictions_N)
    if _is_constant(labels_N) or _is_constant(predictions_N):
        return 0.0
    x_N, y_N = _standardized(labels_N), _standardized(predictions_N)
    return float(np.clip(x_N @ y_N, -1.0, 1.0))


def spearman(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return Spearman's correlation, with mean ranks for ties; 0 if either is constant."""
    labels_N, predictions_N = _finite_pair(labels_N, predictions_N)
    return pearson(average_ranks(labels_N), average_ranks(predictions_N))


def mean_squared_error(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return the mean squared error; 0 without examples."""
    labels_N, predictions_N = _finite_pair(labels_N, predictions_N)
    return float(np.mean((labels_N - predictions_N) ** 2)) if len(labels_N) else 0.0


def _finite_pair(labels_N, predictions_N):
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    return finite(labels_N, "labels"), finite(predictions_N, "predictions")


def _is_constant(values_N):
    return not len(values_N) or values_N.min() == values_N.max()


def _standardized(values_N):
    """Return the values with mean 0 and norm 1.

    They are scaled to [0, 1] first, since squares of values such as 1e-200 underflow to 0.
    """
    values_N = (values_N - values_N.min()) / (values_N.max() - values_N.min())
    values_N = values_N - values_N.mean()
    return values_N / np.linalg.norm(values_N)
