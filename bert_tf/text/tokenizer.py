"""Tokenize strings inside the graph, to token ids and character offsets.

A text of ASCII characters needs no Unicode normalization: one operation splits and tokenizes it.
For other texts the normalizer splits words, and a WordPiece operation that does no splitting by
itself tokenizes each of them. Only operations of TensorFlow and TF Text are used, which TF Serving
links.

Shape suffixes: B texts, (T) tokens per text (ragged), V vocabulary size.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.normalizer import MAX_INPUT_CHARS_PER_WORD, NEVER, Normalizer, after_marks
from bert_tf.text.vocabulary import Vocabulary

# Texts that need only lower-casing and splitting at spaces and punctuation. Cleaning drops control
# characters without splitting a word, so they are not among them.
PLAIN_ASCII = r"[ -~\t\n\r]*"
# Entries that may occur in them. TF Text would match some others across spaces and punctuation.
ASCII_ENTRY = re.compile(r"(##)?[0-9A-Za-z]+|[!-/:-@\[-`{-~]|\[UNK\]")


class Tokens(NamedTuple):
    """Tokens of B texts, ragged int32 `(B, (T))` each.

    A token covers text[start:end] of the original string, counted in code points as in Python.
    Invalid UTF-8 counts as in `bytes.decode("utf-8", "replace")`. Combining marks belong to the
    preceding character even if they are stripped.

    Attributes:
        ids: Token ids.
        starts: First character of each token, or `None` without offsets.
        ends: Character after each token, or `None` without offsets.
    """

    ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None


def concat_tokens(parts: Sequence[Tokens], axis: int) -> Tokens:
    """Concatenate `Tokens`: the texts of a batch (axis 0) or the tokens of each text (axis 1)."""
    columns = zip(*parts, strict=True)
    return Tokens(*(None if of[0] is None else tf.concat(of, axis=axis) for of in columns))


def map_tokens(function: Callable[[tf.RaggedTensor], tf.RaggedTensor], tokens: Tokens) -> Tokens:
    """Apply a function to the ids and, if there are any, to the offsets."""
    return Tokens(*(None if ragged is None else function(ragged) for ragged in tokens))


class Tokenizer(tf.Module):
    """WordPiece tokenizer, equal to FullTokenizer of google-research/bert (Devlin et al. 2019, 3).

        vocabulary = Vocabulary.load("vocab.txt")
        tokenizer = Tokenizer(vocabulary, do_lower_case=True)
        tokens = tokenizer.tokenize(tf.constant(["My bill.", "My app."]))
        to_padded(pack([tokens], vocabulary, max_seq_length=128), vocabulary)["input_ids"]

    Args:
        vocabulary: Entries and ids.
        do_lower_case: Lower-cases the text.
        strip_accents: Strips accents, as in Hugging Face. Defaults to `do_lower_case`, as released.
        max_input_chars_per_word: Maximum number of characters of a word; a longer one is [UNK].
            100 in Hugging Face.

    Raises:
        UserError: TF Text rejects the vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        do_lower_case: bool,
        strip_accents: bool | None = None,
        max_input_chars_per_word: int = MAX_INPUT_CHARS_PER_WORD,
    ) -> None:
        super().__init__(name="tokenizer")
        self.vocabulary = vocabulary
        self._do_lower_case = do_lower_case
        self._normalizer = Normalizer(do_lower_case, strip_accents, max_input_chars_per_word)
        entries = vocabulary.entries
        self._wordpiece_of_texts = _wordpiece(
            entries,
            lambda entry: ASCII_ENTRY.fullmatch(entry),
            max_input_chars_per_word,
            splits=True,
        )
        # "" and a bare "##" never match in the released code, and no text contains `NEVER`.
        self._wordpiece_of_words = _wordpiece(
            entries,
            lambda entry: entry not in ("", "##") and NEVER not in entry,
            4 * max_input_chars_per_word,
            splits=False,
        )
        lengths = [len(entry.removeprefix("##")) for entry in entries]
        self._lengths_V = tf.constant(lengths, tf.int64)  # In characters, for offsets.
        # Each is traced once, because all signatures of an export call them.
        self._ids, self._ids_and_offsets = (
            tf.function(
                lambda texts, with_offsets=with_offsets: self._tokens(texts, with_offsets),
                input_signature=[tf.TensorSpec([None], tf.string)],
                autograph=False,
            )
            for with_offsets in (False, True)
        )

    @classmethod
    def from_config(cls, config: BertConfig, vocabulary: Vocabulary) -> Self:
        """Create the tokenizer of a model, with the settings of its configuration."""
        return cls(vocabulary, **config.tokenizer_settings)

    def tokenize(self, texts: tf.Tensor) -> Tokens:
        """Return the `Tokens` of texts, string `(B,)`, without offsets."""
        return self._ids(texts)

    def tokenize_with_offsets(self, texts: tf.Tensor) -> Tokens:
        """Return the `Tokens` of texts, string `(B,)`, with character offsets.

        ["Unaffable!"] gives the ids of un ##aff ##able !, starts [0, 2, 5, 9], ends [2, 5, 9, 10].
        """
        return self._ids_and_offsets(texts)

    def _tokens(self, texts, with_offsets):
        is_plain = tf.strings.regex_full_match(texts, PLAIN_ASCII)
        return tf.cond(
            tf.reduce_all(is_plain),
            lambda: self._ascii(texts, with_offsets),
            lambda: self._mixed(texts, is_plain, with_offsets),
        )

    def _mixed(self, texts, is_plain, with_offsets):
        """Tokenize the `PLAIN_ASCII` texts and the others apart, and restore their order."""
        order = [tf.where(is_plain)[:, 0], tf.where(~is_plain)[:, 0]]
        plain, others = (tf.gather(texts, rows) for rows in order)
        tokens = [self._ascii(plain, with_offsets), self._unicode(others, with_offsets)]
        position = tf.math.invert_permutation(tf.concat(order, axis=0))
        return map_tokens(lambda of: tf.gather(of, position), concat_tokens(tokens, axis=0))

    def _ascii(self, texts, with_offsets):
        """Return the `Tokens` of `PLAIN_ASCII` texts, whose bytes are their characters.

        Both halves of the batch are tokenized in parallel.
        """
        middle = tf.size(texts) // 2
        halves = [self._ascii_half(half, with_offsets) for half in (texts[:middle], texts[middle:])]
        return concat_tokens(halves, axis=0)

    def _ascii_half(self, texts, with_offsets):
        if self._do_lower_case:
            texts = tf.strings.lower(texts)
        if with_offsets:
            ids, *offsets = self._wordpiece_of_texts.tokenize_with_offsets(texts)
            return Tokens(ids, *(tf.cast(column, tf.int32) for column in offsets))
        return Tokens(self._wordpiece_of_texts.tokenize(texts))

    def _unicode(self, texts, with_offsets):
        """Return the `Tokens` of any texts."""
        words = self._normalizer.words(texts)
        pieces = self._wordpiece_of_words.tokenize(words.words)
        token_splits = tf.gather(pieces.row_splits, words.row_splits)

        def of_rows(values):
            return tf.RaggedTensor.from_row_splits(values, token_splits, validate=False)

        if not with_offsets:
            return Tokens(of_rows(pieces.flat_values))
        starts, ends = self._offsets(pieces, words)
        rows = (
            tf.searchsorted(token_splits, tf.range(tf.size(starts, tf.int64)), "right", tf.int64)
            - 1
        )
        begins, ends_of_rows = (tf.gather(words.code_splits, rows + plus) for plus in (0, 1))
        return Tokens(
            of_rows(pieces.flat_values),
            of_rows(tf.cast(starts - begins, tf.int32)),
            of_rows(tf.cast(tf.minimum(ends, ends_of_rows) - begins, tf.int32)),
        )

    def _offsets(self, pieces, words):
        """Return the first code point of each token and the one after its last."""
        word_ids = pieces.value_rowids()
        word_lengths = words.word_splits[1:] - words.word_splits[:-1]
        is_unknown = pieces.flat_values == self.vocabulary["[UNK]"]
        lengths = tf.gather(self._lengths_V, pieces.flat_values)
        lengths = tf.where(is_unknown, tf.gather(word_lengths, word_ids), lengths)
        # The pieces of a word partition its characters, so the cumulative length up to a token is
        # the number of characters before it.
        ends = tf.cumsum(lengths)
        starts, ends = tf.gather(words.first, ends - lengths), tf.gather(words.last, ends - 1) + 1
        return starts, after_marks(ends, words.entries)


def _wordpiece(entries, may_match, max_bytes_per_word, splits):
    """Return TF Text's WordPiece tokenizer of texts, if it `splits` them, or of words.

    Entries that may not match are replaced by ones that never do, so that ids remain.
    """
    # Imported here, because it takes 115 MB of memory, and training on shards tokenizes nothing.
    import tensorflow_text as tf_text

    replaced = (f"{NEVER}{index}" for index in range(len(entries)))
    entries = [e if may_match(e) else never for e, never in zip(entries, replaced, strict=True)]
    try:
        return tf_text.FastWordpieceTokenizer(
            vocab=entries,
            unknown_token="[UNK]",
            token_out_type=tf.int32,
            no_pretokenization=not splits,
            max_bytes_per_word=max_bytes_per_word,
        )
    except RuntimeError as error:  # No normal entry, or one over 256 bytes.
        raise UserError(f"vocabulary of {len(entries)} entries: {error}") from None
