"""Pack one or two segments as [CLS] A [SEP] B [SEP], truncated.

Shape suffixes: B sequences, (T) tokens of a segment and (L) of a packed sequence (both ragged).
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from bert_tf.text.tokenizer import Tokens, map_tokens
from bert_tf.text.vocabulary import Vocabulary


class Packed(NamedTuple):
    """Packed sequences, ragged int32 `(B, (L))` each.

    Attributes:
        input_ids: Token ids with [CLS] and [SEP].
        segment_ids: 0 for [CLS] A [SEP], 1 for B [SEP].
        starts: First character of each token in its own segment, -1 for special tokens; or `None`.
        ends: Character after each token, -1 for special tokens; or `None`.
    """

    input_ids: tf.RaggedTensor
    segment_ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None


def pack(
    segments: Sequence[Tokens],
    vocabulary: Vocabulary,
    max_seq_length: int,
    truncation: str = "head",
) -> Packed:
    """Join one or two segments per sequence, truncated to `max_seq_length`.

    The longer segment is truncated first, as in the released _truncate_seq_pair. For example,
    [[5, 6]] and [[7]] give input_ids [CLS 5 6 SEP 7 SEP] and segment_ids [0 0 0 0 1 1].

    Args:
        segments: One or two `Tokens` of B texts.
        vocabulary: Provides the ids of [CLS] and [SEP].
        max_seq_length: Maximum number of tokens, including [CLS] and [SEP].
        truncation: Tokens that are kept of a segment: "head", the first ones, as released; "tail",
            the last ones; or "head_tail", the first quarter (rounded up) and the rest from the end,
            like the 128 and 382 of Sun et al. 2019, 5.3.1.

    Returns:
        `Packed`, with offsets if the segments have them.

    Raises:
        ValueError: `truncation` is none of these.
    """
    kept_lengths = _kept_lengths(segments, token_budget(len(segments), max_seq_length))
    segments = [
        truncate(segment, keep, truncation)
        for segment, keep in zip(segments, kept_lengths, strict=True)
    ]
    return concat_segments(segments, vocabulary)


def token_budget(num_segments: int, max_seq_length: int) -> int:
    """Return the number of tokens of a packed sequence without [CLS] and each [SEP]."""
    return max_seq_length - num_segments - 1


def concat_segments(segments: Sequence[Tokens], vocabulary: Vocabulary) -> Packed:
    """Join one or two segments per sequence without truncation, as `pack`."""
    cls_id, sep_id = vocabulary["[CLS]"], vocabulary["[SEP]"]
    ids, *offsets = zip(*segments, strict=True)
    segment_ids = [_column(ids[0], 0)]
    for number, piece in enumerate(ids):
        segment_ids += [tf.ones_like(piece) * number, _column(piece, number)]
    return Packed(
        interleave(ids, cls_id, sep_id),
        tf.concat(segment_ids, axis=1),
        *(None if pieces[0] is None else interleave(pieces, -1, -1) for pieces in offsets),
    )


def interleave(
    pieces: Sequence[tf.RaggedTensor], first: int | bool, between: int | bool
) -> tf.RaggedTensor:
    """Concatenate `first`, then each piece followed by `between`.

    Args:
        pieces: Ragged `(B, (T))` each.
        first: Value before the first piece, of the dtype of the pieces.
        between: Value after each piece.

    Returns:
        Ragged `(B, (L))`.
    """
    row = [_column(pieces[0], first)]
    for piece in pieces:
        row += [piece, _column(piece, between)]
    return tf.concat(row, axis=1)


def _kept_lengths(segments, budget):
    """Return the number of tokens to keep per segment, int64 `(B,)` each.

    It equals that of popping tokens one by one from the longer segment (from B on a tie). For a
    pair it is at most the segment's length.
    """
    if len(segments) == 1:
        return [tf.fill([segments[0].ids.nrows()], tf.cast(budget, tf.int64))]
    length_a, length_b = (segment.ids.row_lengths() for segment in segments)
    # A keeps what B does not use of the budget, but may always keep half of it. That is rounded up
    # because ties truncate B.
    keep_a = tf.minimum(length_a, tf.maximum(budget - length_b, (budget + 1) // 2))
    return [keep_a, tf.minimum(length_b, budget - keep_a)]


def truncate(segment: Tokens, keep_B: tf.Tensor, truncation: str = "head") -> Tokens:
    """Truncate a segment.

    Args:
        segment: `Tokens` of B texts.
        keep_B: int64 `(B,)`, maximum number of tokens.
        truncation: "head", "tail" or "head_tail"; see `pack`.

    Returns:
        `Tokens`, with offsets if the segment has them.

    Raises:
        ValueError: `truncation` is none of these.
    """
    # Tokens to keep from the start; the rest of keep_B is kept from the end.
    head_lengths = {"head": keep_B, "tail": tf.zeros_like(keep_B), "head_tail": (keep_B + 3) // 4}
    if truncation not in head_lengths:
        raise ValueError(f"truncation={truncation!r}: expected one of {', '.join(head_lengths)}")
    first_B = head_lengths[truncation]

    def kept(ragged):
        row_T = ragged.value_rowids()
        number_T = tf.range(tf.size(ragged.flat_values, out_type=tf.int64))
        position_T = number_T - tf.gather(ragged.row_starts(), row_T)
        # The tail starts where only the rest of the budget is left.
        last_from_B = ragged.row_lengths() - (keep_B - first_B)
        is_kept_T = position_T < tf.gather(first_B, row_T)
        is_kept_T |= position_T >= tf.gather(last_from_B, row_T)
        return tf.ragged.boolean_mask(ragged, ragged.with_flat_values(is_kept_T))

    return map_tokens(kept, segment)


def _column(ragged, value):
    """Return a column `(B, 1)` of one value."""
    return tf.fill([ragged.nrows(), 1], value)
