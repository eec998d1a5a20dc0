"""Tokenize the beginning or end of long texts without reading all of them.

A text is cut only before a character that separates words and that no tokenizer rule looks across:
an ASCII space or punctuation mark, or a CJK ideograph. The tokens of the excerpt therefore equal
those of the complete text. If no such character is within reach, more of the text is read.

Shape suffixes: B texts, b a subset of them, X bytes within reach of a cut.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bert_tf.text.tokenizer import Tokens, concat_tokens

BYTES_PER_TOKEN = 16  # Read first per requested token; then four times as many.
REACH = 2**10  # Bytes searched for a cut before a position.

# Excluded are ".", ":", "'", "^" and "`", because the lower case of a capital sigma depends on what
# follows them, and "]", the end of "[MASK]".
CUT_BEFORE = b' \t\n\r!"#$%&()*+,-/;<=>?@[\\_{|}~'
# The first of the three bytes of U+5000 to U+9FFF.
IDEOGRAPHS = (0xE5, 0xE9)


def tokenize_ends(
    tokenize: Callable[[tf.Tensor], Tokens],
    texts: tf.Tensor,
    max_tokens: int,
    truncation: str = "head",
) -> Tokens:
    """Tokenize only as much of long texts as `max_tokens` tokens require.

    Args:
        tokenize: Maps string `(B,)` to `Tokens`, such as a method of `Tokenizer`.
        texts: String `(B,)`.
        max_tokens: Maximum number of tokens that are kept of a text.
        truncation: Tokens that are kept: "head", "tail" or "head_tail"; see `packing.pack`.

    Returns:
        `Tokens` of each text: all of them, or at least `max_tokens` from each end that `truncation`
        keeps. Offsets count characters of the complete text.
    """
    size_B = _sizes(tokenize, texts, max_tokens, truncation)
    sides = []
    for begin_B, part_B in _sides(texts, size_B, truncation):
        tokens = tokenize(part_B)
        if begin_B is not None and tokens.starts is not None:
            # Characters are counted as in the tokenizer, where invalid bytes are replaced.
            before_B = tf.strings.substr(texts, tf.zeros_like(begin_B), begin_B)
            before = tf.strings.unicode_decode(before_B, "UTF-8", errors="replace")
            shift = tf.cast(before.row_lengths(), tf.int32)[:, tf.newaxis]
            tokens = Tokens(tokens.ids, tokens.starts + shift, tokens.ends + shift)
        sides.append(tokens)
    return sides[0] if len(sides) == 1 else concat_tokens(sides, axis=1)


def last_cuts(texts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the last position at or before `positions` where a text may be cut.

    Args:
        texts: String `(B,)`.
        positions: int32 `(B,)`, in bytes.

    Returns:
        int32 `(B,)`, in bytes; 0 if there is no cut within `REACH` bytes.
    """
    begin_B = tf.maximum(positions - REACH, 0)
    # Two more bytes are read because an ideograph is recognized by all of its three bytes.
    bytes_BX = tf.strings.substr(texts, begin_B, tf.fill(tf.shape(begin_B), REACH + 3))
    bytes_BX = tf.io.decode_raw(bytes_BX, tf.uint8, fixed_length=REACH + 3)
    is_mark = np.zeros(256, bool)
    is_mark[list(CUT_BEFORE)] = True
    is_cut_BX = tf.gather(tf.constant(is_mark), tf.cast(bytes_BX[:, :-2], tf.int32))
    is_ideograph_BX = (bytes_BX[:, :-2] >= IDEOGRAPHS[0]) & (bytes_BX[:, :-2] <= IDEOGRAPHS[1])
    is_continuation_BX = (bytes_BX & 0xC0) == 0x80
    is_cut_BX |= is_ideograph_BX & is_continuation_BX[:, 1:-1] & is_continuation_BX[:, 2:]
    position_BX = begin_B[:, tf.newaxis] + tf.range(REACH + 1)
    is_cut_BX &= position_BX <= positions[:, tf.newaxis]
    return tf.reduce_max(tf.where(is_cut_BX, position_BX, 0), axis=1)


def _sizes(tokenize, texts, max_tokens, truncation):
    """Return the number of bytes to read from each end of each text, int32 `(B,)`."""
    num_sides = 2 if truncation == "head_tail" else 1
    length_B = tf.strings.length(texts)
    size_B = tf.fill(tf.shape(length_B), BYTES_PER_TOKEN * max_tokens)

    def is_open(size_B):
        return length_B > num_sides * size_B

    def more(size_B, is_open_B):
        (row_b,) = tf.unstack(tf.where(is_open_B), axis=1)
        of_rows, size_b = tf.gather(texts, row_b), tf.gather(size_B, row_b)
        counts = [
            tokenize(part_b).ids.row_lengths() for _, part_b in _sides(of_rows, size_b, truncation)
        ]
        has_too_few_b = tf.reduce_min(tf.stack(counts), axis=0) < max_tokens
        (short_b,) = tf.unstack(tf.where(has_too_few_b), axis=1)
        row_b, size_b = tf.gather(row_b, short_b), tf.gather(size_b, short_b)
        size_b = 4 * tf.minimum(size_b, tf.gather(length_B, row_b) // 4 + 1)
        size_B = tf.tensor_scatter_nd_update(size_B, row_b[:, tf.newaxis], size_b)
        is_short_B = tf.scatter_nd(
            row_b[:, tf.newaxis], tf.ones_like(size_b), tf.shape(size_B, tf.int64)
        )
        return size_B, is_open(size_B) & (is_short_B > 0)

    size_B, _ = tf.while_loop(
        lambda size_B, is_open_B: tf.reduce_any(is_open_B),
        more,
        (size_B, is_open(size_B)),
        parallel_iterations=1,
    )
    return size_B


def _sides(texts, size_B, truncation):
    """Return a (begin, excerpt) pair per end that is kept; begin is `None` for the head."""
    length_B = tf.strings.length(texts)
    is_long_B = length_B > (2 if truncation == "head_tail" else 1) * size_B
    (row_b,) = tf.unstack(tf.where(is_long_B), axis=1)
    long_b, size_b = tf.gather(texts, row_b), tf.gather(size_B, row_b)

    def cut(positions_b, of_short_B):
        cuts_b = last_cuts(long_b, positions_b)
        return tf.tensor_scatter_nd_update(of_short_B, row_b[:, tf.newaxis], cuts_b)

    sides = []
    if truncation != "tail":
        end_B = cut(size_b, length_B)
        sides.append((None, tf.strings.substr(texts, tf.zeros_like(end_B), end_B)))
    if truncation != "head":
        # Short texts are read from one end only.
        of_short_B = tf.zeros_like(length_B) if truncation == "tail" else length_B
        begin_B = cut(tf.strings.length(long_b) - size_b, of_short_B)
        sides.append((begin_B, tf.strings.substr(texts, begin_B, length_B - begin_B)))
    return sides
