"""Pack one or two segments as [CLS] A [SEP] B [SEP], truncated.

A packed sequence is a list of ranges of tokens. All ranges of a batch are gathered at once: each
operation counts where a single text is served, and for the time that TensorFlow needs to optimize a
graph.

Shape suffixes: B sequences, (T) tokens of a segment and (L) of a packed sequence (both ragged).
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from bert_tf.text.tokenizer import Tokens
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


class Ranges(NamedTuple):
    """A range of tokens per sequence, int64 `(B,)` each.

    Attributes:
        begin_B: Index of the first token, among the tokens of all texts.
        end_B: Index after the last one.
    """

    begin_B: tf.Tensor
    end_B: tf.Tensor


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
            the last ones; or "head_tail". The latter keeps the first quarter (rounded up) and the
            rest from the end, like the 128 and 382 of Sun et al. 2019, 5.3.1.

    Returns:
        `Packed`, with offsets if the segments have them.

    Raises:
        ValueError: `truncation` is none of these.
    """
    lengths = [segment.ids.row_lengths() for segment in segments]
    kept_lengths = _kept_lengths(lengths, token_budget(len(segments), max_seq_length))
    ranges = [
        _kept(Ranges(segment.ids.row_splits[:-1], segment.ids.row_splits[1:]), keep_B, truncation)
        for segment, keep_B in zip(segments, kept_lengths, strict=True)
    ]
    return pack_ranges(segments, ranges, vocabulary)


def token_budget(num_segments: int, max_seq_length: int) -> int:
    """Return the number of tokens of a packed sequence without [CLS] and each [SEP]."""
    return max_seq_length - num_segments - 1


def pack_ranges(
    segments: Sequence[Tokens], ranges: Sequence[Sequence[Ranges]], vocabulary: Vocabulary
) -> Packed:
    """Join ranges of tokens as [CLS] A [SEP] or [CLS] A [SEP] B [SEP].

    Args:
        segments: One or two `Tokens`, of any number of texts.
        ranges: For each segment, the ranges of its tokens, one or more per sequence.
        vocabulary: Provides the ids of [CLS] and [SEP].

    Returns:
        `Packed` of B sequences, with offsets if the segments have them.
    """
    ids = [segment.ids.flat_values for segment in segments]
    indices = range_indices(ids, ranges)

    def joined(columns, first, *separators):
        return gather_ranges([first, *separators], columns, indices)

    numbers = range(len(segments))
    offsets = [
        None
        if column[0] is None
        else joined([ragged.flat_values for ragged in column], -1, *(-1 for _ in numbers))
        for column in zip(*(segment[1:] for segment in segments), strict=True)
    ]
    return Packed(
        joined(ids, vocabulary["[CLS]"], *(vocabulary["[SEP]"] for _ in numbers)),
        joined([tf.ones_like(ids[number]) * number for number in numbers], 0, *numbers),
        *offsets,
    )


def range_indices(
    columns: Sequence[tf.Tensor], ranges: Sequence[Sequence[Ranges]]
) -> tf.RaggedTensor:
    """Return which values `gather_ranges` has to gather.

    Args:
        columns: For each of S segments, a value per token, `(T,)`.
        ranges: For each segment, its ranges, one or more per sequence.

    Returns:
        Ragged int64 `(B, (L))`: 0 for [CLS], then for segment s the indices of its tokens, which
        begin at S + 1 for the first segment, and 1 + s for its [SEP].
    """
    num_special = 1 + len(columns)
    zeros_B = tf.zeros_like(ranges[0][0].begin_B)
    begins, ends = [zeros_B], [zeros_B + 1]
    shift = tf.constant(num_special, tf.int64)
    for number, (column, of_segment) in enumerate(zip(columns, ranges, strict=True), start=1):
        begins += [begin_B + shift for begin_B, _ in of_segment] + [zeros_B + number]
        ends += [end_B + shift for _, end_B in of_segment] + [zeros_B + number + 1]
        shift += tf.size(column, tf.int64)
    indices = tf.ragged.range(*(tf.reshape(tf.stack(of, axis=1), [-1]) for of in (begins, ends)))
    # The ranges of a sequence are joined.
    return tf.RaggedTensor.from_row_splits(
        indices.flat_values, indices.row_splits[:: len(begins)], validate=False
    )


def gather_ranges(
    special: Sequence[int | bool], columns: Sequence[tf.Tensor], indices: tf.RaggedTensor
) -> tf.RaggedTensor:
    """Join values of tokens and special tokens.

    Args:
        special: Value of [CLS] and of the [SEP] after each segment.
        columns: For each segment, a value per token, `(T,)`.
        indices: Result of `range_indices`.

    Returns:
        Ragged `(B, (L))`, of the dtype of the columns.
    """
    values = tf.concat([tf.constant(special, columns[0].dtype), *columns], axis=0)
    return indices.with_flat_values(tf.gather(values, indices.flat_values))


def _kept_lengths(lengths, budget):
    """Return the number of tokens to keep per segment, int64 `(B,)` each.

    It equals that of popping tokens one by one from the longer segment (from B on a tie).
    """
    if len(lengths) == 1:
        return [tf.minimum(lengths[0], budget)]
    length_a, length_b = lengths
    # A keeps what B does not use of the budget, but may always keep half of it. That is rounded up
    # because ties truncate B.
    keep_a = tf.minimum(length_a, tf.maximum(budget - length_b, (budget + 1) // 2))
    return [keep_a, tf.minimum(length_b, budget - keep_a)]


def _kept(complete, keep_B, truncation):
    """Return the ranges of `keep_B` tokens of each text; see `pack`."""
    begin_B, end_B = complete
    head, tail = Ranges(begin_B, begin_B + keep_B), Ranges(end_B - keep_B, end_B)
    if truncation == "head":
        return [head]
    if truncation == "tail":
        return [tail]
    if truncation != "head_tail":
        raise ValueError(f"truncation={truncation!r}: expected one of head, tail, head_tail")
    from_head_B = (keep_B + 3) // 4
    return [Ranges(begin_B, begin_B + from_head_B), Ranges(end_B - keep_B + from_head_B, end_B)]
