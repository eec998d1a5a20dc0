"""Thresholds that a dev set suggests. An example is positive if its score >= the threshold.

A threshold lies half way between the two scores that it parts: were it one of them, the rounding
of another batch size or device would flip that decision. Legend: N examples, K distinct scores.
"""

import numpy as np

from bert_tf.errors import UserError
from tasks.metrics.checks import finite, same_shape
from tasks.metrics.labels import ratio


def parse_objective(text):
    """(name, wanted): "f1" gives ("f1", None), "precision=0.9" ("precision", 0.9), recall alike."""
    name, equals, number = text.partition("=")
    if name == "f1" and not equals:
        return name, None
    try:
        expected = float(number)
    except ValueError:
        expected = 0.0
    if name not in ("precision", "recall") or not 0 < expected <= 1:
        raise UserError(
            f"--threshold_objective: got {text!r}, wanted f1, precision=P or recall=R, "
            "P and R being above 0 and at most 1"
        )
    return name, expected


def best_threshold(is_positive_N, scores_N, objective):
    """(threshold, {"precision", "recall", "f1", "reached"}), the figures being those of this data.

    `objective`, of equals always the highest threshold:
    "f1"            the highest F1
    "precision=P"   the highest recall among the thresholds of at least precision P; if there is
                    none, "reached" is False, and it is that of the highest precision (then recall)
    "recall=R"      the highest precision among the thresholds of at least recall R

    Data without a positive decide nothing: "reached" is False, the figures are 0, and the threshold
    is above all scores. Raises UserError at data without scores, and as parse_objective does.
    """
    name, expected = parse_objective(objective)
    is_positive_N, scores_N = same_shape(is_positive_N, scores_N)
    descending_K, group_N = _descending(scores_N)
    positives = np.count_nonzero(is_positive_N)
    # Of the threshold below the 1, 2, ... K highest scores:
    hits_K = np.cumsum(np.bincount(group_N, weights=is_positive_N.astype(bool)))
    chosen_K = np.cumsum(np.bincount(group_N))
    metrics = {
        "precision": ratio(hits_K, chosen_K),
        "recall": ratio(hits_K, np.full_like(hits_K, positives)),
        "f1": ratio(2 * hits_K, chosen_K + positives),
    }
    if not positives:
        return cut(descending_K, 0), {**dict.fromkeys(metrics, 0.0), "reached": False}
    allowed_K = np.ones(len(hits_K), bool) if expected is None else metrics[name] >= expected
    reached = bool(allowed_K.any())
    if name == "f1":
        merits = metrics["f1"], -chosen_K
    elif name == "precision" and reached:
        merits = metrics["recall"], -chosen_K
    else:  # The precision, for its own sake or beside a recall, which a low threshold reaches.
        merits = metrics["precision"], -chosen_K if reached else hits_K
    candidates = np.flatnonzero(allowed_K | (not reached))
    best = candidates[np.lexsort([merit_K[candidates] for merit_K in reversed(merits)])[-1]]
    achieved = {metric: float(values_K[best]) for metric, values_K in metrics.items()}
    return cut(descending_K, best + 1), {**achieved, "reached": reached}


def threshold_for_false_alarms(normal_scores_N, rate):
    """The lowest threshold that at most a share of `rate` of the normal scores reach.

    Raises UserError without scores, or if the rate is none.
    """
    if not 0 <= rate <= 1:
        raise UserError(f"the rate of false alarms is {rate}, wanted a number from 0 to 1")
    descending_K, group_N = _descending(normal_scores_N)
    alarms_K = np.cumsum(np.bincount(group_N))
    return cut(descending_K, np.count_nonzero(alarms_K / len(group_N) <= rate))


def cut(descending_K, count):
    """The threshold that the first `count` of distinct, descending scores reach, and no other.

    Beyond the first and the last, where there is nothing to lie half way to, it keeps half of the
    distance to their neighbour; a score without neighbours, half of its own size (0: 0.5).
    """
    if not len(descending_K):
        raise UserError("no scores to set a threshold by, wanted at least one")
    if len(descending_K) == 1:
        margin = abs(descending_K[0]) / 2 or 0.5
    elif count == 0:
        margin = (descending_K[0] - descending_K[1]) / 2
    else:
        margin = (descending_K[-2] - descending_K[-1]) / 2
    padded = np.concatenate(
        [[descending_K[0] + 2 * margin], descending_K, [descending_K[-1] - 2 * margin]]
    )
    high, low = padded[count : count + 2]
    middle = low + (high - low) / 2
    # Models compare in float32, where the middle of two neighbours may become the lower one.
    for threshold in (np.float64(np.float32(middle)), np.float64(np.float32(high)), middle):
        if low < threshold <= high:
            return float(threshold)
    return float(high)


def _descending(scores_N):
    """Distinct scores float64 [K], highest first, and each example's place among them [N]."""
    negated_K, group_N = np.unique(-finite(scores_N), return_inverse=True)
    return -negated_K, group_N
