"""One vector a text of the vectors of its tokens. Both take either layout of the encoder.

Legend: B texts, L tokens of the longest text, T rows, H hidden size.
"""

import tensorflow as tf


def mean_of_tokens(sequence, inputs):
    """[B, L, H], or [T, H] if flat -> float32 [B, H]; [CLS] and [SEP] count, padding does not."""
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        splits = tf.cast(inputs["row_splits"], tf.int64)
        rows = tf.RaggedTensor.from_row_splits(sequence[: splits[-1]], splits, validate=False)
        return tf.reduce_mean(rows, axis=1)
    mask_BL1 = tf.cast(inputs["input_mask"], tf.float32)[:, :, tf.newaxis]
    return tf.reduce_sum(sequence * mask_BL1, axis=1) / tf.reduce_sum(mask_BL1, axis=1)


def first_token(sequence, inputs):
    """[B, L, H], or [T, H] if flat -> float32 [B, H], the vectors of [CLS]."""
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.gather(sequence, inputs["row_splits"][:-1])
    return sequence[:, 0]
