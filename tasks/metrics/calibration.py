"""Calibration of probabilities: expected calibration error and temperature scaling.

Both follow Guo et al. 2017. Shape suffixes: N examples, C classes.
"""

import numpy as np
from numpy.typing import ArrayLike

from tasks.metrics.checks import finite, same_shape

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
KINDS = ("softmax", "sigmoid")


def expected_calibration_error(
    probabilities_NC: ArrayLike, labels_N: ArrayLike, bins: int = 15
) -> float:
    """Return the mean gap between confidence and accuracy over bins of equal width.

    The confidence is the highest probability of an example. Bins are weighted by their number of
    examples and include their upper edge.

    Args:
        probabilities_NC: float `(N, C)`; for a binary decision `[1 - p, p]`.
        labels_N: Label ids, int `(N,)`.
        bins: Number of bins.

    Returns:
        The error, from 0 to 1; 0 without examples.

    Raises:
        UserError: At NaN or infinity.
    """
    probabilities_NC = finite(probabilities_NC, "probabilities")
    if not len(probabilities_NC):
        return 0.0
    confidence_N = probabilities_NC.max(1)
    labels_N, predictions_N = same_shape(labels_N, probabilities_NC.argmax(1))
    surplus_N = confidence_N - (predictions_N == labels_N)
    # The sum of a bin's surplus is its gap times its size, so dividing by N weights the bins.
    bin_N = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence_N)
    return float(np.abs(np.bincount(bin_N, weights=surplus_N)).sum() / len(surplus_N))


def fit_temperature(logits_NC: ArrayLike, labels: ArrayLike, kind: str) -> float:
    """Return the temperature T of softmax(logits / T), or sigmoid, with the lowest loss.

    Args:
        logits_NC: float `(N, C)`.
        labels: For "softmax" ids, int `(N,)`. For "sigmoid", where each logit is its own decision,
            one label per logit, bool or 0 and 1: `(N,)` for logits `(N, 1)`, otherwise `(N, C)`.
        kind: "softmax" or "sigmoid".

    Returns:
        T, from MIN_TEMPERATURE to MAX_TEMPERATURE. It is 1 if no other T is better, without
        examples, and if there is no optimum between the bounds (`bound_of_temperature`).
    """
    if bound_of_temperature(logits_NC, labels, kind) is not None:
        return 1.0
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    if not logits_NC.size:
        return 1.0

    def slope(sharpness):
        return _slope(sharpness, logits_NC, labels_NC, kind)

    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    for _ in range(50):  # Bisects the logarithm of a range of factor 400 to below 1e-14.
        middle = np.sqrt(low * high)
        low, high = (low, middle) if slope(middle) >= 0 else (middle, high)
    temperature = round(float(1 / np.sqrt(low * high)), 6)
    return (
        temperature
        if negative_log_likelihood(logits_NC, labels, kind, temperature)
        < negative_log_likelihood(logits_NC, labels, kind)
        else 1.0
    )


def bound_of_temperature(logits_NC: ArrayLike, labels: ArrayLike, kind: str) -> float | None:
    """Return the bound at or beyond which the best temperature is, or `None`.

    MIN_TEMPERATURE: the data contains no error that limits the confidence, so a temperature fitted
    to it would weight every later error far too much. MAX_TEMPERATURE: the logits carry almost no
    information on the labels. Arguments as in `fit_temperature`.
    """
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    at_min, at_max = (
        _slope(1 / bound, logits_NC, labels_NC, kind)
        for bound in (MIN_TEMPERATURE, MAX_TEMPERATURE)
    )
    # The slope increases with 1/T: if it is positive at the smallest 1/T, the optimum is beyond it.
    if at_max > 0:
        return MAX_TEMPERATURE
    return MIN_TEMPERATURE if at_max < 0 and at_min <= 0 else None


def negative_log_likelihood(
    logits_NC: ArrayLike, labels: ArrayLike, kind: str, temperature: float = 1.0
) -> float:
    """Return the mean of -log p(label), over examples or, for "sigmoid", over all logits.

    Arguments as in `fit_temperature`; 0 without examples.
    """
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    if not logits_NC.size:
        return 0.0
    logits_NC = logits_NC / temperature
    if kind == "softmax":
        # Subtracting the maximum avoids overflow and does not change the softmax.
        logits_NC = logits_NC - logits_NC.max(1, keepdims=True)
        losses = np.log(np.exp(logits_NC).sum(1)) - (logits_NC * labels_NC).sum(1)
    else:
        losses = np.logaddexp(0, np.where(labels_NC == 1, -logits_NC, logits_NC))
    return float(losses.mean())


def _slope(sharpness, logits_NC, labels_NC, kind):
    """Return the derivative of the loss with respect to 1/T, which is increasing (convex loss).

    The terms are the logits minus the label's logit, so that the sign is right even where
    probabilities round to 0 or 1.
    """
    if not logits_NC.size:
        return 0.0
    if kind == "sigmoid":
        above_NC = np.where(labels_NC == 1, -logits_NC, logits_NC)
        # sigmoid(x) by exp, since (1 + tanh(x / 2)) / 2 would round small values to 0.
        weights_NC = np.exp(-np.logaddexp(0, -sharpness * above_NC))
    else:
        above_NC = logits_NC - (logits_NC * labels_NC).sum(1, keepdims=True)
        scaled_NC = sharpness * (logits_NC - logits_NC.max(1, keepdims=True))
        weights_NC = np.exp(scaled_NC) / np.exp(scaled_NC).sum(1, keepdims=True)
    return np.sum(weights_NC * above_NC)


def _logits_and_labels(logits_NC, labels, kind):
    """Return both as float64 `(N, C)`, labels as 0 and 1."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    logits_NC, labels = finite(logits_NC, "logits"), np.asarray(labels)
    if kind == "softmax":
        labels = np.eye(logits_NC.shape[1])[labels.astype(np.int64)]
    return logits_NC, labels.reshape(logits_NC.shape).astype(np.float64)
