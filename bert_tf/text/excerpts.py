"""Limits of long texts: a number of bytes per string, and tokenizing its beginning or end alone.

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
MAX_BYTES = 2**20  # Per input string; about 150,000 English words.
LONGEST_CHARACTER = 4  # Bytes, in UTF-8.


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
    num_sides = 2 if truncation == "head_tail" else 1
    length_B = tf.strings.length(texts)

    def read(size_B):
        """Tokenize excerpts; return sizes for the next time, whether it is needed, and tokens."""
        sides = [
            _shifted(tokenize(part_B), texts, begin_B)
            for begin_B, part_B in _sides(texts, size_B, truncation)
        ]
        counts = [tokens.ids.row_lengths() for tokens in sides]
        is_short_B = tf.reduce_min(tf.stack(counts), axis=0) < max_tokens
        is_short_B &= length_B > num_sides * size_B
        larger_B = 4 * tf.minimum(size_B, length_B // 4 + 1)
        tokens = sides[0] if len(sides) == 1 else concat_tokens(sides, axis=1)
        return tf.where(is_short_B, larger_B, size_B), tf.reduce_any(is_short_B), tokens

    size_B = tf.fill(tf.shape(length_B), BYTES_PER_TOKEN * max_tokens)
    return _repeated(read, size_B)


def last_cuts(texts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the last position at or before `positions` where a text may be cut.

    Positions are int32 `(B,)`, in bytes; 0 if there is no cut within `REACH` bytes.
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


def truncate_utf8(texts: tf.Tensor, max_bytes: int = MAX_BYTES) -> tf.Tensor:
    """Truncate strings of any shape to at most `max_bytes` bytes, at a character boundary.

    For example, ["abc", "dé"] with max_bytes=2 becomes ["ab", "d"]. Invalid UTF-8 is cut at
    `max_bytes` exactly.
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


def _repeated(read, size_B):
    """Call `read` with the sizes that it returns until it asks for no other; return the tokens.

    A graph gets a loop that makes the first call as well. Another call before it would add all
    operations of the tokenizer a second time, and TensorFlow would take longer to optimize them.
    """
    if tf.executing_eagerly():
        is_short = True
        while is_short:
            size_B, is_short, tokens = read(size_B)
        return tokens

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def columns(size_B):
        size_B, is_short, tokens = read(size_B)
        return size_B, is_short, [ragged for ragged in tokens if ragged is not None]

    columns = columns.get_concrete_function()
    spec = columns.structured_outputs[-1]
    parts = [tf.zeros([0], part.dtype) for part in tf.nest.flatten(spec, expand_composites=True)]

    def body(size_B, is_short, parts):
        size_B, is_short, ragged = columns(size_B)
        return size_B, is_short, tf.nest.flatten(ragged, expand_composites=True)

    *_, parts = tf.while_loop(
        lambda size_B, is_short, parts: is_short,
        body,
        (size_B, True, parts),
        (size_B.shape, tf.TensorShape([]), [tf.TensorShape([None])] * len(parts)),
        parallel_iterations=1,
    )
    return Tokens(*tf.nest.pack_sequence_as(spec, parts, expand_composites=True))


def _shifted(tokens, texts, begin_B):
    """Return tokens with offsets in `texts` instead of in excerpts that begin at `begin_B`."""
    if begin_B is None or tokens.starts is None:
        return tokens
    # Characters are counted as in the tokenizer, where invalid bytes are replaced.
    before_B = tf.strings.substr(texts, tf.zeros_like(begin_B), begin_B)
    before = tf.strings.unicode_decode(before_B, "UTF-8", errors="replace")
    shift = tf.cast(before.row_lengths(), tf.int32)[:, tf.newaxis]
    return Tokens(tokens.ids, tokens.starts + shift, tokens.ends + shift)


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
