"""All figures of a classification at once: of chosen labels, rankings and probabilities.

Figures are {name: float}; tables hold lists, in the order of the labels, for whoever reads them.

Legend: N examples, C labels, of which `names` are the names.
"""

import numpy as np

from tasks.metrics import labels as of_labels
from tasks.metrics.calibration import expected_calibration_error
from tasks.metrics.ranking import pr_auc, roc_auc

MAX_NAMED = 20  # Of more labels none has a figure of its own: nobody reads so many curves.


def single_label_metrics(labels_N, predictions_N, probabilities_NC, names):
    """One label an example.

    "degenerate" is 1 where all examples were given the same label, though theirs differ, else 0.
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


def positive_class_metrics(is_positive_N, is_chosen_N, scores_N):
    """One class against the rest: whether it was chosen, and how its scores rank the examples."""
    metrics = of_labels.per_class_f1(np.int64(is_positive_N), np.int64(is_chosen_N), 2)
    return {
        **{name: float(metrics[name][1]) for name in ("f1", "precision", "recall")},
        "pr_auc": pr_auc(is_positive_N, scores_N),
        "roc_auc": roc_auc(is_positive_N, scores_N),
    }


def multi_label_metrics(labels_NC, selected_NC, probabilities_NC, names):
    """Each label on its own, bool or 0 and 1.

    "pr_auc" is the mean over the labels that stand there, 0 if none does; "ece" looks at all N x C
    decisions.
    """
    labels_NC = np.asarray(labels_NC, bool)
    pr_auc_C = _pr_auc_of_each(labels_NC, probabilities_NC)
    return {
        "micro_f1": of_labels.multi_label_micro_f1(labels_NC, selected_NC),
        "macro_f1": of_labels.multi_label_macro_f1(labels_NC, selected_NC),
        "exact_match": of_labels.exact_match_ratio(labels_NC, selected_NC),
        "pr_auc": float(of_labels.ratio(np.sum(pr_auc_C), labels_NC.any(0).sum())),
        **_named("f1", multi_label_table(labels_NC, selected_NC, names)["per_label"]["f1"], names),
        "ece": expected_calibration_error(
            np.stack([1 - probabilities_NC.ravel(), probabilities_NC.ravel()], axis=1),
            np.int64(labels_NC.ravel()),
        ),
        "degenerate": _degenerate(labels_NC, selected_NC),
    }


def single_label_table(labels_N, predictions_N, probabilities_NC, names):
    """{"labels", "per_label": {figure: a list}, "confusion_matrix"}.

    The figures are precision, recall, f1, support and pr_auc, that of the label's probability
    against all others, 0 where the label does not stand. A row of the matrix is a label, its
    columns what that was taken for.
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


def multi_label_table(labels_NC, selected_NC, names):
    """The same without pr_auc.

    A label's own matrix is [[neither, selected only], [labelled only, both]].
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
