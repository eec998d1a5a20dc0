"""Metrics of predicted numbers. Shape suffixes: N examples."""

import numpy as np
import scipy.stats
import sklearn.metrics

from tasks.metrics.checks import finite, same_shape


def pearson(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Return Pearson's correlation; 0 if either is constant or with less than two examples."""
    pair = _finite_pair(labels_N, predictions_N)
    if any(len(np.unique(values_N)) < 2 for values_N in pair):
        return 0.0
    return float(scipy.stats.pearsonr(*pair).statistic)


def spearman(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Return Spearman's correlation, with mean ranks for ties; 0 if either is constant."""
    pair = _finite_pair(labels_N, predictions_N)
    return pearson(*(scipy.stats.rankdata(values_N) for values_N in pair))


def mean_squared_error(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Return the mean squared error; 0 without examples."""
    pair = _finite_pair(labels_N, predictions_N)
    return float(sklearn.metrics.mean_squared_error(*pair)) if len(labels_N) else 0.0


def _finite_pair(labels_N: np.ndarray, predictions_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    return finite(labels_N, "labels"), finite(predictions_N, "predictions")
