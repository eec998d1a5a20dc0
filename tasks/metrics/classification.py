"""Metrics of classification: of labels, rankings and probabilities.

Metrics are `{name: float}`; tables contain lists in the order of the labels, for reports. Unless
stated otherwise, a ratio with denominator 0 is 0, and so is the metric of no examples.

Shape suffixes: N examples, C labels, named by `names`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, matthews_corrcoef, roc_auc_score

from tasks.metrics.calibration import expected_calibration_error
from tasks.metrics.checks import finite, same_shape

MAX_NAMED = 20  # With more labels there are no metrics per label, since nobody reads so many.


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the fraction of examples with a correct prediction.

    Both are ids or names `(N,)`, or bool `(N, C)`, of which all have to be correct.
    """
    labels, predictions = same_shape(labels, predictions)
    is_correct_N = np.all(labels == predictions, axis=tuple(range(1, labels.ndim)))
    return float(is_correct_N.sum() / max(len(labels), 1))


def roc_auc(is_positive_N: np.ndarray, scores_N: np.ndarray) -> float:
    """Return the area under the ROC curve; 0.5 without a positive or without a negative example.

    It is the probability that a positive example scores above a negative one; ties count half.
    Raises UserError at NaN or infinity.
    """
    is_positive_N, scores_N = same_shape(is_positive_N, finite(scores_N))
    if not _differ(is_positive_N):
        return 0.5
    return float(roc_auc_score(is_positive_N, scores_N))


def pr_auc(is_positive_N: np.ndarray, scores_N: np.ndarray) -> float:
    """Return the average precision: 1 without a negative example, 0 without a positive one.

    Raises UserError at NaN or infinity.
    """
    is_positive_N, scores_N = same_shape(is_positive_N, finite(scores_N))
    if not is_positive_N.any():
        return 0.0
    return float(average_precision_score(is_positive_N, scores_N))


def single_label_metrics(
    labels_N: np.ndarray,
    predictions_N: np.ndarray,
    probabilities_NC: np.ndarray,
    names: Sequence[str],
) -> dict[str, float]:
    """Return the metrics of one label per example.

    Args:
        labels_N: Label ids, int.
        predictions_N: Predicted ids, int.
        probabilities_NC: float.
        names: The labels' names; each has its own F1 if there are at most MAX_NAMED.

    Returns:
        accuracy, macro_f1 (the mean over labels that occur or are predicted), matthews (0 if the
        labels or the predictions are all equal), f1_NAME, ece (expected calibration error), and
        degenerate: 1 if all predictions are equal although the labels are not, otherwise 0.
    """
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    has_spread = _differ(labels_N) and _differ(predictions_N)
    per_label = _per_label(labels_N, predictions_N, len(names))
    f1_K = np.array(per_label["f1"])[np.union1d(labels_N, predictions_N)]
    return {
        "accuracy": accuracy(labels_N, predictions_N),
        "macro_f1": float(f1_K.sum() / max(len(f1_K), 1)),
        "matthews": float(matthews_corrcoef(labels_N, predictions_N)) if has_spread else 0.0,
        **_named_f1(per_label, names),
        "ece": expected_calibration_error(probabilities_NC, labels_N),
        "degenerate": _degenerate(labels_N, predictions_N),
    }


def positive_class_metrics(
    is_positive_N: np.ndarray, is_chosen_N: np.ndarray, scores_N: np.ndarray
) -> dict[str, float]:
    """Return f1, precision, recall, pr_auc and roc_auc of one class against all others.

    Args:
        is_positive_N: Whether an example is labelled with the class, bool.
        is_chosen_N: Whether the class is predicted, bool.
        scores_N: Scores that rank the examples, float.
    """
    of_both = _per_label(is_positive_N, is_chosen_N, 2)
    return {
        **{name: of_both[name][1] for name in ("f1", "precision", "recall")},
        "pr_auc": pr_auc(is_positive_N, scores_N),
        "roc_auc": roc_auc(is_positive_N, scores_N),
    }


def multi_label_metrics(
    labels_NC: np.ndarray,
    selected_NC: np.ndarray,
    probabilities_NC: np.ndarray,
    names: Sequence[str],
) -> dict[str, float]:
    """Return the metrics of any number of labels per example; arguments as in the table's.

    Returns:
        micro_f1, macro_f1 (the mean over all labels), exact_match, f1_NAME, degenerate as in
        `single_label_metrics`, pr_auc, the mean over labels that occur, and ece over all N x C
        decisions.
    """
    labels_NC, matrices_C22 = np.asarray(labels_NC, bool), _matrices(labels_NC, selected_NC)
    per_label = _ratios_of_matrices(matrices_C22)
    # Labels that do not occur have a PR AUC of 0; they do not count in the mean.
    pr_auc_sum = np.sum(_pr_auc_of_each(labels_NC, probabilities_NC))
    return {
        "micro_f1": _ratios_of_matrices(matrices_C22.sum(0, keepdims=True))["f1"][0],
        "macro_f1": float(np.mean(per_label["f1"])),
        "exact_match": accuracy(labels_NC, selected_NC),
        "pr_auc": float(pr_auc_sum / max(labels_NC.any(0).sum(), 1)),
        **_named_f1(per_label, names),
        "ece": expected_calibration_error(
            # Each of the N x C decisions is a binary example with the classes no and yes.
            np.stack([1 - probabilities_NC.ravel(), probabilities_NC.ravel()], axis=1),
            labels_NC.ravel(),
        ),
        "degenerate": _degenerate(labels_NC, selected_NC),
    }


def single_label_table(
    labels_N: np.ndarray,
    predictions_N: np.ndarray,
    probabilities_NC: np.ndarray,
    names: Sequence[str],
) -> dict[str, Any]:
    """Return metrics per label, as lists; arguments as in `single_label_metrics`.

    Returns:
        "labels": the names. "per_label": precision, recall, f1, support and pr_auc (of the label's
        probability against all others; 0 if the label does not occur). "confusion_matrix": rows
        are labels, columns predictions.
    """
    size = len(names)
    cells_N = size * np.asarray(labels_N, np.int64) + predictions_N
    matrix_CC = np.bincount(cells_N, minlength=size**2).reshape(size, size)
    pr_auc_C = _pr_auc_of_each(np.eye(size, dtype=bool)[labels_N], probabilities_NC)
    return {
        "labels": list(names),
        "per_label": {**_per_label(labels_N, predictions_N, size), "pr_auc": pr_auc_C},
        "confusion_matrix": matrix_CC.tolist(),
    }


def multi_label_table(
    labels_NC: np.ndarray, selected_NC: np.ndarray, names: Sequence[str]
) -> dict[str, Any]:
    """Return metrics per label, as lists.

    Args:
        labels_NC: bool, or 0 and 1.
        selected_NC: Predicted labels, bool.
        names: The labels' names.

    Returns:
        As `single_label_table` without pr_auc. "confusion_matrix" has one matrix per label,
        [[neither, selected only], [labelled only, both]].
    """
    matrices_C22 = _matrices(labels_NC, selected_NC)
    return {
        "labels": list(names),
        "per_label": _ratios_of_matrices(matrices_C22),
        "confusion_matrix": matrices_C22.tolist(),
    }


def _matrices(labels_NC: np.ndarray, selected_NC: np.ndarray) -> np.ndarray:
    """Return [[neither, selected only], [labelled only, both]] per label, int `(C, 2, 2)`.

    scikit-learn would take a single column as the two classes False and True.
    """
    labels_NC, selected_NC = (array != 0 for array in same_shape(labels_NC, selected_NC))
    either_2NC = np.stack([~selected_NC, selected_NC])
    counts_22C = [np.sum(either_2NC & of_NC, axis=1) for of_NC in (~labels_NC, labels_NC)]
    return np.moveaxis(np.array(counts_22C), -1, 0)


def _ratios_of_matrices(matrices_C22: np.ndarray) -> dict[str, list[float]]:
    """Return what `_ratios` does, of the result of `_matrices`."""
    support_C, selected_C = matrices_C22[:, 1].sum(1), matrices_C22[:, :, 1].sum(1)
    return _ratios(matrices_C22[:, 1, 1], support_C, selected_C)


def _per_label(
    labels_N: np.ndarray, predictions_N: np.ndarray, num_labels: int
) -> dict[str, list[float]]:
    """Return what `_ratios` does, of the ids of labels and predictions."""
    labels_N, predictions_N = (np.asarray(ids, np.int64) for ids in (labels_N, predictions_N))
    hits_H = labels_N[labels_N == predictions_N]
    counts = (np.bincount(ids, minlength=num_labels) for ids in (hits_H, labels_N, predictions_N))
    return _ratios(*counts)


def _ratios(
    hits_C: np.ndarray, support_C: np.ndarray, selected_C: np.ndarray
) -> dict[str, list[float]]:
    """Return {metric: values in the order of the labels}, of numbers of examples."""
    # Where a denominator is 0, there are no hits.
    return {
        "precision": (hits_C / np.maximum(selected_C, 1)).tolist(),
        "recall": (hits_C / np.maximum(support_C, 1)).tolist(),
        "f1": (2 * hits_C / np.maximum(selected_C + support_C, 1)).tolist(),
        "support": support_C.tolist(),
    }


def _named_f1(per_label: dict[str, list[float]], names: Sequence[str]) -> dict[str, float]:
    if len(names) > MAX_NAMED:
        return {}
    return {f"f1_{name}": value for name, value in zip(names, per_label["f1"], strict=True)}


def _pr_auc_of_each(labels_NC: np.ndarray, scores_NC: np.ndarray) -> list[float]:
    pairs = zip(labels_NC.T, scores_NC.T, strict=True)
    return [pr_auc(labels_N, scores_N) for labels_N, scores_N in pairs]


def _degenerate(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(_differ(labels) and not _differ(predictions))


def _differ(rows: np.ndarray) -> bool:
    return bool(len(rows)) and bool((rows != rows[:1]).any())
