"""Metrics of rankings: areas under the ROC curve and the precision-recall curve.

Equal scores are one step of the ranking, so the order of examples does not matter.

Shape suffixes: N examples.
"""

import numpy as np
from numpy.typing import ArrayLike

from tasks.metrics.checks import finite, same_shape


def roc_auc(is_positive_N: ArrayLike, scores_N: ArrayLike) -> float:
    """Return the area under the ROC curve.

    It is the probability that a positive example scores above a negative one; ties count half.

    Args:
        is_positive_N: bool `(N,)`.
        scores_N: Finite float `(N,)`.

    Returns:
        The area; 0.5 without a positive or without a negative example.
    """
    is_positive_N, scores_N = _ranked(is_positive_N, scores_N)
    positives = np.count_nonzero(is_positive_N)
    others = len(scores_N) - positives
    if not positives or not others:
        return 0.5
    wins = average_ranks(scores_N)[is_positive_N].sum() - positives * (positives + 1) / 2
    return float(wins / positives / others)


def pr_auc(is_positive_N: ArrayLike, scores_N: ArrayLike) -> float:
    """Return the area under the precision-recall curve in steps, that is, average precision.

    Args:
        is_positive_N: bool `(N,)`.
        scores_N: Finite float `(N,)`.

    Returns:
        The area; 1 without a negative example, 0 without a positive one.
    """
    is_positive_N, scores_N = _ranked(is_positive_N, scores_N)
    positives = np.count_nonzero(is_positive_N)
    if not positives:
        return 0.0
    _, group_N, sizes_K = np.unique(-scores_N, return_inverse=True, return_counts=True)
    hits_K = np.bincount(group_N, weights=is_positive_N)
    precision_K = np.cumsum(hits_K) / np.cumsum(sizes_K)
    return float(np.sum(hits_K * precision_K) / positives)


def average_ranks(values_N: ArrayLike) -> np.ndarray:
    """Return ranks from 1, ascending, float64 `(N,)`; equal values have their mean rank."""
    _, group_N, sizes_K = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes_K) - (sizes_K - 1) / 2)[group_N]


def _ranked(is_positive_N, scores_N):
    is_positive_N, scores_N = same_shape(is_positive_N, scores_N)
    return is_positive_N.astype(bool), finite(scores_N)
