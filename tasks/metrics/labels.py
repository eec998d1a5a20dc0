"""Metrics of chosen labels. Legend: N examples, C classes.

A ratio of which the denominator is 0 is 0, in all of them; so is the mean over no example.
"""

import numpy as np

from tasks.metrics.checks import same_shape


def accuracy(labels_N, predictions_N):
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    return float(ratio(np.sum(labels_N == predictions_N), len(labels_N)))


def f1(labels_N, predictions_N, positive):
    """F1 of one class; 0 where it neither stands in the labels nor was predicted."""
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    true_positives = np.sum((labels_N == positive) & (predictions_N == positive))
    either = np.sum(labels_N == positive) + np.sum(predictions_N == positive)
    return float(ratio(2 * true_positives, either))


def macro_f1(labels_N, predictions_N):
    """The plain mean of the F1 of every class that was labelled or predicted, rare or common."""
    classes = np.union1d(labels_N, predictions_N)
    metrics = [f1(labels_N, predictions_N, label) for label in classes]
    return float(ratio(np.sum(metrics), len(metrics)))


def micro_f1(labels_N, predictions_N):
    """F1 of all decisions at once.

    With one label an example this is the accuracy: a wrong one is a false positive of the class
    predicted and a false negative of the class labelled.
    """
    return accuracy(labels_N, predictions_N)


def per_class_f1(labels_N, predictions_N, num_classes):
    """{"precision", "recall", "f1": float64 [C], "support": int64 [C], how many are labelled so}.

    Labels and predictions are ids below `num_classes`.
    """
    matrix_CC = confusion_matrix(labels_N, predictions_N, num_classes)
    hits_C, support_C, predicted_C = matrix_CC.diagonal(), matrix_CC.sum(1), matrix_CC.sum(0)
    return {
        "precision": ratio(hits_C, predicted_C),
        "recall": ratio(hits_C, support_C),
        "f1": ratio(2 * hits_C, support_C + predicted_C),
        "support": support_C,
    }


def confusion_matrix(labels_N, predictions_N, num_classes):
    """int64 [C, C]: how often the class of the row was taken for the class of the column.

    Raises ValueError at an id that is not below `num_classes`.
    """
    pairs = [np.asarray(ids, np.int64) for ids in same_shape(labels_N, predictions_N)]
    cells_N = np.ravel_multi_index(pairs, (num_classes, num_classes))
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


def matthews_correlation(labels_N, predictions_N):
    """Matthews' coefficient, of any number of classes (R_K; Gorodkin 2004).

    0 where it is undefined: one class alone in the labels, or in the predictions.
    """
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    classes = np.union1d(labels_N, predictions_N)
    # In floats: products of four counts leave int64 at some ten thousand examples.
    labelled_C = np.array([np.sum(labels_N == label) for label in classes], np.float64)
    predicted_C = np.array([np.sum(predictions_N == label) for label in classes], np.float64)
    hits, total = float(np.sum(labels_N == predictions_N)), float(len(labels_N))
    spread_of_labels = total**2 - labelled_C @ labelled_C
    spread_of_predictions = total**2 - predicted_C @ predicted_C
    covariance = hits * total - labelled_C @ predicted_C
    return float(ratio(covariance, np.sqrt(spread_of_labels) * np.sqrt(spread_of_predictions)))


def multi_label_micro_f1(labels_NC, predictions_NC):
    """F1 of all N x C decisions at once, bool each; 0 where nothing is labelled nor predicted."""
    return float(ratio(*(counts_C.sum() for counts_C in _f1_terms(labels_NC, predictions_NC))))


def multi_label_macro_f1(labels_NC, predictions_NC):
    """The plain mean of the F1 of all C classes, bool each.

    Unlike macro_f1 it counts a class that is neither labelled nor predicted, as 0: the columns say
    which classes there are. scikit-learn does the same in both.
    """
    f1_C = ratio(*_f1_terms(labels_NC, predictions_NC))
    return float(ratio(f1_C.sum(), len(f1_C)))


def exact_match_ratio(labels_NC, predictions_NC):
    """The share of examples of which all C decisions, bool each, are right."""
    labels_NC, predictions_NC = same_shape(labels_NC, predictions_NC)
    return float(ratio(np.sum((labels_NC == predictions_NC).all(1)), len(labels_NC)))


def ratio(numerator, denominator):
    """numerator / denominator in float64, elementwise; 0 where the denominator is."""
    numerator, denominator = np.float64(numerator), np.float64(denominator)
    return np.divide(
        numerator, denominator, out=np.zeros(np.shape(denominator)), where=denominator != 0
    )


def _f1_terms(labels_NC, predictions_NC):
    """Numerator and denominator [C] of each class's F1."""
    labels_NC, predictions_NC = (
        np.asarray(chosen, bool) for chosen in same_shape(labels_NC, predictions_NC)
    )
    return 2 * (labels_NC & predictions_NC).sum(0), labels_NC.sum(0) + predictions_NC.sum(0)
