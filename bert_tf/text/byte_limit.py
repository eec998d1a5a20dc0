"""A limit to what a string may cost: its first bytes, and what is behind them is not read.

Legend: B texts.
"""

import tensorflow as tf

MAX_BYTES = 2**20  # Of a string: 150,000 English words.
LONGEST_CHARACTER = 4  # Bytes, in UTF-8.


def truncate_utf8(texts, max_bytes=MAX_BYTES):
    """Strings of any shape, each cut to at most `max_bytes` bytes, at the end of a character.

    ["abc", "d\\u00e9"], max_bytes 2 -> ["ab", "d"]. Bytes that are no UTF-8 are cut at `max_bytes`.
    """
    texts_B = tf.reshape(texts, [-1])
    lengths_B = tf.strings.length(texts_B)
    (long,) = tf.unstack(tf.where(lengths_B > max_bytes), axis=1)
    # Up to the first byte that is cut off. If a character goes on there, its begin goes too.
    before = min(LONGEST_CHARACTER - 1, max_bytes)
    last = tf.strings.substr(tf.gather(texts_B, long), max_bytes - before, before + 1)
    last = tf.io.decode_raw(last, tf.uint8, fixed_length=before + 1)
    is_continuation = tf.cast((last & 0xC0) == 0x80, tf.int32)
    # How many of them in a row, counted from the end.
    count = tf.reduce_sum(tf.math.cumprod(is_continuation, axis=1, reverse=True), axis=1)
    kept = tf.tensor_scatter_nd_update(
        tf.minimum(lengths_B, max_bytes),
        long[:, tf.newaxis],
        max_bytes - tf.where(count <= before, count, 0),
    )
    return tf.reshape(tf.strings.substr(texts_B, tf.zeros_like(kept), kept), tf.shape(texts))
