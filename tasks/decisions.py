"""From logits to what is answered, in the graph: the one decision that metrics and serving share.

Legend: B texts, C labels.
"""

from typing import NamedTuple

import tensorflow as tf


class Decision(NamedTuple):
    """What is decided of B texts.

    probabilities float32 [B, C], after the temperature; label int32 [B], the id of the label given;
    score float32 [B], that label's probability; margin float32 [B], how much of probability another
    label was short of being given; selected bool [B, C], where a text may have several labels or
    none, else None.
    """

    probabilities: tf.Tensor
    label: tf.Tensor
    score: tf.Tensor
    margin: tf.Tensor
    selected: tf.Tensor | None = None


def decide_one(logits, temperature=1.0, positive=None, threshold=0.5):
    """One label a text. Logits [B, 1] stand for the second of two labels, else [B, C].

    With the id of a `positive` label, that one if its probability >= threshold, else the most
    probable of the others; without, the most probable. Of equals the first.
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


def decide_each(logits_BC, temperature=1.0, thresholds_C=0.5):
    """Each label on its own: selected if its probability >= its threshold.

    The label given beside is the most probable, be it selected or not.
    """
    probabilities_BC = tf.sigmoid(tf.cast(logits_BC, tf.float32) / temperature)
    label_B = tf.argmax(probabilities_BC, axis=-1, output_type=tf.int32)
    score_B = _of_label(probabilities_BC, label_B)
    above_BC = probabilities_BC - thresholds_C
    margin_B = tf.minimum(top2_gap(probabilities_BC), tf.reduce_min(tf.abs(above_BC), axis=-1))
    return Decision(probabilities_BC, label_B, score_B, margin_B, probabilities_BC >= thresholds_C)


def top2_gap(values):
    """[..., C] -> [...]: by how much the largest is more than the next, inf if there is no next."""
    if values.shape[-1] == 1:
        return tf.fill(tf.shape(values)[:-1], float("inf"))
    best, next_best = tf.unstack(tf.math.top_k(values, 2).values, axis=-1)
    return best - next_best


def _of_label(probabilities_BC, label_B):
    return tf.gather(probabilities_BC, label_B, axis=1, batch_dims=1)
