"""The tokenizer inside the graph: strings in, token ids and character offsets out.

Words are the normalizer's; each goes through a WordPiece operation that splits nothing by itself.
Only operations of TensorFlow and TF Text are used, which TF Serving links.

Legend: B texts, (T) tokens of a text (ragged), V vocabulary entries.
"""

from typing import NamedTuple

import tensorflow as tf
import tensorflow_text as tf_text

from bert_tf.errors import UserError
from bert_tf.text.normalizer import MAX_WORD_CHARACTERS, NEVER, Normalizer, after_marks
from bert_tf.text.vocabulary import Vocabulary


class Tokens(NamedTuple):
    """Ragged int32 [B, (T)] each; starts and ends are None where nobody asked for them.

    A token covers text[start:end] of the string as it came in, by Python's counting of code points;
    bytes that are no UTF-8 count as `bytes.decode("utf-8", "replace")` counts them. The marks that
    follow a character belong to it even where they are stripped.
    """

    ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None


class Tokenizer(tf.Module):
    """Token for token google-research/bert's FullTokenizer (Devlin et al. 2019, 3).

    `strip_accents` None follows the case, as there; True or False decide it apart, as at Hugging
    Face.
    """

    def __init__(self, vocabulary: Vocabulary, do_lower_case, strip_accents=None):
        super().__init__(name="tokenizer")
        self.vocabulary = vocabulary
        self._normalizer = Normalizer(do_lower_case, strip_accents)
        # In the released code "" and a bare "##" never match: nor do these stand-ins.
        entries = [
            entry if entry not in ("", "##") else f"{NEVER}{index}"
            for index, entry in enumerate(vocabulary.entries)
        ]
        try:
            self._wordpiece = tf_text.FastWordpieceTokenizer(
                vocab=entries,
                unknown_token="[UNK]",
                token_out_type=tf.int32,
                no_pretokenization=True,
                max_bytes_per_word=4 * MAX_WORD_CHARACTERS,
            )
        except RuntimeError as error:  # No ordinary entry, or one of over 256 bytes.
            raise UserError(f"vocabulary of {len(entries)} entries: {error}") from None
        lengths = [len(entry.removeprefix("##")) for entry in entries]
        self._lengths_V = tf.constant(lengths, tf.int64)  # In characters, for offsets.
        # Traced once each: all signatures of an export call these.
        self._ids, self._ids_and_offsets = (
            tf.function(
                lambda texts, with_offsets=with_offsets: self._tokens(texts, with_offsets),
                input_signature=[tf.TensorSpec([None], tf.string)],
                autograph=False,
            )
            for with_offsets in (False, True)
        )

    def tokenize(self, texts):
        """[B] string -> Tokens with ids only."""
        return self._in_halves(texts, self._ids)

    def tokenize_with_offsets(self, texts):
        """[B] string -> Tokens.

        ["Unaffable!"] -> ids of un ##aff ##able !, starts [0, 2, 5, 9], ends [2, 5, 9, 10].
        """
        return self._in_halves(texts, self._ids_and_offsets)

    def _in_halves(self, texts, tokens):
        """Two halves of the batch, which TensorFlow works on at the same time."""
        texts = tf.convert_to_tensor(texts)
        middle = tf.size(texts) // 2
        halves = [tokens(half) for half in (texts[:middle], texts[middle:])]
        return Tokens(
            *(
                None if parts[0] is None else tf.concat(parts, axis=0)
                for parts in zip(*halves, strict=True)
            )
        )

    def _tokens(self, texts, with_offsets):
        words = self._normalizer.words(texts)
        pieces = self._wordpiece.tokenize(words.words)
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
        """The code points that each token is from: its first, and the one behind its last."""
        word_ids = pieces.value_rowids()
        word_lengths = words.word_splits[1:] - words.word_splits[:-1]
        is_unknown = pieces.flat_values == self.vocabulary["[UNK]"]
        lengths = tf.gather(self._lengths_V, pieces.flat_values)
        lengths = tf.where(is_unknown, tf.gather(word_lengths, word_ids), lengths)
        # A word's pieces between them have its characters, so all lengths up to a token count
        # the characters before it.
        ends = tf.cumsum(lengths)
        starts, ends = tf.gather(words.first, ends - lengths), tf.gather(words.last, ends - 1) + 1
        return starts, after_marks(ends, words.entries)
