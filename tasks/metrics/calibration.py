"""Whether probabilities mean what they say, and the temperature that mends it (Guo et al. 2017).

Legend: N examples, C classes.
"""

import numpy as np

from tasks.metrics.checks import finite, same_shape

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
KINDS = ("softmax", "sigmoid")


def expected_calibration_error(probabilities_NC, labels_N, bins=15):
    """The mean distance of confidence and accuracy over `bins` bins of equal width; 0 if N = 0.

    The confidence is the highest probability of an example; a bin counts as often as examples fall
    into it, and holds its upper edge. Binary: C = 2, [1 - p, p].
    """
    probabilities_NC = finite(probabilities_NC, "probabilities")
    if not len(probabilities_NC):
        return 0.0
    confidence_N = probabilities_NC.max(1)
    labels_N, predictions_N = same_shape(labels_N, probabilities_NC.argmax(1))
    surplus_N = confidence_N - (predictions_N == labels_N)
    bin_N = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence_N)
    return float(np.abs(np.bincount(bin_N, weights=surplus_N)).sum() / len(surplus_N))


def fit_temperature(logits_NC, labels, kind):
    """The temperature T of softmax(logits / T), or sigmoid, that makes the labels likeliest.

    `kind` "softmax": labels are ids [N]. "sigmoid": each logit decides on its own; labels are as
    many as logits, bool or 0 and 1: [N] for one logit [N, 1], [N, C] for multi-label.
    T lies between MIN_TEMPERATURE and MAX_TEMPERATURE. It is 1 where no other is better, without
    examples, and where the data have no optimum between these bounds (`bound_of_temperature`).
    """
    if bound_of_temperature(logits_NC, labels, kind) is not None:
        return 1.0
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    if not logits_NC.size:
        return 1.0

    def slope(sharpness):
        return _slope(sharpness, logits_NC, labels_NC, kind)

    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    for _ in range(50):  # Halves a factor of 400, as a logarithm, to below 1e-14.
        middle = np.sqrt(low * high)
        low, high = (low, middle) if slope(middle) >= 0 else (middle, high)
    temperature = round(float(1 / np.sqrt(low * high)), 6)
    return (
        temperature
        if negative_log_likelihood(logits_NC, labels, kind, temperature)
        < negative_log_likelihood(logits_NC, labels, kind)
        else 1.0
    )


def bound_of_temperature(logits_NC, labels, kind):
    """Return the bound at or beyond which the likeliest temperature is, or `None`.

    MIN_TEMPERATURE: the data have no error that limits how sure answers may be, so that a
    temperature fitted to them would make every later error count for far too much.
    MAX_TEMPERATURE: the logits tell as good as nothing about the labels.
    Arguments as in `fit_temperature`.
    """
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    at_min, at_max = (
        _slope(1 / bound, logits_NC, labels_NC, kind)
        for bound in (MIN_TEMPERATURE, MAX_TEMPERATURE)
    )
    if at_max > 0:
        return MAX_TEMPERATURE
    return MIN_TEMPERATURE if at_max < 0 and at_min <= 0 else None


def negative_log_likelihood(logits_NC, labels, kind, temperature=1.0):
    """The mean of -log p(label), over examples or, if `kind` is "sigmoid", over all logits.

    As fit_temperature has it; 0 without examples.
    """
    logits_NC, labels_NC = _logits_and_labels(logits_NC, labels, kind)
    if not logits_NC.size:
        return 0.0
    logits_NC = logits_NC / temperature
    if kind == "softmax":
        logits_NC = logits_NC - logits_NC.max(1, keepdims=True)
        losses = np.log(np.exp(logits_NC).sum(1)) - (logits_NC * labels_NC).sum(1)
    else:
        losses = np.logaddexp(0, np.where(labels_NC == 1, -logits_NC, logits_NC))
    return float(losses.mean())


def _slope(sharpness, logits_NC, labels_NC, kind):
    """The slope of the loss over 1/T, in which it is convex: it only rises.

    Summed over what each logit is above the label's, so that its sign is right where probabilities
    round to 0 and 1.
    """
    if not logits_NC.size:
        return 0.0
    if kind == "sigmoid":
        above_NC = np.where(labels_NC == 1, -logits_NC, logits_NC)
        # sigmoid(x) by exp, not tanh: this keeps a small one that 1 + tanh would round to 0.
        weights_NC = np.exp(-np.logaddexp(0, -sharpness * above_NC))
    else:
        above_NC = logits_NC - (logits_NC * labels_NC).sum(1, keepdims=True)
        scaled_NC = sharpness * (logits_NC - logits_NC.max(1, keepdims=True))
        weights_NC = np.exp(scaled_NC) / np.exp(scaled_NC).sum(1, keepdims=True)
    return np.sum(weights_NC * above_NC)


def _logits_and_labels(logits_NC, labels, kind):
    """Both float64 [N, C], labels as 0 and 1."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}, wanted one of {', '.join(KINDS)}")
    logits_NC, labels = finite(logits_NC, "logits"), np.asarray(labels)
    if kind == "softmax":
        labels = np.eye(logits_NC.shape[1])[labels.astype(np.int64)]
    return logits_NC, labels.reshape(logits_NC.shape).astype(np.float64)
