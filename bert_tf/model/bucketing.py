"""Sizes of batches: buckets of tokens, and limits that the planner of costs knows too.

TensorFlow is imported only where tensors are rounded.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

# Kernels are compiled again for each new shape. Multiples of 8 up to 64, then eight sizes per
# octave: 72, ..., 128, 144, ..., 256, 288, ...
BUCKET_SIZES = np.array(
    [
        0,
        *range(8, 64, 8),
        *(2**octave * eighth // 8 for octave in range(6, 30) for eighth in range(8, 16)),
    ],
    np.int32,
)
# Larger requests to a served model run in chunks of at most so many tokens: number of sequences
# times the length of the longest.
TOKENS_PER_CHUNK = 2**14
# In float32 packed products of BERT-base are faster up to 32 rows, equal from 48 to 64, and slower
# from 128 on. In bfloat16 and int8 they suit all texts; a branch for short ones would save these 3
# to 8% of the time, but hold a second packed copy of all weights (1.8 instead of 1.6 GB).
SHORT_TOKENS = 64
EVALUATION_BATCH_SIZE = 64  # Samples per replica and forward pass.


def round_up_to_bucket(number: "tf.Tensor | int") -> "tf.Tensor":
    """Round up to one of `BUCKET_SIZES`. Above 64, less than an eighth is added.

    Args:
        number: Scalar integer.

    Returns:
        Scalar int32.
    """
    import tensorflow as tf

    is_enough = BUCKET_SIZES >= tf.cast(number, tf.int32)
    return tf.reduce_min(tf.where(is_enough, BUCKET_SIZES, BUCKET_SIZES[-1]))


def bucket_of(number: int) -> int:
    """Return the number that `round_up_to_bucket` returns, without TensorFlow."""
    return int(BUCKET_SIZES[np.searchsorted(BUCKET_SIZES[:-1], number)])
