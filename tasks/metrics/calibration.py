"""Calibration of probabilities: expected calibration error and temperature scaling.

Both follow Guo et al. 2017.

Shape suffixes: N examples, C classes; R decisions between K classes, which are the examples for
"softmax" and all logits for "sigmoid".
"""

import numpy as np
import scipy.optimize
import scipy.special

from tasks.metrics.checks import finite, same_shape

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
KINDS = ("softmax", "sigmoid")


def expected_calibration_error(
    probabilities_NC: np.ndarray, labels_N: np.ndarray, bins: int = 15
) -> float:
    """Return the mean gap between confidence and accuracy over bins of equal width, 0 to 1.

    The confidence is the highest probability of an example; of a binary decision these are
    `[1 - p, p]`. Bins are weighted by their number of examples and include their upper edge. The
    error is 0 without examples. Raises UserError at NaN or infinity.
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


def fit_temperature(logits_NC: np.ndarray, labels: np.ndarray, kind: str) -> float:
    """Return the temperature T of softmax(logits / T), or sigmoid, with the lowest loss.

    Args:
        logits_NC: float.
        labels: For "softmax" ids, int `(N,)`. For "sigmoid", where each logit is its own decision,
            one label per logit, bool or 0 and 1: `(N,)` for logits `(N, 1)`, otherwise `(N, C)`.
        kind: "softmax" or "sigmoid".

    Returns:
        T, from MIN_TEMPERATURE to MAX_TEMPERATURE. It is 1 if no other T is better, without
        examples, and if there is no optimum between the bounds (`bound_of_temperature`).
    """
    if bound_of_temperature(logits_NC, labels, kind) is not None:
        return 1.0
    sharpness = scipy.optimize.brentq(
        _slope,
        1 / MAX_TEMPERATURE,
        1 / MIN_TEMPERATURE,
        args=_decisions(logits_NC, labels, kind),
        xtol=1e-15,  # Exact to the decimals of the result also where T is large.
    )
    temperature = round(1 / sharpness, 6)
    loss = negative_log_likelihood(logits_NC, labels, kind, temperature)
    return temperature if loss < negative_log_likelihood(logits_NC, labels, kind) else 1.0


def bound_of_temperature(logits_NC: np.ndarray, labels: np.ndarray, kind: str) -> float | None:
    """Return the bound at or beyond which the best temperature is, or `None`.

    MIN_TEMPERATURE: the data contains no error that limits the confidence, so a temperature fitted
    to it would weight every later error far too much. MAX_TEMPERATURE: the logits carry almost no
    information on the labels. Arguments as in `fit_temperature`.
    """
    decisions = _decisions(logits_NC, labels, kind)
    at_min, at_max = (_slope(1 / bound, *decisions) for bound in (MIN_TEMPERATURE, MAX_TEMPERATURE))
    # The slope increases with 1/T: if it is positive at the smallest 1/T, the optimum is beyond it.
    if at_max > 0:
        return MAX_TEMPERATURE
    return MIN_TEMPERATURE if at_max < 0 and at_min <= 0 else None


def negative_log_likelihood(
    logits_NC: np.ndarray, labels: np.ndarray, kind: str, temperature: float = 1.0
) -> float:
    """Return the mean of -log p(label), over examples or, for "sigmoid", over all logits.

    Arguments as in `fit_temperature`; 0 without examples.
    """
    scores_RK, labels_R = _decisions(logits_NC, labels, kind)
    if not len(labels_R):
        return 0.0
    log_probabilities_RK = scipy.special.log_softmax(scores_RK / temperature, axis=1)
    return float(-_of_label(log_probabilities_RK, labels_R).mean())


def _slope(sharpness: float, scores_RK: np.ndarray, labels_R: np.ndarray) -> float:
    """Return the derivative of the loss with respect to 1/T, which is increasing (convex loss).

    The terms are the scores minus the label's score, so that the sign is right even where
    probabilities round to 0 or 1.
    """
    above_RK = scores_RK - _of_label(scores_RK, labels_R)
    return float(np.sum(scipy.special.softmax(sharpness * scores_RK, axis=1) * above_RK))


def _decisions(
    logits_NC: np.ndarray, labels: np.ndarray, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores whose softmax is the probability, float64 `(R, K)`, and label ids, `(R,)`."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    scores_NC, labels = finite(logits_NC, "logits"), np.asarray(labels)
    if kind == "softmax":
        return scores_NC, labels.astype(np.int64)
    # sigmoid(x) is the softmax of 0 and x.
    logits_R = scores_NC.ravel()
    labels_R = labels.reshape(scores_NC.shape).ravel().astype(np.int64)
    return np.stack([np.zeros_like(logits_R), logits_R], axis=1), labels_R


def _of_label(values_RK: np.ndarray, labels_R: np.ndarray) -> np.ndarray:
    """Return the values of the labels, `(R, 1)`."""
    return np.take_along_axis(values_RK, labels_R[:, np.newaxis], axis=1)
