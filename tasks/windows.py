"""Windows: a text of any length as overlapping sequences that the model can take.

The windows and the choice of the one with the most context are those of google-research/bert's
run_squad.py (Devlin et al. 2019, 4.2 and 4.3), without a loop.

Legend: B examples, W windows of all of them, (T) tokens of a text or of a window's part of it,
(L) tokens of a packed window, all ragged; C choices of an example.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.packing import Packed, concat_segments, interleave, truncate
from bert_tf.text.tokenizer import Tokens

# Tokens of all windows of a text: windows beyond are left out, as bytes beyond the limit are.
MAX_WINDOW_TOKENS = 2**20


class Windows(NamedTuple):
    """Packed sequences [W, (L)] of N examples, ordered by example, and where they are from.

    example_W int32, the example that a window is of. Where texts of any length go through several:
    begin_W int32, the number in the long text of the window's first token; offset_W int32, where in
    the sequence that token stands; is_max_context ragged bool, true at the tokens of the long text
    of which no other window shows more context, so at each token once. Where windows are choices,
    choice_W int32 is the choice's number. Where tokens have labels, is_first ragged bool is true at
    those that begin a basic token.
    """

    packed: Packed
    example_W: tf.Tensor
    begin_W: tf.Tensor | None = None
    offset_W: tf.Tensor | None = None
    is_max_context: tf.RaggedTensor | None = None
    choice_W: tf.Tensor | None = None
    is_first: tf.RaggedTensor | None = None

    def by_example(self, of_windows, num_examples):
        """What belongs to each window -> ragged [N, (windows of it), ...]."""
        return tf.RaggedTensor.from_value_rowids(
            of_windows,
            tf.cast(self.example_W, tf.int64),
            tf.cast(num_examples, tf.int64),
            validate=False,
        )

    def of_examples(self, first, last):
        """(the Windows of examples first up to last, and which ones they are as a slice)."""
        rows = slice(*np.searchsorted(self.example_W, [first, last]))

        def of_rows(values):
            return None if values is None else values[rows]

        example_W, *others = map(of_rows, self[1:])
        return Windows(Packed(*map(of_rows, self.packed)), example_W - first, *others), rows

    def choice_grid(self, num_examples, num_choices):
        """Which window is which choice of an example, int32 [N, C]; -1 where there is none."""
        count = tf.size(self.choice_W)
        indices = tf.stack([tf.cast(self.example_W, tf.int32), self.choice_W], axis=1)
        return tf.tensor_scatter_nd_update(
            tf.fill([num_examples, num_choices], -1), indices, tf.range(count)
        )


def one_window_each(packed):
    """The Windows of texts that are one sequence each."""
    return Windows(packed, tf.range(tf.cast(packed.input_ids.nrows(), tf.int32)))


def concat(parts, counts):
    """Windows of several slices of a data set, of `counts` examples each, as those of all of it."""
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    parts = [
        part._replace(example_W=part.example_W + first)
        for part, first in zip(parts, firsts, strict=True)
    ]

    def joined(values):
        return None if values[0] is None else tf.concat(values, axis=0)

    packed = Packed(*map(joined, zip(*(part.packed for part in parts), strict=True)))
    return Windows(packed, *map(joined, zip(*(part[1:] for part in parts), strict=True)))


def pack_windows(first, long, vocabulary, max_seq_length, doc_stride, max_first=None):
    """Tokens [B, (T)] of a question, or None, and of a long text -> Windows.

    Each is [CLS] first [SEP] window [SEP], or [CLS] window [SEP]; they begin `doc_stride` tokens
    apart, or a window's length where that is less. An empty text has one window, a very long one as
    many as hold MAX_WINDOW_TOKENS. `first` is cut to
    `max_first` tokens (released: 64), by default to what leaves one place for the text. Offsets are
    packed along where both Tokens have them.

    Text 5 6 7 8 9, max_seq_length 5, stride 2 -> [CLS 5 6 7 SEP], [CLS 7 8 9 SEP].

    Raises UserError where no place is left for the text, or the stride is none.
    """
    if first is None:
        num_special_tokens, max_first = 2, 0
    else:
        num_special_tokens = 3
        max_first = max(max_seq_length - 4, 0) if max_first is None else max_first
    if max_seq_length <= max_first + num_special_tokens:
        question_part = f"{max_first} of a question and " if max_first else ""
        raise UserError(
            f"max_seq_length {max_seq_length}: leaves no place for tokens of the text beside "
            f"{question_part}{num_special_tokens} of [CLS] and [SEP]; wanted "
            f"{max_first + num_special_tokens + 1} or more"
        )
    if doc_stride < 1:
        raise UserError(f"doc_stride {doc_stride}: windows would not move on, wanted 1 or more")

    length_B = long.ids.row_lengths()
    room_B = tf.fill(tf.shape(length_B), tf.constant(max_seq_length - num_special_tokens, tf.int64))
    if first is not None:
        first = truncate(first, tf.fill(tf.shape(length_B), tf.constant(max_first, tf.int64)))
        room_B -= first.ids.row_lengths()
    step_B = tf.minimum(room_B, doc_stride)

    # The first window, and one more for each step that is begun to reach the tail.
    count_B = 1 - tf.minimum(room_B - length_B, 0) // step_B
    numbers = tf.ragged.range(tf.minimum(count_B, max(MAX_WINDOW_TOKENS // max_seq_length, 1)))
    example_W = numbers.value_rowids()
    begin_W = numbers.flat_values * tf.gather(step_B, example_W)
    length_W = tf.minimum(tf.gather(length_B, example_W) - begin_W, tf.gather(room_B, example_W))
    begin_in_all_W = tf.gather(long.ids.row_starts(), example_W) + begin_W
    indices = tf.ragged.range(begin_in_all_W, begin_in_all_W + length_W)

    segments = [] if first is None else [_each(first, lambda ragged: tf.gather(ragged, example_W))]
    segments.append(_each(long, lambda ragged: tf.gather(ragged.flat_values, indices)))
    is_max_context = [tf.zeros_like(segment.ids, tf.bool) for segment in segments[:-1]]
    is_max_context.append(_has_most_context(indices, tf.size(long.ids.flat_values, tf.int64)))
    offset_W = 1 if first is None else 2 + segments[0].ids.row_lengths()
    return Windows(
        concat_segments(segments, vocabulary),
        tf.cast(example_W, tf.int32),
        tf.cast(begin_W, tf.int32),
        tf.cast(tf.broadcast_to(offset_W, tf.shape(example_W)), tf.int32),
        interleave(is_max_context, False, False),
    )


def _each(tokens, function):
    return Tokens(*(None if ragged is None else function(ragged) for ragged in tokens))


def _has_most_context(indices, num_tokens):
    """Ragged [W, (T)] numbers of tokens -> bool: is a token's context in no window more?

    The context is what stands on its shorter side, and a little for the window's length; the first
    window of equals has it.
    """
    token, window = indices.flat_values, indices.value_rowids()
    all_of_windows = tf.range(tf.size(token, tf.int64))
    length = tf.gather(indices.row_lengths(), window)
    left = all_of_windows - tf.gather(indices.row_starts(), window)
    shorter = tf.minimum(left, length - 1 - left)
    # In double precision, so that what is equal there is equal here.
    context = tf.cast(shorter, tf.float64) + 0.01 * tf.cast(length, tf.float64)
    largest = tf.math.unsorted_segment_max(context, token, num_tokens)
    candidates = tf.where(context == tf.gather(largest, token), all_of_windows, tf.int64.max)
    chosen = tf.math.unsorted_segment_min(candidates, token, num_tokens)
    return indices.with_flat_values(tf.gather(chosen, token) == all_of_windows)
