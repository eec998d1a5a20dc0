"""Decision thresholds fitted to dev data. An example is positive if its score >= the threshold.

A threshold is half way between the two scores that it separates: if it were equal to one of them,
rounding with another batch size or device could flip that decision.

Shape suffixes: N examples, K distinct scores.
"""

import numpy as np

from bert_tf.errors import UserError
from tasks.metrics.checks import finite, same_shape

UNREACHED = 2.0  # Above every probability.


def parse_objective(text: str) -> tuple[str, float | None]:
    """Return the name and minimum of "f1" (None), "precision=P" or "recall=R".

    Raises:
        UserError: If it is none of these, or P or R is not in (0, 1].
    """
    name, equals, number = text.partition("=") if isinstance(text, str) else ("", "", "")
    if name == "f1" and not equals:
        return name, None
    try:
        expected = float(number)
    except ValueError:
        expected = 0.0
    if name not in ("precision", "recall") or not 0 < expected <= 1:
        raise UserError(
            f"--threshold_objective={text}: expected f1, precision=P or recall=R with P and R > 0 "
            "and <= 1"
        )
    return name, expected


def best_threshold(
    is_positive_N: np.ndarray, scores_N: np.ndarray, objective: str
) -> tuple[float, dict[str, float | bool]]:
    """Return the threshold that is best for an objective, and its metrics on this data.

    Of equally good thresholds the highest is returned.

    Args:
        is_positive_N: bool.
        scores_N: float.
        objective: "f1" maximizes F1. "precision=P" maximizes recall among the thresholds of at
            least precision P; if there is none, "reached" is False and it maximizes precision, then
            recall. "recall=R" maximizes precision among the thresholds of at least recall R.

    Returns:
        (threshold, {"precision", "recall", "f1", "reached"}). Without a positive example "reached"
        is False, the metrics are 0 and the threshold is above all scores and probabilities.

    Raises:
        UserError: Without scores, or at an unknown objective.
    """
    name, minimum = parse_objective(objective)
    is_positive_N, scores_N = same_shape(is_positive_N, scores_N)
    descending_K, group_N = _descending(scores_N)
    positives = np.count_nonzero(is_positive_N)
    if not positives:
        achieved = dict.fromkeys(("precision", "recall", "f1"), 0.0)
        return max(cut(descending_K, 0), UNREACHED), {**achieved, "reached": False}
    # Entry k is for the threshold that the k + 1 highest distinct scores reach.
    hits_K = np.cumsum(np.bincount(group_N, weights=is_positive_N.astype(bool)))
    chosen_K = np.cumsum(np.bincount(group_N))
    metrics = {
        "precision": hits_K / chosen_K,
        "recall": hits_K / positives,
        # Not from the two above (as of precision_recall_curve), which would round ties apart.
        "f1": 2 * hits_K / (chosen_K + positives),
    }
    maximized = {"f1": "f1", "precision": "recall", "recall": "precision"}[name]
    is_allowed_K = np.ones(len(hits_K), bool) if minimum is None else metrics[name] >= minimum
    reached = bool(is_allowed_K.any())
    if not reached:  # Only a precision: a low enough threshold reaches each recall.
        is_allowed_K = metrics[name] == metrics[name].max()
    # argmax returns the first, that is, the highest threshold.
    best = int(np.where(is_allowed_K, metrics[maximized], -1.0).argmax())
    achieved = {metric: float(values_K[best]) for metric, values_K in metrics.items()}
    return cut(descending_K, best + 1), {**achieved, "reached": reached}


def threshold_for_false_alarms(normal_scores_N: np.ndarray, rate: float) -> float:
    """Return the lowest threshold that at most a fraction `rate` of the normal scores reach.

    Raises:
        UserError: Without scores, or if `rate` is not in [0, 1].
    """
    if not 0 <= rate <= 1:
        raise UserError(f"false alarm rate {rate}: expected a number from 0 to 1")
    descending_K, group_N = _descending(normal_scores_N)
    # Entry k counts the examples at or above the k + 1 highest distinct scores.
    alarms_K = np.cumsum(np.bincount(group_N))
    return cut(descending_K, int(np.count_nonzero(alarms_K / len(group_N) <= rate)))


def cut(descending_K: np.ndarray, count: int) -> float:
    """Return the threshold that exactly the first `count` of distinct, descending scores reach.

    Above the first score and below the last one there is no neighbour to be half way to. There, the
    threshold keeps half of the distance between the two nearest scores; if there is one score only,
    half of its absolute value (0.5 if it is 0).
    """
    if not len(descending_K):
        raise UserError("threshold: expected at least one score, received none")
    if len(descending_K) == 1:
        margin = abs(descending_K[0]) / 2 or 0.5
    elif count == 0:
        margin = (descending_K[0] - descending_K[1]) / 2
    else:
        margin = (descending_K[-2] - descending_K[-1]) / 2
    # Outer neighbors, so that the threshold is always half way between two entries.
    padded = np.concatenate(
        [[descending_K[0] + 2 * margin], descending_K, [descending_K[-1] - 2 * margin]]
    )
    high, low = padded[count : count + 2]
    middle = low + (high - low) / 2
    # Models compare in float32, where the midpoint may round to the lower score.
    for threshold in (np.float64(np.float32(middle)), np.float64(np.float32(high)), middle):
        if low < threshold <= high:
            return float(threshold)
    return float(high)


def _descending(scores_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct scores, descending float64 `(K,)`, and their index per example `(N,)`."""
    negated_K, group_N = np.unique(-finite(scores_N), return_inverse=True)
    return -negated_K, group_N
