"""Decision rules from logits to labels, in the graph; shared by metrics and serving.

Shape suffixes: B texts, C labels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Decision(NamedTuple):
    """Predictions for B texts.

    Attributes:
        probabilities: float32 `(B, C)`, after temperature scaling.
        label: int32 `(B,)`, id of the predicted label.
        score: float32 `(B,)`, probability of the predicted label.
        margin: float32 `(B,)`, change of probability that would change the prediction.
        selected: bool `(B, C)`, the predicted labels of multi-label tasks, else None.
    """

    probabilities: tf.Tensor
    label: tf.Tensor
    score: tf.Tensor
    margin: tf.Tensor
    selected: tf.Tensor | None = None


def decide_one(
    logits: tf.Tensor,
    temperature: float = 1.0,
    positive: int | None = None,
    threshold: float = 0.5,
) -> Decision:
    """Predict one label per text; ties go to the first label.

    Args:
        logits: `(B, C)`, or `(B, 1)` for the second of two labels.
        temperature: Divisor of the logits (Guo et al. 2017).
        positive: Id of the label to predict if its probability >= `threshold`; otherwise the most
            probable other label is predicted. None predicts the most probable label.
        threshold: Probability from which on `positive` is predicted.
    """
    logits = tf.cast(logits, tf.float32) / temperature
    if logits.shape[1] == 1:
        probabilities_BC = tf.sigmoid(tf.concat([-logits, logits], axis=1))
    else:
        probabilities_BC = tf.nn.softmax(logits)
    if positive is None:
        label_B = tf.argmax(probabilities_BC, axis=-1, output_type=tf.int32)
        margin_B = top2_gap(probabilities_BC)
    else:
        is_positive_C = tf.range(probabilities_BC.shape[1]) == positive
        others_BC = tf.where(is_positive_C, -1.0, probabilities_BC)
        above_B = probabilities_BC[:, positive] - threshold
        label_B = tf.where(
            above_B >= 0, positive, tf.argmax(others_BC, axis=-1, output_type=tf.int32)
        )
        margin_B = tf.where(above_B >= 0, above_B, tf.minimum(-above_B, top2_gap(others_BC)))
    return Decision(probabilities_BC, label_B, _of_label(probabilities_BC, label_B), margin_B)


def decide_each(
    logits_BC: tf.Tensor, temperature: float = 1.0, thresholds_C: Sequence[float] | float = 0.5
) -> Decision:
    """Select each label whose probability, of its own sigmoid logit, reaches its threshold.

    The `label` of the decision is the most probable one, even if it is not selected.
    """
    probabilities_BC = tf.sigmoid(tf.cast(logits_BC, tf.float32) / temperature)
    label_B = tf.argmax(probabilities_BC, axis=-1, output_type=tf.int32)
    score_B = _of_label(probabilities_BC, label_B)
    above_BC = probabilities_BC - thresholds_C
    margin_B = tf.minimum(top2_gap(probabilities_BC), tf.reduce_min(tf.abs(above_BC), axis=-1))
    return Decision(probabilities_BC, label_B, score_B, margin_B, probabilities_BC >= thresholds_C)


def top2_gap(values: tf.Tensor) -> tf.Tensor:
    """Return the difference of the two largest values along the last axis, inf if it has one."""
    if values.shape[-1] == 1:
        return tf.fill(tf.shape(values)[:-1], float("inf"))
    best, next_best = tf.unstack(tf.math.top_k(values, 2).values, axis=-1)
    return best - next_best


def _of_label(probabilities_BC, label_B):
    return tf.gather(probabilities_BC, label_B, axis=1, batch_dims=1)
