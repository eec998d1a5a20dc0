"""Bucket sizes for numbers of tokens, since kernels are compiled again for each new shape."""

import numpy as np
import tensorflow as tf

# Multiples of 8 up to 64, then eight sizes per octave: 72, ..., 128, 144, ..., 256, 288, ...
BUCKET_SIZES = np.array(
    [
        0,
        *range(8, 64, 8),
        *(2**octave * eighth // 8 for octave in range(6, 30) for eighth in range(8, 16)),
    ],
    np.int32,
)


def round_up_to_bucket(number: tf.Tensor | int) -> tf.Tensor:
    """Round up to one of `BUCKET_SIZES`. Above 64, less than an eighth is added.

    Args:
        number: Scalar integer.

    Returns:
        Scalar int32.
    """
    is_enough = BUCKET_SIZES >= tf.cast(number, tf.int32)
    return tf.reduce_min(tf.where(is_enough, BUCKET_SIZES, BUCKET_SIZES[-1]))
