"""Random bits by hashing in the graph, with SplitMix64 (Steele et al. 2014).

They depend on their key alone, not on TensorFlow's random generators or the order of operations.

Shape suffixes: B keys.
"""

import numpy as np
import tensorflow as tf

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # Step between the states: 2**64 / golden ratio, odd.


def mix(values: tf.Tensor) -> tf.Tensor:
    """Apply the finalizer of SplitMix64, a bijection of uint64.

    Each bit of the input flips each bit of the result half of the time.
    """
    values = xor_shift(values, 30) * np.uint64(0xBF58476D1CE4E5B9)
    values = xor_shift(values, 27) * np.uint64(0x94D049BB133111EB)
    return xor_shift(values, 31)


def xor_shift(values: tf.Tensor, bits: int) -> tf.Tensor:
    """Return values ^ (values >> bits) of unsigned integers; for bits > 0 it is a bijection."""
    return values ^ tf.bitwise.right_shift(values, tf.constant(bits, values.dtype))


def random_int63(keys_B: tf.Tensor, count: tf.Tensor | int) -> tf.Tensor:
    """Draw uniform integers in [0, 2**63), the output of SplitMix64 without its lowest bit.

    Args:
        keys_B: uint64 seed per row.
        count: Numbers per row.

    Returns:
        int64 `(B, count)`.
    """
    steps = tf.cast(tf.range(1, count + 1), tf.uint64) * GAMMA
    mixed = mix(keys_B[:, tf.newaxis] + steps)
    return tf.cast(tf.bitwise.right_shift(mixed, np.uint64(1)), tf.int64)
