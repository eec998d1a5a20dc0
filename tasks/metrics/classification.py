"""All metrics of classification: of predicted labels, rankings and probabilities.

Metrics are `{name: float}`; tables contain lists in the order of the labels, for reports.

Shape suffixes: N examples, C labels, named by `names`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tasks.metrics import labels as of_labels
from tasks.metrics.calibration import expected_calibration_error
from tasks.metrics.ranking import pr_auc, roc_auc

MAX_NAMED = 20  # With more labels there are no metrics per label, since nobody reads so many.


def single_label_metrics(
    labels_N: np.ndarray,
    predictions_N: np.ndarray,
    probabilities_NC: np.ndarray,
    names: Sequence[str],
) -> dict[str, float]:
    """Return the metrics of one label per example.

    Args:
        labels_N: Label ids, int `(N,)`.
        predictions_N: Predicted ids, int `(N,)`.
        probabilities_NC: float `(N, C)`.
        names: The labels' names; each has its own F1 if there are at most MAX_NAMED.

    Returns:
        accuracy, macro_f1, matthews, f1_NAME, ece (expected calibration error), and degenerate: 1
        if all predictions are equal although the labels are not, otherwise 0.
    """
    f1_C = of_labels.per_class_f1(labels_N, predictions_N, len(names))["f1"]
    return {
        "accuracy": of_labels.accuracy(labels_N, predictions_N),
        "macro_f1": of_labels.macro_f1(labels_N, predictions_N),
        "matthews": of_labels.matthews_correlation(labels_N, predictions_N),
        **_named("f1", f1_C, names),
        "ece": expected_calibration_error(probabilities_NC, labels_N),
        "degenerate": _degenerate(labels_N, predictions_N),
    }


def positive_class_metrics(
    is_positive_N: ArrayLike, is_chosen_N: ArrayLike, scores_N: ArrayLike
) -> dict[str, float]:
    """Return the metrics of one class against all others.

    Args:
        is_positive_N: Whether an example is labelled with the class, bool `(N,)`.
        is_chosen_N: Whether the class is predicted, bool `(N,)`.
        scores_N: Scores that rank the examples, float `(N,)`.

    Returns:
        f1, precision, recall, pr_auc and roc_auc.
    """
    metrics = of_labels.per_class_f1(np.int64(is_positive_N), np.int64(is_chosen_N), 2)
    return {
        **{name: float(metrics[name][1]) for name in ("f1", "precision", "recall")},
        "pr_auc": pr_auc(is_positive_N, scores_N),
        "roc_auc": roc_auc(is_positive_N, scores_N),
    }


def multi_label_metrics(
    labels_NC: ArrayLike,
    selected_NC: np.ndarray,
    probabilities_NC: np.ndarray,
    names: Sequence[str],
) -> dict[str, float]:
    """Return the metrics of any number of labels per example.

    Args:
        labels_NC: bool, or 0 and 1, `(N, C)`.
        selected_NC: Predicted labels, bool `(N, C)`.
        probabilities_NC: float `(N, C)`.
        names: The labels' names; each has its own F1 if there are at most MAX_NAMED.

    Returns:
        micro_f1, macro_f1, exact_match, f1_NAME, degenerate as in `single_label_metrics`, pr_auc,
        the mean over labels that occur (0 if none does), and ece over all N x C decisions.
    """
    labels_NC = np.asarray(labels_NC, bool)
    pr_auc_C = _pr_auc_of_each(labels_NC, probabilities_NC)
    return {
        "micro_f1": of_labels.multi_label_micro_f1(labels_NC, selected_NC),
        "macro_f1": of_labels.multi_label_macro_f1(labels_NC, selected_NC),
        "exact_match": of_labels.exact_match_ratio(labels_NC, selected_NC),
        # Labels that do not occur have a PR AUC of 0; they do not count in the mean.
        "pr_auc": float(of_labels.ratio(np.sum(pr_auc_C), labels_NC.any(0).sum())),
        **_named("f1", multi_label_table(labels_NC, selected_NC, names)["per_label"]["f1"], names),
        "ece": expected_calibration_error(
            # Each of the N x C decisions is a binary example with the classes no and yes.
            np.stack([1 - probabilities_NC.ravel(), probabilities_NC.ravel()], axis=1),
            np.int64(labels_NC.ravel()),
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
    metrics = of_labels.per_class_f1(labels_N, predictions_N, len(names))
    matrix_CC = of_labels.confusion_matrix(labels_N, predictions_N, len(names))
    pr_auc_C = _pr_auc_of_each(np.eye(len(names), dtype=bool)[labels_N], probabilities_NC)
    return {
        "labels": list(names),
        "per_label": {
            **{name: values_C.tolist() for name, values_C in metrics.items()},
            "pr_auc": pr_auc_C,
        },
        "confusion_matrix": matrix_CC.tolist(),
    }


def multi_label_table(
    labels_NC: ArrayLike, selected_NC: np.ndarray, names: Sequence[str]
) -> dict[str, Any]:
    """Return metrics per label, as lists; arguments as in `multi_label_metrics`.

    Returns:
        As `single_label_table` without pr_auc. "confusion_matrix" has one matrix per label,
        [[neither, selected only], [labelled only, both]].
    """
    pairs = [
        (np.int64(labels_N), np.int64(selected_N))
        for labels_N, selected_N in zip(np.transpose(labels_NC), selected_NC.T, strict=True)
    ]
    metrics = [of_labels.per_class_f1(*pair, 2) for pair in pairs]
    return {
        "labels": list(names),
        "per_label": {
            name: np.array([of_one[name][1] for of_one in metrics]).tolist() for name in metrics[0]
        },
        "confusion_matrix": [of_labels.confusion_matrix(*pair, 2).tolist() for pair in pairs],
    }


def _pr_auc_of_each(labels_NC, scores_NC):
    pairs = zip(labels_NC.T, np.transpose(scores_NC), strict=True)
    return [pr_auc(labels, scores) if labels.any() else 0.0 for labels, scores in pairs]


def _named(metric, values_C, names):
    if len(names) > MAX_NAMED:
        return {}
    return {f"{metric}_{name}": float(value) for name, value in zip(names, values_C, strict=True)}


def _degenerate(labels, predictions):
    return float(_differ(labels) and not _differ(predictions))


def _differ(rows):
    return bool(len(rows)) and bool((rows != rows[:1]).any())
