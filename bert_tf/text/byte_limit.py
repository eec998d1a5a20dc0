"""Byte limit of input strings: only their first bytes are read.

Shape suffixes: B strings.
"""

import tensorflow as tf

MAX_BYTES = 2**20  # Per string; about 150,000 English words.
LONGEST_CHARACTER = 4  # Bytes, in UTF-8.


def truncate_utf8(texts: tf.Tensor, max_bytes: int = MAX_BYTES) -> tf.Tensor:
    """Truncate strings to at most `max_bytes` bytes, at a character boundary.

    For example, ["abc", "dé"] with max_bytes=2 becomes ["ab", "d"]. Invalid UTF-8 is cut at
    `max_bytes` exactly.

    Args:
        texts: String tensor of any shape.
        max_bytes: Maximum number of bytes per string.

    Returns:
        String tensor of the same shape.
    """
    texts_B = tf.reshape(texts, [-1])
    lengths_B = tf.strings.length(texts_B)
    (long,) = tf.unstack(tf.where(lengths_B > max_bytes), axis=1)
    # Inspect the last bytes up to the first one that is cut off. If that one continues a character,
    # the beginning of the character is cut off too.
    before = min(LONGEST_CHARACTER - 1, max_bytes)
    last = tf.strings.substr(tf.gather(texts_B, long), max_bytes - before, before + 1)
    last = tf.io.decode_raw(last, tf.uint8, fixed_length=before + 1)
    is_continuation = tf.cast((last & 0xC0) == 0x80, tf.int32)
    # Number of consecutive continuation bytes, counted from the end.
    count = tf.reduce_sum(tf.math.cumprod(is_continuation, axis=1, reverse=True), axis=1)
    kept = tf.tensor_scatter_nd_update(
        tf.minimum(lengths_B, max_bytes),
        long[:, tf.newaxis],
        max_bytes - tf.where(count <= before, count, 0),
    )
    return tf.reshape(tf.strings.substr(texts_B, tf.zeros_like(kept), kept), tf.shape(texts))
