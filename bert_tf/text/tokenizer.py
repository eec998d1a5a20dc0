"""The tokenizer inside the graph: strings in, token ids and character offsets out.

Legend: B texts, (T) tokens of a text, ragged.
"""

from typing import NamedTuple

import tensorflow as tf
import tensorflow_text as tf_text

from bert_tf.errors import UserError


class Tokens(NamedTuple):
    """Ragged int32 [B, (T)] each; starts and ends are None where nobody asked for them.

    A token covers the characters text[start:end] of the string as it came in (Python's counting:
    code points, an undecodable byte sequence counting as the U+FFFD that `bytes.decode("utf-8",
    "replace")` puts there).
    """

    ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None


class Tokenizer(tf.Module):
    """WordPiece over cleaned, split and, if uncased, lower-cased text (released tokenization.py).

    Differs: TF Text's fast normalizer stands in for the released rules; on rare Unicode (about 5%
    of the lines of a 380-language collection, none of plain English) its tokens are not the
    released ones.
    """

    def __init__(self, vocabulary, do_lower_case, strip_accents=None):
        super().__init__(name="tokenizer")
        if strip_accents not in (None, do_lower_case):
            raise UserError(
                f"strip_accents={strip_accents} with do_lower_case={do_lower_case} is not "
                "supported: "
                "leave strip_accents unset, or equal to do_lower_case"
            )
        self.vocabulary = vocabulary
        self.do_lower_case = do_lower_case
        # "" and a bare "##" never match in the released code. A control character never survives
        # cleaning, so these stand-ins never match either.
        entries = [
            entry if entry not in ("", "##") else f"\x01{index}"
            for index, entry in enumerate(vocabulary.entries)
        ]
        self._tokenizer = tf_text.FastBertTokenizer(
            vocab=entries,
            unknown_token="[UNK]",
            token_out_type=tf.int32,
            max_bytes_per_word=200,
            lower_case_nfd_strip_accents=do_lower_case,
        )

    def tokenize(self, texts):
        """[B] string -> Tokens with ids only."""
        return Tokens(self._tokenizer.tokenize(_valid_utf8(texts)))

    def tokenize_with_offsets(self, texts):
        """[B] string -> Tokens.

        ["Unaffable!"] -> ids of un ##aff ##able !, starts [0, 2, 5, 9], ends [2, 5, 9, 10].
        """
        texts = _valid_utf8(texts)
        ids, starts, ends = self._tokenizer.tokenize_with_offsets(texts)
        return Tokens(ids, *_bytes_to_characters(texts, starts, ends))


def _valid_utf8(texts):
    return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")


def _bytes_to_characters(texts, *offsets):
    """Turns byte offsets into the valid UTF-8 `texts`, ragged [B, (T)], into character offsets."""
    _, starts = tf.strings.unicode_decode_with_offsets(texts, "UTF-8")
    lengths_B = tf.strings.length(texts, unit="BYTE")
    # All texts laid end to end: one sorted list of where characters begin, in which every offset is
    # looked up at once.
    text_begins_B = tf.cast(tf.cumsum(lengths_B, exclusive=True), tf.int64)
    character_begins = starts.flat_values + tf.gather(text_begins_B, starts.value_rowids())
    first_character_B = starts.row_starts()

    def convert(ragged):
        rows = ragged.value_rowids()
        begins = tf.cast(ragged.flat_values, tf.int64) + tf.gather(text_begins_B, rows)
        index = tf.searchsorted(
            character_begins[tf.newaxis], begins[tf.newaxis], side="left", out_type=tf.int64
        )[0]
        return ragged.with_flat_values(
            tf.cast(index - tf.gather(first_character_B, rows), tf.int32)
        )

    return [convert(ragged) for ragged in offsets]
