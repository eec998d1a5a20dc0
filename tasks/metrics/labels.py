"""Metrics of predicted labels.

A ratio with denominator 0 is 0 in all of them, and so is the mean over no examples.

Shape suffixes: N examples, C classes.
"""

import numpy as np
from numpy.typing import ArrayLike

from tasks.metrics.checks import same_shape


def accuracy(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return the fraction of correct predictions."""
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    return float(ratio(np.sum(labels_N == predictions_N), len(labels_N)))


def f1(labels_N: ArrayLike, predictions_N: ArrayLike, positive: int) -> float:
    """Return the F1 of one class; 0 if it is neither in the labels nor predicted."""
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    true_positives = np.sum((labels_N == positive) & (predictions_N == positive))
    either = np.sum(labels_N == positive) + np.sum(predictions_N == positive)
    return float(ratio(2 * true_positives, either))


def macro_f1(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return the unweighted mean of the F1 of every class that is labelled or predicted."""
    classes = np.union1d(labels_N, predictions_N)
    metrics = [f1(labels_N, predictions_N, label) for label in classes]
    return float(ratio(np.sum(metrics), len(metrics)))


def micro_f1(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return the F1 of all decisions together.

    With one label per example this is the accuracy: an error is a false positive of the predicted
    class and a false negative of the labelled one.
    """
    return accuracy(labels_N, predictions_N)


def per_class_f1(
    labels_N: ArrayLike, predictions_N: ArrayLike, num_classes: int
) -> dict[str, np.ndarray]:
    """Return the metrics of each class.

    Args:
        labels_N: Label ids below `num_classes`, int `(N,)`.
        predictions_N: Predicted ids, int `(N,)`.
        num_classes: C.

    Returns:
        "precision", "recall" and "f1", float64 `(C,)`, and "support", the number of examples with
        that label, int64 `(C,)`.
    """
    matrix_CC = confusion_matrix(labels_N, predictions_N, num_classes)
    hits_C, support_C, predicted_C = matrix_CC.diagonal(), matrix_CC.sum(1), matrix_CC.sum(0)
    return {
        "precision": ratio(hits_C, predicted_C),
        "recall": ratio(hits_C, support_C),
        "f1": ratio(2 * hits_C, support_C + predicted_C),
        "support": support_C,
    }


def confusion_matrix(labels_N: ArrayLike, predictions_N: ArrayLike, num_classes: int) -> np.ndarray:
    """Return how often a class (row) was predicted as a class (column), int64 `(C, C)`.

    Raises:
        ValueError: At an id that is not below `num_classes`.
    """
    pairs = [np.asarray(ids, np.int64) for ids in same_shape(labels_N, predictions_N)]
    # Cell (label, prediction) as a flat index; it also checks the range of the ids.
    cells_N = np.ravel_multi_index(pairs, (num_classes, num_classes))
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


def matthews_correlation(labels_N: ArrayLike, predictions_N: ArrayLike) -> float:
    """Return Matthews' correlation coefficient for any number of classes (R_K; Gorodkin 2004).

    It is 0 if undefined: if the labels, or the predictions, have one class only.
    """
    labels_N, predictions_N = same_shape(labels_N, predictions_N)
    classes = np.union1d(labels_N, predictions_N)
    # float64, since products of four counts overflow int64 at some ten thousand examples.
    labelled_C = np.array([np.sum(labels_N == label) for label in classes], np.float64)
    predicted_C = np.array([np.sum(predictions_N == label) for label in classes], np.float64)
    hits, total = float(np.sum(labels_N == predictions_N)), float(len(labels_N))
    spread_of_labels = total**2 - labelled_C @ labelled_C
    spread_of_predictions = total**2 - predicted_C @ predicted_C
    covariance = hits * total - labelled_C @ predicted_C
    return float(ratio(covariance, np.sqrt(spread_of_labels) * np.sqrt(spread_of_predictions)))


def multi_label_micro_f1(labels_NC: ArrayLike, predictions_NC: ArrayLike) -> float:
    """Return the F1 of all N x C bool decisions together; 0 if all are false."""
    return float(ratio(*(counts_C.sum() for counts_C in _f1_terms(labels_NC, predictions_NC))))


def multi_label_macro_f1(labels_NC: ArrayLike, predictions_NC: ArrayLike) -> float:
    """Return the unweighted mean of the F1 of all C classes, bool each.

    Unlike in `macro_f1`, a class that is neither labelled nor predicted counts as 0, since the
    columns define the classes. scikit-learn does the same in both cases.
    """
    f1_C = ratio(*_f1_terms(labels_NC, predictions_NC))
    return float(ratio(f1_C.sum(), len(f1_C)))


def exact_match_ratio(labels_NC: ArrayLike, predictions_NC: ArrayLike) -> float:
    """Return the fraction of examples with all C bool decisions correct."""
    labels_NC, predictions_NC = same_shape(labels_NC, predictions_NC)
    return float(ratio(np.sum((labels_NC == predictions_NC).all(1)), len(labels_NC)))


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> np.ndarray:
    """Return numerator / denominator in float64, elementwise; 0 where the denominator is 0."""
    numerator, denominator = np.float64(numerator), np.float64(denominator)
    return np.divide(
        numerator, denominator, out=np.zeros(np.shape(denominator)), where=denominator != 0
    )


def _f1_terms(labels_NC, predictions_NC):
    """Return numerator and denominator of each class's F1, `(C,)`."""
    labels_NC, predictions_NC = (
        np.asarray(chosen, bool) for chosen in same_shape(labels_NC, predictions_NC)
    )
    return 2 * (labels_NC & predictions_NC).sum(0), labels_NC.sum(0) + predictions_NC.sum(0)
