"""Encoder inputs of tokens: sequences [CLS] A [SEP] B [SEP], padded, in packed rows, or flat.

A packed sequence is a list of ranges of tokens. All ranges of a batch are gathered at once: each
operation counts where a single text is served, and for the time that TensorFlow needs to optimize a
graph.

Padded inputs have one sequence per row, packed ones one or several; both have static shapes, as XLA
requires. Flat inputs are sequences stored back to back. bert_tf.model.layout reads them.

Shape suffixes: B sequences, R rows, L tokens of a row, S tokens of the longest sequence, (T) tokens
of a segment and (L) of a packed sequence (both ragged), T flattened tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import tensorflow as tf

from bert_tf.model.bucketing import round_up_to_bucket
from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary

ROW_LENGTHS = (64, 128, 256, 384, 512)  # Multiples of 128 above.
_FULL = 0.9  # The part of the rows from which fewer rows are not worth a program of their own.
SAMPLED_BATCHES = 64  # From which the numbers of rows are chosen.


class Packed(NamedTuple):
    """Packed sequences, ragged int32 `(B, (L))` each but `lost`.

    Attributes:
        input_ids: Token ids with [CLS] and [SEP].
        segment_ids: 0 for [CLS] A [SEP], 1 for B [SEP].
        starts: First character of each token in its own segment, -1 for special tokens; or `None`.
        ends: Character after each token, -1 for special tokens; or `None`.
        lost: Number of tokens that were cut off, int64 `(B,)`, see `Tokens.lengths`; or `None`.
    """

    input_ids: tf.RaggedTensor
    segment_ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None
    lost: tf.Tensor | None = None


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
    lost_B = sum(segment.lengths for segment in segments) - sum(kept_lengths)
    return pack_ranges(segments, ranges, vocabulary)._replace(lost=lost_B)


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
        for column in zip(*((of.starts, of.ends) for of in segments), strict=True)
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


def to_padded(
    packed: Packed, vocabulary: Vocabulary | None, length: int | None = None
) -> dict[str, tf.Tensor]:
    """Convert packed sequences to the padded layout.

    Args:
        packed: Packed sequences.
        vocabulary: Provides the id of [PAD]; `None` for 0.
        length: L. Defaults to the length of the longest sequence.

    Returns:
        Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids".
    """
    shape = [None, length]
    return {
        "input_ids": packed.input_ids.to_tensor(_pad_id(vocabulary), shape=shape),
        "input_mask": tf.ones_like(packed.input_ids).to_tensor(0, shape=shape),
        "segment_ids": packed.segment_ids.to_tensor(0, shape=shape),
    }


def _pad_id(vocabulary):
    return 0 if vocabulary is None else vocabulary["[PAD]"]


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """Static shapes of packed batches, of which XLA compiles one program each.

    Attributes:
        max_seq_length: S, maximum tokens per sequence.
        row_counts: Numbers of rows, ascending. A batch has the smallest that holds its sequences;
            the last one always does.
    """

    max_seq_length: int
    row_counts: tuple[int, ...]

    @property
    def length(self) -> int:
        """L, tokens per row: one of `ROW_LENGTHS`, or a multiple of 128 above them."""
        fitting = [length for length in ROW_LENGTHS if length >= self.max_seq_length]
        return fitting[0] if fitting else -(-self.max_seq_length // 128) * 128

    def rows_for(self, needed: int) -> int:
        """Return the smallest of the numbers of rows that is enough."""
        return next(count for count in self.row_counts if count >= needed)

    @classmethod
    def of_lengths(
        cls,
        lengths: np.ndarray,
        batch_size: int,
        max_seq_length: int,
        splits: np.ndarray | None = None,
    ) -> Self:
        """Choose the shapes of batches drawn from sequences of these lengths.

        Args:
            lengths: int `(N,)`, tokens of all sequences, or of a sample of them.
            batch_size: Examples per batch.
            max_seq_length: Maximum tokens per sequence.
            splits: int, row splits of the sequences by example. Defaults to one sequence each.

        Returns:
            Shapes with at most four numbers of rows: one that is enough for most batches, one for
            all that were tried, B, the most sequences of a batch, and one in between if B is much
            larger. If the first would save little, B alone: each of them is compiled, and attention
            by cuDNN needs one that is known beforehand.
        """
        splits = np.arange(len(lengths) + 1) if splits is None else splits
        num_sequences = batch_size * int(np.max(np.diff(splits)))
        rng, length = np.random.default_rng(0), cls(max_seq_length, ()).length
        tried = []
        for _ in range(SAMPLED_BATCHES):
            drawn = rng.choice(len(splits) - 1, batch_size)
            lengths_B = [lengths[splits[example] : splits[example + 1]] for example in drawn]
            row_B, _ = assign_rows(np.concatenate(lengths_B), length)
            tried.append(int(row_B.max(initial=0)) + 1)
        most = int(np.quantile(tried, 0.75, method="higher"))
        if most > _FULL * num_sequences:
            return cls(max_seq_length, (num_sequences,))
        counts = {most, max(tried), num_sequences}
        if num_sequences > 4 * max(tried):
            counts.add(round((max(tried) * num_sequences) ** 0.5))
        return cls(max_seq_length, tuple(sorted(counts)))

    @classmethod
    def of_unknown_lengths(cls, batch_size: int, max_seq_length: int) -> Self:
        """Return the shapes of batches of sequences that are not known beforehand.

        Arguments as of `of_lengths`, with one sequence per example. The numbers of rows are the
        quarters of `batch_size`.
        """
        quarters = {-(-batch_size * quarter // 4) for quarter in (1, 2, 3, 4)}
        return cls(max_seq_length, tuple(sorted(quarters)))


def assign_rows(lengths_B: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Put sequences into as few rows as first-fit decreasing finds.

    Args:
        lengths_B: int `(B,)`, tokens per sequence; at most `length`.
        length: Tokens per row.

    Returns:
        The row of each sequence and the index of its first token in the row, int32 `(B,)` each; 0
        for a sequence without tokens.
    """
    row_B, offset_B = np.zeros(len(lengths_B), np.int32), np.zeros(len(lengths_B), np.int32)
    free = np.full(max(len(lengths_B), 1), length)  # Tokens left per row.
    for number in np.argsort(-lengths_B, kind="stable")[: np.count_nonzero(lengths_B)]:
        row = int(np.argmax(free >= lengths_B[number]))
        row_B[number], offset_B[number] = row, length - free[row]
        free[row] -= lengths_B[number]
    return row_B, offset_B


def to_packed(
    packed: Packed,
    vocabulary: Vocabulary | None,
    shape: PackedShape,
    num_sequences: int | None = None,
    places: tuple[tf.Tensor, tf.Tensor] | None = None,
) -> dict[str, tf.Tensor]:
    """Convert packed sequences to the packed layout, several of them per row.

    Args:
        packed: Packed sequences.
        vocabulary: Provides the id of [PAD]; `None` for 0.
        shape: Tokens per row and numbers of rows.
        num_sequences: B; sequences without tokens are appended. Defaults to those of `packed`.
        places: Result of `place_sequences`. Defaults to that of this batch.

    Returns:
        Dict of int32 `(R, L)`: "input_ids", "segment_ids", "position_ids" and "sequence_ids", the
        number of each token's sequence from 1, 0 for padding; and "token_indices" `(B, S)`, the
        index of each token of a sequence among the R * L tokens, -1 for padding.
    """
    lengths_B = tf.cast(packed.input_ids.row_lengths(), tf.int32)
    if num_sequences is not None:
        lengths_B = tf.pad(lengths_B, [[0, num_sequences - tf.size(lengths_B)]])
        lengths_B.set_shape([num_sequences])
    num_rows, starts_B = place_sequences(lengths_B, shape) if places is None else places
    static_rows = shape.row_counts[0] if len(shape.row_counts) == 1 else None
    position_of = tf.ragged.range(lengths_B)
    position_T, sequence_T = position_of.flat_values, tf.cast(position_of.value_rowids(), tf.int32)
    index_T = tf.gather(starts_B, sequence_T) + position_T

    def in_rows(values_T, padding=0):
        rows = tf.fill([num_rows * shape.length], padding)
        rows = tf.tensor_scatter_nd_update(rows, index_T[:, tf.newaxis], values_T)
        rows = tf.reshape(rows, [num_rows, shape.length])
        return tf.ensure_shape(rows, [static_rows, shape.length])

    position_S = tf.range(shape.max_seq_length)
    is_token_BS = position_S < lengths_B[:, tf.newaxis]
    return {
        "input_ids": in_rows(packed.input_ids.flat_values, _pad_id(vocabulary)),
        "segment_ids": in_rows(packed.segment_ids.flat_values),
        "position_ids": in_rows(position_T),
        "sequence_ids": in_rows(sequence_T + 1),
        "token_indices": tf.where(is_token_BS, starts_B[:, tf.newaxis] + position_S, -1),
    }


def place_sequences(lengths: tf.Tensor, shape: PackedShape) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the number of rows of a batch, and where its sequences begin.

    Args:
        lengths: int32 `(B,)`, tokens per sequence; or `(parts, B)` of several batches, which get
            the same number of rows.
        shape: Tokens per row and numbers of rows.

    Returns:
        int32 scalar, and the index of each sequence's first token among all tokens of its batch,
        int32, shaped like `lengths`.

    Raises:
        ValueError: A sequence is longer than a row; an InvalidArgumentError when a graph runs.
    """

    def place(lengths):
        if lengths.max(initial=0) > shape.length:
            raise ValueError(
                f"a sequence has {lengths.max()} tokens; expected at most {shape.length}, a row; "
                "truncate it with pack(..., max_seq_length)"
            )
        rows = [assign_rows(of, shape.length) for of in lengths.reshape(-1, lengths.shape[-1])]
        needed = max(int(row_B.max(initial=0)) + 1 for row_B, _ in rows)
        starts = [row_B * np.int32(shape.length) + offset_B for row_B, offset_B in rows]
        return np.int32(shape.rows_for(needed)), np.reshape(starts, lengths.shape)

    num_rows, starts = tf.numpy_function(place, [lengths], [tf.int32, tf.int32], stateful=False)
    num_rows.set_shape([])
    return num_rows, tf.ensure_shape(starts, lengths.shape)


def to_flat(
    packed: Packed, vocabulary: Vocabulary | None, exact_tokens: int = 0
) -> dict[str, tf.Tensor]:
    """Convert packed sequences to the flat layout.

    T is rounded up to a bucket size; tokens after row_splits[-1] are [PAD] and are ignored.

    Args:
        packed: Packed sequences.
        vocabulary: Provides the id of [PAD]; `None` for 0.
        exact_tokens: Up to this many tokens, T is not rounded up.

    Returns:
        Dict of int32: "input_ids" and "segment_ids" `(T,)`, "row_splits" `(B + 1,)`.
    """
    input_ids = packed.input_ids.flat_values
    count = tf.size(input_ids)
    rounded = tf.where(count <= exact_tokens, count, round_up_to_bucket(count))
    tail = [[0, rounded - count]]
    return {
        "input_ids": tf.pad(input_ids, tail, constant_values=_pad_id(vocabulary)),
        "segment_ids": tf.pad(packed.segment_ids.flat_values, tail),
        "row_splits": tf.cast(packed.input_ids.row_splits, tf.int32),
    }


def one_sequence(packed: Packed) -> dict[str, tf.Tensor]:
    """Convert a single packed sequence to the flat layout of `to_flat`, without padding.

    The static shape of row_splits is `(2,)`, so that a graph can be made for one sequence.
    """
    input_ids = packed.input_ids.flat_values
    return {
        "input_ids": input_ids,
        "segment_ids": packed.segment_ids.flat_values,
        "row_splits": tf.stack([0, tf.size(input_ids)]),
    }


def from_padded(inputs: Mapping[str, tf.Tensor]) -> Packed:
    """Return the sequences of a padded batch."""
    is_token_BL = inputs["input_mask"] > 0
    lengths_B = tf.reduce_sum(inputs["input_mask"], axis=1)
    tokens = (tf.boolean_mask(inputs[name], is_token_BL) for name in ("input_ids", "segment_ids"))
    return Packed(
        *(tf.RaggedTensor.from_row_lengths(of, lengths_B, validate=False) for of in tokens)
    )


def flat_to_padded(inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Convert the layout of `to_flat` to that of `to_padded`, with 0 instead of [PAD]."""
    splits = inputs["row_splits"]
    tokens = (inputs[name][: splits[-1]] for name in ("input_ids", "segment_ids"))
    packed = Packed(*(tf.RaggedTensor.from_row_splits(of, splits, validate=False) for of in tokens))
    return to_padded(packed, None)
