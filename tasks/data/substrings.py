"""Substrings of texts between character offsets, in the graph.

Characters are counted as in the tokenizer: invalid UTF-8 counts as in bytes.decode("utf-8",
"replace"). The two functions have the same results. They differ in memory: one is for substrings
that overlap little, the other for many substrings of the same characters.

Shape suffixes: B texts, M substrings of all texts, K substrings of a text.
"""

import tensorflow as tf

WIDER_FROM = (0x80, 0x800, 0x10000)  # From each code point on, UTF-8 takes one more byte.


def cut_disjoint(
    texts: tf.Tensor, text_M: tf.Tensor, start_M: tf.Tensor, end_M: tf.Tensor
) -> tf.Tensor:
    """Return substrings that overlap little.

    Memory grows with the characters of the texts and of the substrings.

    Args:
        texts: string `(B,)`.
        text_M: int `(M,)`, index of each substring's text.
        start_M: int `(M,)`, first character.
        end_M: int `(M,)`, character after the last.

    Returns:
        string `(M,)`.
    """
    codes = _codes(texts)
    begin_M = tf.gather(codes.row_starts(), text_M)
    positions = tf.ragged.range(
        begin_M + tf.cast(start_M, tf.int64), begin_M + tf.cast(end_M, tf.int64)
    )
    return tf.strings.unicode_encode(tf.gather(codes.flat_values, positions), "UTF-8")


def cut_overlapping(texts: tf.Tensor, start_BK: tf.Tensor, end_BK: tf.Tensor) -> tf.Tensor:
    """Return K substrings of each text, which may overlap.

    Cutting bytes instead of code points takes a twelfth of the memory if a long word has many
    substrings. Each text is repeated K times.

    Args:
        texts: string `(B,)`.
        start_BK: int `(B, K)`, first character; -1 counts as 0.
        end_BK: int `(B, K)`, character after the last; -1 counts as 0.

    Returns:
        string `(B, K)`.
    """
    codes = _codes(texts)
    sizes = 1 + tf.add_n([tf.cast(codes.flat_values >= code, tf.int32) for code in WIDER_FROM])
    ends = tf.concat([[0], tf.cumsum(sizes)], axis=0)
    begin_B1 = codes.row_starts()[:, tf.newaxis]
    start_BK, end_BK = (
        tf.gather(ends, begin_B1 + tf.cast(tf.maximum(positions, 0), tf.int64))
        - tf.gather(ends, begin_B1)
        for positions in (start_BK, end_BK)
    )
    texts_B1 = tf.strings.unicode_encode(codes, "UTF-8")[:, tf.newaxis]
    texts_BK = tf.repeat(texts_B1, tf.shape(start_BK)[1], axis=1)
    return tf.strings.substr(texts_BK, start_BK, end_BK - start_BK)


def _codes(texts):
    """Return the code points of texts, ragged int32 `(B, (characters))`."""
    return tf.strings.unicode_decode(texts, "UTF-8", errors="replace")
