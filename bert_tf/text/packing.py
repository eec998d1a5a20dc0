"""Packing: one or two segments of tokens -> [CLS] A [SEP] B [SEP], cut to fit.

Then to tensors in one of two layouts, flat or padded: what the encoder takes.

Legend: B rows, (L) tokens of a packed row, ragged, L the longest of them, T tokens of all rows.
"""

from typing import NamedTuple

import tensorflow as tf

from bert_tf.bucketing import round_up_to_bucket
from bert_tf.text.tokenizer import Tokens


class Packed(NamedTuple):
    """Ragged int32 [B, (L)] each; starts and ends count characters of the token's own segment."""

    input_ids: tf.RaggedTensor
    segment_ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None


def pack(segments, vocabulary, max_seq_length, truncation="head"):
    """Joins one or two Tokens a row, cutting the longer first (released _truncate_seq_pair).

    Of what a segment may keep `truncation` keeps the first tokens, "head", as released; the last,
    "tail"; or "head_tail", a quarter (rounded up) from the beginning and the rest from the end, as
    the 128 and 382 of Sun et al. 2019 (5.3.1).

    [[5, 6]], [[7]] with max_seq_length 8 -> input_ids   [CLS 5 6 SEP 7 SEP]
                                              segment_ids [ 0  0 0  0  1  1 ]
    """
    kept_lengths = _kept_lengths(segments, token_budget(len(segments), max_seq_length))
    segments = [
        truncate(segment, keep, truncation)
        for segment, keep in zip(segments, kept_lengths, strict=True)
    ]
    return concat_segments(segments, vocabulary)


def token_budget(num_segments, max_seq_length):
    """How many tokens of all segments a packed row holds beside [CLS] and each [SEP]."""
    return max_seq_length - num_segments - 1


def concat_segments(segments, vocabulary):
    """One or two Tokens a row -> Packed, nothing cut; offsets where the Tokens have them."""
    cls_id, sep_id = vocabulary["[CLS]"], vocabulary["[SEP]"]
    segment_ids = [_column(segments[0].ids, 0)]
    for number, segment in enumerate(segments):
        segment_ids += [tf.ones_like(segment.ids) * number, _column(segment.ids, number)]
    return Packed(
        interleave([segment.ids for segment in segments], cls_id, sep_id),
        tf.concat(segment_ids, axis=1),
        *(
            None
            if segments[0].starts is None
            else interleave([getattr(segment, name) for segment in segments], -1, -1)
            for name in ("starts", "ends")
        ),
    )


def interleave(pieces, first, between):
    """Ragged [B, (L)]: `first`, then each of the ragged pieces [B, (T)] and `between` behind it."""
    row = [_column(pieces[0], first)]
    for piece in pieces:
        row += [piece, _column(piece, between)]
    return tf.concat(row, axis=1)


def to_padded(packed, vocabulary, length=None):
    """-> {input_ids, input_mask, segment_ids} int32 [B, L], L the longest row or `length`."""
    shape = [None, length]
    return {
        "input_ids": packed.input_ids.to_tensor(vocabulary["[PAD]"], shape=shape),
        "input_mask": tf.ones_like(packed.input_ids).to_tensor(0, shape=shape),
        "segment_ids": packed.segment_ids.to_tensor(0, shape=shape),
    }


def to_flat(packed, vocabulary):
    """-> {input_ids, segment_ids} int32 [T], row_splits int32 [B + 1].

    T is rounded up to one of few sizes; the tokens behind row_splits[-1] are [PAD]s of no row.
    """
    count = tf.size(packed.input_ids.flat_values)
    tail = [[0, round_up_to_bucket(count) - count]]
    return {
        "input_ids": tf.pad(
            packed.input_ids.flat_values, tail, constant_values=vocabulary["[PAD]"]
        ),
        "segment_ids": tf.pad(packed.segment_ids.flat_values, tail),
        "row_splits": tf.cast(packed.input_ids.row_splits, tf.int32),
    }


def to_dense_like(values, inputs):
    """What belongs to each token, ragged [B, (L)] -> dense [B, L] beside `inputs`, filled with 0.

    L is theirs if they are padded, the longest row if flat. What is no ragged tensor stays.
    """
    if not isinstance(values, tf.RaggedTensor):
        return values
    # Where it is not fixed, the longest row of either is the same.
    length = None if "row_splits" in inputs else inputs["input_ids"].shape[1]
    return values.to_tensor(0, shape=[None, length])


def _kept_lengths(segments, budget):
    """How many tokens a segment keeps, int64 [B] each, at most those it has of a pair.

    As many as popping tokens one by one off the longer segment (B on a tie) would leave.
    """
    if len(segments) == 1:
        return [tf.fill([segments[0].ids.nrows()], tf.cast(budget, tf.int64))]
    length_a, length_b = (segment.ids.row_lengths() for segment in segments)
    # A keeps what B leaves over, but at least half of the budget (rounded up, since ties cut B), if
    # it has so much.
    keep_a = tf.minimum(length_a, tf.maximum(budget - length_b, (budget + 1) // 2))
    return [keep_a, tf.minimum(length_b, budget - keep_a)]


def truncate(segment, keep_B, truncation="head"):
    """Tokens of at most `keep_B` int64 [B] a row, by the mode of truncation."""
    head_lengths = {"head": keep_B, "tail": tf.zeros_like(keep_B), "head_tail": (keep_B + 3) // 4}
    if truncation not in head_lengths:
        raise ValueError(f"truncation={truncation!r}: wanted one of {', '.join(head_lengths)}")
    first_B = head_lengths[truncation]

    def kept(ragged):
        row_T = ragged.value_rowids()
        number_T = tf.range(tf.size(ragged.flat_values, out_type=tf.int64))
        position_T = number_T - tf.gather(ragged.row_starts(), row_T)
        last_from_B = ragged.row_lengths() - (keep_B - first_B)
        is_kept_T = position_T < tf.gather(first_B, row_T)
        is_kept_T |= position_T >= tf.gather(last_from_B, row_T)
        return tf.ragged.boolean_mask(ragged, ragged.with_flat_values(is_kept_T))

    return Tokens(*(None if ragged is None else kept(ragged) for ragged in segment))


def _column(ragged, value):
    return tf.fill([ragged.nrows(), 1], value)
