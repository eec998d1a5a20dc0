"""Pooling: one vector per text from the vectors of its tokens.

All functions accept either layout of the encoder. Shape suffixes: B texts, L tokens of the longest
text, T flattened tokens, H hidden size.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf

from bert_tf.model.layout import by_sequence


def mean_of_tokens(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the mean vector of all tokens, [CLS] and [SEP] included, without padding.

    Args:
        sequence: Token vectors, `(R, L, H)`, or `(T, H)` in the flat layout.
        inputs: The encoder's inputs.

    Returns:
        float32 `(B, H)`; 0 for a sequence without tokens.
    """
    sum_BH, count_B1 = _sums(sequence, inputs)
    return sum_BH / count_B1


def mean_by_square_root(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the sum of all vectors, divided by the square root of their number.

    Arguments and result as of `mean_of_tokens`.
    """
    sum_BH, count_B1 = _sums(sequence, inputs)
    return sum_BH / tf.sqrt(count_B1)


def largest_of_tokens(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the largest value of all tokens per component.

    Arguments and result as of `mean_of_tokens`; the lowest number for a sequence without tokens.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.reduce_max(_ragged(sequence, inputs), axis=1)
    vectors_BLH, is_token_BL = by_sequence(sequence, inputs)
    is_token_BL1 = tf.expand_dims(is_token_BL, axis=2)
    return tf.reduce_max(tf.where(is_token_BL1, vectors_BLH, vectors_BLH.dtype.min), axis=1)


def first_token(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the vector of [CLS].

    Arguments and result as of `mean_of_tokens`.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.gather(sequence, inputs["row_splits"][:-1])
    return by_sequence(sequence, inputs)[0][:, 0]


# By name, as in sentence-transformers.
POOLING: dict[str, Callable[[tf.Tensor, Mapping[str, tf.Tensor]], tf.Tensor]] = {
    "cls": first_token,
    "mean": mean_of_tokens,
    "max": largest_of_tokens,
    "mean_sqrt_len": mean_by_square_root,
}


def _sums(sequence, inputs):
    """Return the sum of the vectors of each text, float32 `(B, H)`, and their number `(B, 1)`."""
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        rows = _ragged(sequence, inputs)
        sum_BH = tf.reduce_sum(rows, axis=1)
        count_B1 = tf.expand_dims(tf.cast(rows.row_lengths(), tf.float32), axis=1)
    else:
        vectors_BLH, is_token_BL = by_sequence(sequence, inputs)
        mask_BL1 = tf.expand_dims(tf.cast(is_token_BL, tf.float32), axis=2)
        sum_BH = tf.reduce_sum(vectors_BLH * mask_BL1, axis=1)
        count_B1 = tf.reduce_sum(mask_BL1, axis=1)
    return sum_BH, tf.maximum(count_B1, 1.0)


def _ragged(sequence, inputs):
    splits = tf.cast(inputs["row_splits"], tf.int64)
    return tf.RaggedTensor.from_row_splits(sequence[: splits[-1]], splits, validate=False)
