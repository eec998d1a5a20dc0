"""How well scores put positives above the rest, without a threshold. Legend: N examples.

Equal scores are one step of the ranking, whatever the order of the examples.
"""

import numpy as np

from tasks.metrics.checks import finite, same_shape


def roc_auc(is_positive_N, scores_N):
    """Area under the ROC curve: how often a positive scores above another, half where they tie.

    0.5 where there are only positives, none, or no examples: nothing was ranked.
    """
    is_positive_N, scores_N = _ranked(is_positive_N, scores_N)
    positives = np.count_nonzero(is_positive_N)
    others = len(scores_N) - positives
    if not positives or not others:
        return 0.5
    wins = average_ranks(scores_N)[is_positive_N].sum() - positives * (positives + 1) / 2
    return float(wins / positives / others)


def pr_auc(is_positive_N, scores_N):
    """Area under precision and recall as steps, without interpolation: average precision.

    The share of positives, 1 or 0, where all examples are of one kind; 0 without examples.
    """
    is_positive_N, scores_N = _ranked(is_positive_N, scores_N)
    positives = np.count_nonzero(is_positive_N)
    if not positives:
        return 0.0
    _, group_N, sizes_K = np.unique(-scores_N, return_inverse=True, return_counts=True)
    hits_K = np.bincount(group_N, weights=is_positive_N)
    precision_K = np.cumsum(hits_K) / np.cumsum(sizes_K)
    return float(np.sum(hits_K * precision_K) / positives)


def average_ranks(values_N):
    """Ranks float64 [N], the smallest 1; equal values share the mean of theirs."""
    _, group_N, sizes_K = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes_K) - (sizes_K - 1) / 2)[group_N]


def _ranked(is_positive_N, scores_N):
    is_positive_N, scores_N = same_shape(is_positive_N, scores_N)
    return is_positive_N.astype(bool), finite(scores_N)
