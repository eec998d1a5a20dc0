"""Pooling: one vector per text from the vectors of its tokens.

Both functions accept either layout of the encoder. Shape suffixes: B texts, L tokens of the longest
text, T flattened tokens, H hidden size.
"""

from collections.abc import Mapping

import tensorflow as tf


def mean_of_tokens(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the mean vector of all tokens, [CLS] and [SEP] included, without padding.

    Args:
        sequence: Token vectors, padded `(B, L, H)` or flat `(T, H)`.
        inputs: The encoder's inputs, with `input_mask` if padded, `row_splits` if flat.

    Returns:
        float32 `(B, H)`.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        splits = tf.cast(inputs["row_splits"], tf.int64)
        rows = tf.RaggedTensor.from_row_splits(sequence[: splits[-1]], splits, validate=False)
        return tf.reduce_mean(rows, axis=1)
    mask_BL1 = tf.expand_dims(tf.cast(inputs["input_mask"], tf.float32), axis=2)
    return tf.reduce_sum(sequence * mask_BL1, axis=1) / tf.reduce_sum(mask_BL1, axis=1)


def first_token(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the vector of [CLS].

    Args:
        sequence: Token vectors, padded `(B, L, H)` or flat `(T, H)`.
        inputs: The encoder's inputs, with `input_mask` if padded, `row_splits` if flat.

    Returns:
        float32 `(B, H)`.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.gather(sequence, inputs["row_splits"][:-1])
    return sequence[:, 0]
