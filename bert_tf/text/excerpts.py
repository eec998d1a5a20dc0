"""The first or last tokens of a text without reading all of it.

A text is cut only before a character that parts words and that no rule of the tokenizer looks
across: an ASCII space or mark, or a CJK ideograph. So the tokens of both sides are those of the
whole text. Where there is no such character in reach, more of the text is read.

Legend: B texts, X bytes in reach of a cut.
"""

import numpy as np
import tensorflow as tf

from bert_tf.text.tokenizer import Tokens

BYTES_PER_TOKEN = 16  # Read at first for each token that is wanted; four times that where too few.
REACH = 2**10  # Bytes before a place in which a cut is looked for.

# Not ".", ":", "'", "^" and "`", which a capital sigma looks across; nor "]", the end of "[MASK]".
CUT_BEFORE = b' \t\n\r!"#$%&()*+,-/;<=>?@[\\_{|}~'
# The first of the three bytes of U+5000 to U+9FFF.
IDEOGRAPHS = (0xE5, 0xE9)


def tokenize_ends(tokenize, texts, max_tokens, truncation="head"):
    """Tokenizes of long texts only so much that `max_tokens` of them can be kept.

    Args:
        tokenize: A Tokenizer's method, or what gives Tokens as one does.
        texts: string [B].
        max_tokens: How many tokens a mode of `truncation` keeps at most; see packing.pack.

    Returns:
        Tokens: of each text all, or some of its first, last, or first and last tokens, at least
        `max_tokens` of each. Offsets count characters of the text.
    """
    size_B = _sizes(tokenize, texts, max_tokens, truncation)
    sides = []
    for begin_B, part_B in _sides(texts, size_B, truncation):
        tokens = tokenize(part_B)
        if begin_B is not None and tokens.starts is not None:
            # Counted as the tokenizer counts them.
            before_B = tf.strings.substr(texts, tf.zeros_like(begin_B), begin_B)
            before = tf.strings.unicode_decode(before_B, "UTF-8", errors="replace")
            shift = tf.cast(before.row_lengths(), tf.int32)[:, tf.newaxis]
            tokens = Tokens(tokens.ids, tokens.starts + shift, tokens.ends + shift)
        sides.append(tokens)
    if len(sides) == 1:
        return sides[0]
    return Tokens(
        *(
            None if parts[0] is None else tf.concat(parts, axis=1)
            for parts in zip(*sides, strict=True)
        )
    )


def last_cuts(texts, positions):
    """The last place of each text, `positions` at most, to cut before, int32 [B].

    0, its beginning, where none of the REACH bytes before is one.
    """
    begin_B = tf.maximum(positions - REACH, 0)
    # Two bytes more, by which an ideograph is known.
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
    """Return how many bytes to read of each text, on each side that is kept, int32 [B]."""
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
    """[(where it begins, None at the beginning, what is read there)] of each side that is kept."""
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
        # A short text is read on one side only.
        of_short_B = tf.zeros_like(length_B) if truncation == "tail" else length_B
        begin_B = cut(tf.strings.length(long_b) - size_b, of_short_B)
        sides.append((begin_B, tf.strings.substr(texts, begin_B, length_B - begin_B)))
    return sides
