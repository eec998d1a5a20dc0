"""Split texts of any length into overlapping windows that fit the model.

The windows, and the choice of the one with the most context, are those of google-research/bert's
run_squad.py (Devlin et al. 2019, 4.2 and 4.3), computed without a loop.

Shape suffixes: B examples, W windows of all of them, (T) tokens of a text or of a window's part of
it, (L) tokens of a packed window, all ragged; C choices of an example.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import (
    Packed,
    Ranges,
    gather_ranges,
    pack,
    pack_ranges,
    range_indices,
    token_budget,
)
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.tokenizer import Tokens, map_tokens, tokenize_ends
from bert_tf.text.vocabulary import Vocabulary
from tasks.data.readers.rows import MAX_CHOICES

# Maximum tokens in all windows of a text. Later windows are dropped, so that the memory for one
# string is bounded, as bytes beyond the byte limit are.
MAX_WINDOW_TOKENS = 2**20
TOO_MANY = f"choices: too many. Expected: at most {MAX_CHOICES} per question"


class Windows(NamedTuple):
    """Packed windows of N examples, ordered by example, and where they come from.

    Attributes:
        packed: The token sequences, ragged `(W, (L))`.
        example_W: Index of the source example, int32 `(W,)`.
        begin_W: Index in the long text of the window's first token, int32 `(W,)`. This and the
            next two are `None` unless texts are split.
        offset_W: Position of that token in the packed sequence, int32 `(W,)`.
        is_max_context: Ragged bool `(W, (L))`, true once per token of the long text, in the window
            with the most context around it.
        choice_W: Index of the choice, int32 `(W,)`, if windows are choices.
        is_first: Ragged bool `(W, (L))`, true at tokens that begin a basic token, if tokens have
            labels.
    """

    packed: Packed
    example_W: tf.Tensor
    begin_W: tf.Tensor | None = None
    offset_W: tf.Tensor | None = None
    is_max_context: tf.RaggedTensor | None = None
    choice_W: tf.Tensor | None = None
    is_first: tf.RaggedTensor | None = None

    def by_example(self, of_windows: tf.Tensor, num_examples: int | tf.Tensor) -> tf.RaggedTensor:
        """Group values `(W, ...)` by example: ragged `(N, (windows), ...)`."""
        return tf.RaggedTensor.from_value_rowids(
            of_windows,
            tf.cast(self.example_W, tf.int64),
            tf.cast(num_examples, tf.int64),
            validate=False,
        )

    def of_examples(self, first: int, last: int) -> tuple[Windows, slice]:
        """Return the windows of examples `first` up to `last`, and their slice of all windows."""
        rows = slice(*np.searchsorted(self.example_W, [first, last]))

        def of_rows(values):
            return None if values is None else values[rows]

        example_W, *others = map(of_rows, self[1:])
        return Windows(Packed(*map(of_rows, self.packed)), example_W - first, *others), rows

    def choice_grid(self, num_examples: int | tf.Tensor, num_choices: int | tf.Tensor) -> tf.Tensor:
        """Return the window index per choice of an example, int32 `(N, C)`; -1 if there is none."""
        # Cells that no window scatters to keep the -1.
        count = tf.size(self.choice_W)
        indices = tf.stack([tf.cast(self.example_W, tf.int32), self.choice_W], axis=1)
        return tf.tensor_scatter_nd_update(
            tf.fill([num_examples, num_choices], -1), indices, tf.range(count)
        )


class TokenCounter:
    """Sum of the `TokenCounts` of windows, also of those that a graph makes.

    Args:
        vocabulary: Vocabulary of the ids.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._unknown, *self._special = (vocabulary[name] for name in ("[UNK]", "[CLS]", "[SEP]"))
        self._counts, self._lock = TokenCounts(), threading.Lock()

    def add(self, windows: Windows) -> None:
        """Count the tokens of windows; in a graph, whenever it runs."""
        ids, zeros_W = windows.packed.input_ids, tf.zeros_like(windows.example_W)
        lost_W, begin_W = (
            zeros_W if values is None else values
            for values in (windows.packed.lost, windows.begin_W)
        )
        tf.numpy_function(self._add, [ids.flat_values, ids.row_splits, lost_W, begin_W], [])

    def take(self) -> TokenCounts:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, TokenCounts()
        return counts

    def _add(self, ids_T, splits_W, lost_W, begin_W):
        is_text_T = (ids_T != self._special[0]) & (ids_T != self._special[1])
        num_text_W = np.diff(np.concatenate([[0], np.cumsum(is_text_T)])[splits_W])
        is_first_W = begin_W == 0  # A long text has several windows.
        counts = TokenCounts(
            texts=int(np.sum(is_first_W)),
            empty=int(np.sum(is_first_W & (num_text_W == 0))),
            truncated=int(np.sum(lost_W > 0)),
            tokens=int(np.sum(is_text_T)),
            unknown=int(np.sum(ids_T == self._unknown)),
            lost=int(np.sum(lost_W)),
        )
        with self._lock:
            self._counts += counts


def pack_texts(
    texts: Sequence[tf.Tensor],
    tokenize: Callable[[tf.Tensor], Tokens],
    vocabulary: Vocabulary,
    max_seq_length: int,
    truncation: str = "head",
) -> Packed:
    """Tokenize and truncate texts, or pairs of them, to one sequence each.

    Args:
        texts: String `(B,)` per segment.
        tokenize: Method of `Tokenizer`.
        vocabulary: Vocabulary of the ids.
        max_seq_length: Maximum tokens per sequence.
        truncation: "head", "tail" or "head_tail" (`bert_tf.text.encoder_inputs.pack`).
    """
    budget = token_budget(len(texts), max_seq_length)
    # Only the ends that truncation may keep are tokenized; `pack` truncates pairs together.
    segments = [tokenize_ends(tokenize, text, budget, truncation) for text in texts]
    return pack(segments, vocabulary, max_seq_length, truncation)


def one_window_each(packed: Packed) -> Windows:
    """Return the windows of texts that are one sequence each."""
    return Windows(packed, tf.range(tf.cast(packed.input_ids.nrows(), tf.int32)))


def pair_windows(
    first_B: tf.Tensor,
    choices_BC: tf.Tensor,
    tokenize: Callable[[tf.Tensor], Tokens],
    vocabulary: Vocabulary,
    max_seq_length: int,
) -> Windows:
    """Tokenize and pack each of several texts with the first one, one window per pair.

    Args:
        first_B: String `(B,)`, such as a prompt or a query.
        choices_BC: String `(B, C)`, padded with "", which is no text.
        tokenize: Method of `Tokenizer`.
        vocabulary: Vocabulary of the ids.
        max_seq_length: Maximum tokens per window.
    """
    tf.debugging.assert_equal(
        tf.size(first_B), tf.shape(choices_BC)[0], "choices: expected one row per prompt"
    )
    tf.debugging.assert_less_equal(tf.shape(choices_BC)[1], MAX_CHOICES, TOO_MANY)
    indices_W2 = tf.where(choices_BC != "")
    example_W, choice_W = tf.unstack(indices_W2, axis=1)
    budget = token_budget(2, max_seq_length)
    firsts = tokenize_ends(tokenize, first_B, budget)
    firsts = map_tokens(lambda ragged: tf.gather(ragged, example_W), firsts)
    choices = tokenize_ends(tokenize, tf.gather_nd(choices_BC, indices_W2), budget)
    return Windows(
        pack([firsts, choices], vocabulary, max_seq_length),
        tf.cast(example_W, tf.int32),
        choice_W=tf.cast(choice_W, tf.int32),
    )


def concat(parts: Sequence[Windows], counts: Sequence[int]) -> Windows:
    """Concatenate the windows of consecutive slices of a dataset with `counts` examples each."""
    # Each part counts its examples from 0.
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    parts = [
        part._replace(example_W=part.example_W + first)
        for part, first in zip(parts, firsts, strict=True)
    ]

    def joined(values):
        return None if values[0] is None else tf.concat(values, axis=0)

    packed = Packed(*map(joined, zip(*(part.packed for part in parts), strict=True)))
    return Windows(packed, *map(joined, zip(*(part[1:] for part in parts), strict=True)))


def pack_windows(
    first: Tokens | None,
    long: Tokens,
    vocabulary: Vocabulary,
    max_seq_length: int,
    doc_stride: int,
    max_first: int | None = None,
) -> Windows:
    """Split a long text into overlapping windows and pack them.

    A window is [CLS] first [SEP] window [SEP] or, without `first`, [CLS] window [SEP]. For example,
    the text 5 6 7 8 9 with max_seq_length 5 and doc_stride 2 becomes two windows,
    [CLS] 5 6 7 [SEP] and [CLS] 7 8 9 [SEP].

    Args:
        first: Tokens of the question, ragged `(B, (T))`, or `None`.
        long: Tokens of the text, ragged `(B, (T))`. An empty text has one window, a very long one
            as many as hold MAX_WINDOW_TOKENS.
        vocabulary: Source of the ids of [CLS] and [SEP].
        max_seq_length: Maximum tokens per window, special tokens included.
        doc_stride: Tokens between the starts of two windows; a window's text length if that is
            less.
        max_first: Maximum tokens of `first` (google-research/bert: 64). By default all but one
            token for the text.

    Returns:
        The windows, with offsets if both `Tokens` have them.

    Raises:
        UserError: If no token of the text fits, or `doc_stride` is not positive.
    """
    if first is None:
        num_special_tokens, max_first = 2, 0
    else:
        num_special_tokens = 3
        max_first = max(max_seq_length - 4, 0) if max_first is None else max_first
    if max_seq_length <= max_first + num_special_tokens:
        question_part = f"{max_first} question tokens, " if max_first else ""
        raise UserError(
            f"max_seq_length {max_seq_length}: expected at least "
            f"{max_first + num_special_tokens + 1}, for "
            f"{question_part}{num_special_tokens} special tokens and 1 token of the text"
        )
    if doc_stride < 1:
        raise UserError(f"doc_stride {doc_stride}: expected an integer >= 1")

    # The token budget of a window's text is what special tokens and the question leave.
    length_B = long.ids.row_lengths()
    budget_B = tf.fill(
        tf.shape(length_B), tf.constant(max_seq_length - num_special_tokens, tf.int64)
    )
    if first is not None:
        first_length_B = tf.minimum(first.ids.row_lengths(), max_first)
        budget_B -= first_length_B
    # A stride longer than a window would skip tokens.
    step_B = tf.minimum(budget_B, doc_stride)

    # One window, plus one per stride that is needed, even in part, to reach the end of the text.
    count_B = 1 - tf.minimum(budget_B - length_B, 0) // step_B
    numbers = tf.ragged.range(tf.minimum(count_B, max(MAX_WINDOW_TOKENS // max_seq_length, 1)))
    example_W = numbers.value_rowids()
    begin_W = numbers.flat_values * tf.gather(step_B, example_W)
    length_W = tf.minimum(tf.gather(length_B, example_W) - begin_W, tf.gather(budget_B, example_W))
    begin_in_all_W = tf.gather(long.ids.row_starts(), example_W) + begin_W
    indices = tf.ragged.range(begin_in_all_W, begin_in_all_W + length_W)

    # Tokens beyond the last window, and those of the question that no window has.
    end_B = (numbers.row_lengths() - 1) * step_B + budget_B
    lost_B = long.lengths - tf.minimum(length_B, end_B)
    if first is not None:
        lost_B += first.lengths - first_length_B

    segments, ranges = [long], [[Ranges(begin_in_all_W, begin_in_all_W + length_W)]]
    of_windows = [[Ranges(indices.row_splits[:-1], indices.row_splits[1:])]]
    # Only tokens of the long text are candidates, neither the question nor special tokens.
    is_max_context = [_has_most_context(indices, tf.size(long.ids.flat_values, tf.int64))]
    # The text follows [CLS], or [CLS] question [SEP].
    offset_W = tf.ones_like(example_W)
    if first is not None:
        first_begin_W = tf.gather(first.ids.row_starts(), example_W)
        first_length_W = tf.gather(first_length_B, example_W)
        segments.insert(0, first)
        ranges.insert(0, [Ranges(first_begin_W, first_begin_W + first_length_W)])
        of_windows.insert(0, ranges[0])
        is_max_context.insert(0, tf.zeros_like(first.ids.flat_values, tf.bool))
        offset_W += first_length_W + 1
    lost_W = tf.where(begin_W == 0, tf.gather(lost_B, example_W), 0)
    return Windows(
        pack_ranges(segments, ranges, vocabulary)._replace(lost=lost_W),
        tf.cast(example_W, tf.int32),
        tf.cast(begin_W, tf.int32),
        tf.cast(offset_W, tf.int32),
        gather_ranges(
            [False] * (1 + len(segments)),
            is_max_context,
            range_indices(is_max_context, of_windows),
        ),
    )


def _has_most_context(indices, num_tokens):
    """Return whether a token has more context in its window than in any other, bool `(T,)`.

    The context is the shorter side's length plus 0.01 times the window's length, as in
    run_squad.py; of equal windows the first counts. `indices` are ragged token indices `(W, (T))`.
    """
    # All arrays are flat over the tokens of all windows; `token` names a token of the text.
    token, window = indices.flat_values, indices.value_rowids()
    all_of_windows = tf.range(tf.size(token, tf.int64))
    length = tf.gather(indices.row_lengths(), window)
    left = all_of_windows - tf.gather(indices.row_starts(), window)
    shorter = tf.minimum(left, length - 1 - left)
    # float64 as in run_squad.py's Python floats, so that ties are the same.
    context = tf.cast(shorter, tf.float64) + 0.01 * tf.cast(length, tf.float64)
    largest = tf.math.unsorted_segment_max(context, token, num_tokens)
    # Of the windows with the largest context the first one counts: the smallest flat index.
    candidates = tf.where(context == tf.gather(largest, token), all_of_windows, tf.int64.max)
    chosen = tf.math.unsorted_segment_min(candidates, token, num_tokens)
    return tf.gather(chosen, token) == all_of_windows
