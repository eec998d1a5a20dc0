"""Split text into normalized words inside the graph, as every tokenizer of this package does.

The result equals that of google-research/bert exactly: each code point has its entry in a table
(unicode_tables.py), and three kinds of code points are resolved in context. Only TensorFlow
operations are used.

Shape suffixes: B texts, N code points of all texts, concatenated, M characters after normalization,
K characters that are kept, W words.
"""

from typing import NamedTuple

import tensorflow as tf

from bert_tf.config import strips_accents
from bert_tf.text import unicode_tables as tables

MAX_INPUT_CHARS_PER_WORD = 200  # As released; a longer word becomes [UNK].
NEVER = "\ufffd"  # Cleaning drops this character, so no word of a text contains it.


class Words(NamedTuple):
    """Words of all texts and the code points they come from.

    Attributes:
        words: String `(W,)`; `NEVER` for a word of more than `max_input_chars_per_word`.
        row_splits: int64 `(B + 1,)`, the words of each text.
        word_splits: int64 `(W + 1,)`, the characters of each word.
        first: int64 `(K,)`, the first code point of each character.
        last: int64 `(K,)`, the last code point of each character.
        entries: int32 `(N,)`, the table entry of each code point.
        code_splits: int64 `(B + 1,)`, the code points of each text.
    """

    words: tf.Tensor
    row_splits: tf.Tensor
    word_splits: tf.Tensor
    first: tf.Tensor
    last: tf.Tensor
    entries: tf.Tensor
    code_splits: tf.Tensor


class _Characters(NamedTuple):
    """Characters after normalization, including those that are dropped later.

    Attributes:
        characters: int32 `(M,)`, code points.
        kinds: int32 `(M,)`, kinds of unicode_tables.py.
        first: int64 `(M,)`, the first source code point of each character.
        last: int64 `(M,)`, the last source code point of each character.
        row_splits: int64 `(B + 1,)`, the characters of each text.
    """

    characters: tf.Tensor
    kinds: tf.Tensor
    first: tf.Tensor
    last: tf.Tensor
    row_splits: tf.Tensor


class Normalizer(tf.Module):
    """BasicTokenizer of google-research/bert: clean, lower-case, split at spaces and punctuation.

    Args:
        do_lower_case: Lower-cases the text.
        strip_accents: Strips accents, as in Hugging Face. Defaults to `do_lower_case`, as released.
        max_input_chars_per_word: Maximum number of characters of a word after normalization.
    """

    def __init__(
        self,
        do_lower_case: bool,
        strip_accents: bool | None = None,
        max_input_chars_per_word: int = MAX_INPUT_CHARS_PER_WORD,
    ) -> None:
        super().__init__(name="normalizer")
        self._max_input_chars_per_word = max_input_chars_per_word
        strips = strips_accents(do_lower_case, strip_accents)
        with tf.init_scope():
            loaded = vars(tables.load(do_lower_case, strips))
            self._tables = {name: tf.constant(values) for name, values in loaded.items()}
        self._has_sigma, self._has_marks = do_lower_case, strips

    def words(self, texts: tf.Tensor) -> Words:
        """Split texts, string `(B,)`, into `Words`."""
        decoded = tf.strings.unicode_decode(texts, "UTF-8", errors="replace")
        codes_N, code_splits = decoded.flat_values, decoded.row_splits
        entries_N = self._look_up(codes_N, self._tables["index"], self._tables["pages"])
        normalized = self._normalize(codes_N, entries_N, code_splits)

        # A word is a run of TEXT, interrupted only by dropped code points, or one ALONE character.
        kept = tf.where(normalized.kinds >= tables.ALONE)[:, 0]
        characters = tf.gather(normalized.characters, kept)
        kept_splits = tf.searchsorted(kept, normalized.row_splits, out_type=tf.int64)
        word_begins_W = self._word_begins(normalized, kept, kept_splits)
        num_kept = tf.size(characters, out_type=tf.int64)
        word_splits = tf.concat([word_begins_W, num_kept[tf.newaxis]], axis=0)
        return Words(
            self._encode_words(characters, word_splits),
            tf.searchsorted(word_begins_W, kept_splits, out_type=tf.int64),
            word_splits,
            tf.gather(normalized.first, kept),
            tf.gather(normalized.last, kept),
            entries_N,
            code_splits,
        )

    def _look_up(self, codes_N, index, pages):
        """Return the table values of code points."""
        page = tf.gather(index, tf.bitwise.right_shift(codes_N, 8))
        return tf.gather(pages, page + tf.bitwise.bitwise_and(codes_N, tables.PAGE - 1))

    def _normalize(self, codes_N, entries_N, row_splits):
        """Return `_Characters`, by table lookups alone if no code point needs its context."""
        kinds_N = tf.bitwise.bitwise_and(entries_N, (1 << tables.KIND_BITS) - 1)
        payloads_N = tf.bitwise.right_shift(entries_N, tables.KIND_BITS)
        positions_N = tf.range(tf.size(codes_N, tf.int64))

        def plain():
            return _Characters(codes_N + payloads_N, kinds_N, positions_N, positions_N, row_splits)

        def contextual():
            characters = codes_N + payloads_N
            if self._has_sigma:
                characters = self._resolve_sigma(codes_N, characters, kinds_N, row_splits)
            expanded = self._expand(characters, kinds_N, payloads_N, row_splits)
            return self._reorder(expanded) if self._has_marks else expanded

        return tf.cond(tf.reduce_any(kinds_N >= tables.SEVERAL), contextual, plain)

    def _resolve_sigma(self, codes_N, characters_N, kinds_N, row_splits):
        """Replace a sigma by its final form after a cased letter and before none.

        Case-ignorable characters are skipped (Unicode, 3.13, Final_Sigma; `str.lower`).
        """
        case_N = self._look_up(codes_N, self._tables["case_index"], self._tables["case_pages"])
        is_seen = (case_N != tables.CASE_IGNORABLE) & (kinds_N != tables.DROPPED)
        # One sentinel position before and one after give every sigma two neighbors.
        seen = tf.concat([[-1], tf.where(is_seen)[:, 0], [tf.size(codes_N, tf.int64)]], axis=0)
        sigmas = tf.where(kinds_N == tables.SIGMA)[:, 0]
        index = tf.searchsorted(seen, sigmas)
        rows = tf.searchsorted(row_splits, sigmas, "right") - 1
        before, after = tf.gather(seen, index - 1), tf.gather(seen, index + 1)
        case_N = tf.concat([case_N, [tables.UNCASED]], axis=0)  # For both sentinels.
        outside = tf.size(codes_N, tf.int64)

        def is_cased(neighbours, is_in_row):
            return tf.gather(case_N, tf.where(is_in_row, neighbours, outside)) == tables.CASED

        is_final = is_cased(before, before >= tf.gather(row_splits, rows))
        is_final &= ~is_cased(after, after < tf.gather(row_splits, rows + 1))
        final = tf.boolean_mask(sigmas, is_final)[:, tf.newaxis]
        values = tf.fill([tf.shape(final)[0]], tables.FINAL_SIGMA)
        return tf.tensor_scatter_nd_update(characters_N, final, values)

    def _expand(self, characters_N, kinds_N, payloads_N, row_splits):
        """Replace each SEVERAL code point by its characters; return `_Characters`."""
        is_several = kinds_N == tables.SEVERAL
        rows = tf.where(is_several, payloads_N, 0)
        several = self._tables["several"]
        if several.shape[0] == 0:
            several = tf.zeros([1, 3], tf.int32)
        several_N3 = tf.gather(several, rows)
        counts_N = tf.where(is_several, tf.math.count_nonzero(several_N3, axis=1), 1)
        ends_N = tf.cumsum(counts_N)
        sources = tf.repeat(tf.range(tf.size(kinds_N, tf.int64)), counts_N)
        within = tf.range(tf.size(sources, tf.int64)) - tf.gather(ends_N - counts_N, sources)
        characters = tf.where(
            tf.gather(is_several, sources),
            tf.gather(tf.gather(several_N3, sources), within, batch_dims=1),
            tf.gather(characters_N, sources),
        )
        splits = tf.gather(tf.concat([[0], ends_N], axis=0), row_splits)
        return _Characters(characters, tf.gather(kinds_N, sources), sources, sources, splits)

    def _reorder(self, expanded):
        """Sort combining characters after their starter by combining class (NFD)."""
        codes, classes = tf.unstack(self._tables["classes"], axis=1)
        index = tf.minimum(tf.searchsorted(codes, expanded.characters), tf.size(codes) - 1)
        is_listed = tf.gather(codes, index) == expanded.characters
        is_listed &= (expanded.kinds == tables.REORDERED) | (expanded.kinds == tables.SEVERAL)
        class_M = tf.where(is_listed, tf.gather(classes, index), 0)

        # A run is a starter and the characters up to the next starter. Dropped characters start no
        # run, a stripped mark starts one if its class is 0, and every text starts one.
        is_starter = (
            (class_M == 0) & (expanded.kinds != tables.DROPPED) & (expanded.kinds != tables.MARK)
        )
        size = tf.size(class_M, tf.int64)
        begins = tf.boolean_mask(expanded.row_splits, expanded.row_splits < size)[:, tf.newaxis]
        is_first = tf.scatter_nd(begins, tf.ones_like(begins[:, 0], tf.int32), [size]) > 0
        runs = tf.cumsum(tf.cast(is_starter | is_first, tf.int64))
        order = tf.argsort(runs * 256 + tf.cast(class_M, tf.int64), stable=True)

        # The reordered characters of a run are all mapped to the run's full source range.
        num_runs = tf.reduce_max(tf.concat([runs, [0]], axis=0)) + 1
        first = tf.math.unsorted_segment_min(
            tf.where(is_listed, expanded.first, size), runs, num_runs
        )
        last = tf.math.unsorted_segment_max(tf.where(is_listed, expanded.last, -1), runs, num_runs)
        return _Characters(
            tf.gather(expanded.characters, order),
            tf.gather(expanded.kinds, order),
            tf.gather(tf.where(is_listed, tf.gather(first, runs), expanded.first), order),
            tf.gather(tf.where(is_listed, tf.gather(last, runs), expanded.last), order),
            expanded.row_splits,
        )

    def _word_begins(self, normalized, kept, kept_splits):
        """Return the position of each word's first character among those kept, int64 `(W,)`."""
        is_alone = tf.gather(normalized.kinds, kept) == tables.ALONE
        spaces = tf.cumsum(tf.cast(normalized.kinds == tables.SPACE, tf.int32))
        spaces = tf.gather(spaces, kept)
        begins = is_alone[1:] | is_alone[:-1] | (spaces[1:] != spaces[:-1])
        begins = tf.concat([tf.ones_like(is_alone[:1]), begins], axis=0)
        size = tf.size(kept, tf.int64)
        rows = tf.boolean_mask(kept_splits, kept_splits < size)[:, tf.newaxis]
        is_first = tf.scatter_nd(rows, tf.ones_like(rows[:, 0], tf.int32), size[tf.newaxis]) > 0
        return tf.where(begins | is_first)[:, 0]

    def _encode_words(self, characters, word_splits):
        """Encode words as UTF-8 strings `(W,)`; words over the limit become `NEVER`."""
        words = tf.strings.unicode_encode(
            tf.RaggedTensor.from_row_splits(characters, word_splits, validate=False), "UTF-8"
        )
        is_long = word_splits[1:] - word_splits[:-1] > self._max_input_chars_per_word
        return tf.cond(
            tf.reduce_any(is_long), lambda: tf.where(is_long, NEVER, words), lambda: words
        )


def after_marks(ends: tf.Tensor, entries_N: tf.Tensor) -> tf.Tensor:
    """Extend the ends of tokens, int64 positions of code points, over stripped marks that follow.

    `entries_N` are the table entries of the code points.
    """
    kinds_N = tf.bitwise.bitwise_and(entries_N, (1 << tables.KIND_BITS) - 1)
    is_mark = (kinds_N == tables.MARK) | (kinds_N == tables.MARK_STARTER)
    others = tf.concat([tf.where(~is_mark)[:, 0], [tf.size(kinds_N, tf.int64)]], axis=0)
    return tf.gather(others, tf.searchsorted(others, ends))
