"""Tokenize strings inside the graph, to token ids and character offsets.

A text of ASCII characters needs no Unicode normalization: one operation splits and tokenizes it.
For other texts the normalizer splits words, and a WordPiece operation that does no splitting by
itself tokenizes each of them. Only operations of TensorFlow and TF Text are used, which TF Serving
links.

Of a string at most MAX_BYTES bytes are read, and of a long text only as much of the beginning or
the end as is needed. It is cut only before a character that separates words and that no tokenizer
rule looks across: an ASCII space or punctuation mark, or a CJK ideograph. The tokens of the excerpt
therefore equal those of the complete text. If no such character is within reach, more is read.

Shape suffixes: B texts, b a subset of them, (T) tokens of a text or piece (ragged), V vocabulary
size, P pieces between masks, of all texts, X bytes within reach of a cut.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
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

MASK = "[MASK]"
BYTES_PER_TOKEN = 16  # Read first per requested token; then four times as many.
REACH = 2**10  # Bytes searched for a cut before a position.
# Excluded are ".", ":", "'", "^" and "`", because the lower case of a capital sigma depends on what
# follows them, and "]", the end of "[MASK]".
CUT_BEFORE = b' \t\n\r!"#$%&()*+,-/;<=>?@[\\_{|}~'
# The first of the three bytes of U+5000 to U+9FFF.
IDEOGRAPHS = (0xE5, 0xE9)
MAX_BYTES = 2**20  # Per input string; about 150,000 English words.
LONGEST_CHARACTER = 4  # Bytes, in UTF-8.


class Tokens(NamedTuple):
    """Tokens of B texts, ragged int32 `(B, (T))` each.

    A token covers text[start:end] of the original string, counted in code points as in Python.
    Invalid UTF-8 counts as in `bytes.decode("utf-8", "replace")`. Combining marks belong to the
    preceding character even if they are stripped.

    Attributes:
        ids: Token ids.
        starts: First character of each token, or `None` without offsets.
        ends: Character after each token, or `None` without offsets.
        unread: Estimated number of further tokens of each text, int64 `(B,)`, if long texts are not
            read completely; or `None`.
    """

    ids: tf.RaggedTensor
    starts: tf.RaggedTensor | None = None
    ends: tf.RaggedTensor | None = None
    unread: tf.Tensor | None = None

    @property
    def lengths(self) -> tf.Tensor:
        """Number of tokens of each complete text, int64 `(B,)`; an estimate if some are unread."""
        lengths_B = self.ids.row_lengths()
        return lengths_B if self.unread is None else lengths_B + self.unread


def concat_tokens(parts: Sequence[Tokens], axis: int) -> Tokens:
    """Concatenate `Tokens`: the texts of a batch (axis 0) or the tokens of each text (axis 1)."""
    columns = zip(*parts, strict=True)
    return Tokens(*(None if of[0] is None else tf.concat(of, axis=axis) for of in columns))


def map_tokens(function: Callable[[Any], Any], tokens: Tokens) -> Tokens:
    """Apply a function of rows to all values of `Tokens`."""
    return Tokens(*(None if values is None else function(values) for values in tokens))


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


def tokenize_masked(
    texts: tf.Tensor, tokenize: Callable[[tf.Tensor], Tokens], vocabulary: Vocabulary
) -> Tokens:
    """Tokenize texts, string `(B,)`, with the id of [MASK] for each literal "[MASK]".

    For example, "A [MASK]!" becomes the ids of a, [MASK] and !, with starts [0, 2, 8] and ends
    [1, 8, 9]. Texts are split at masks first, because the tokenizer treats brackets as punctuation.
    `tokenize` is a method of `Tokenizer`; its offsets, if any, count characters of complete texts.
    """
    pieces = tf.strings.split(texts, MASK)
    tokens = tokenize(pieces.flat_values)
    # A mask follows each piece except the last of a text.
    masks_P = tf.tensor_scatter_nd_update(
        tf.ones_like(pieces.value_rowids()),
        pieces.row_limits()[:, tf.newaxis] - 1,
        tf.zeros_like(pieces.row_limits()),
    )

    def joined(of_tokens, of_masks):
        """Insert one value per mask into values of pieces, ragged (P, (T)); returns (B, (T))."""
        masks = tf.RaggedTensor.from_row_lengths(of_masks, masks_P, validate=False)
        return pieces.with_values(tf.concat([of_tokens, masks], axis=1)).merge_dims(1, 2)

    num_masks = tf.reduce_sum(masks_P)
    ids = joined(tokens.ids, tf.fill([num_masks], vocabulary[MASK]))
    if tokens.starts is None:
        return Tokens(ids)
    # Characters are counted as in the tokenizer, which replaces invalid UTF-8.
    characters = tf.strings.unicode_decode(pieces.flat_values, "UTF-8", errors="replace")
    begin_P = tf.cumsum(characters.row_lengths() + len(MASK) * masks_P, exclusive=True)
    begin_P -= tf.gather(tf.gather(begin_P, pieces.row_starts()), pieces.value_rowids())
    begin_P = tf.cast(begin_P, tf.int32)
    mask_begins = tf.boolean_mask(
        begin_P + tf.cast(characters.row_lengths(), tf.int32), masks_P == 1
    )

    def moved(offsets):
        return offsets.with_values(offsets.values + tf.gather(begin_P, offsets.value_rowids()))

    return Tokens(
        ids,
        joined(moved(tokens.starts), mask_begins),
        joined(moved(tokens.ends), mask_begins + len(MASK)),
    )


def tokenize_ends(
    tokenize: Callable[[tf.Tensor], Tokens],
    texts: tf.Tensor,
    max_tokens: int,
    truncation: str = "head",
) -> Tokens:
    """Tokenize only as much of long texts as `max_tokens` tokens require.

    Args:
        tokenize: Maps string `(B,)` to `Tokens`, such as a method of `Tokenizer`.
        texts: String `(B,)`.
        max_tokens: Maximum number of tokens that are kept of a text.
        truncation: Tokens that are kept: "head", "tail" or "head_tail"; see `encoder_inputs.pack`.

    Returns:
        `Tokens` of each text: all of them, or at least `max_tokens` from each end that `truncation`
        keeps, and an estimate of the others. Offsets count characters of the complete text.
    """
    num_sides = 2 if truncation == "head_tail" else 1
    length_B = tf.strings.length(texts)

    def read(size_B):
        """Tokenize excerpts; return sizes for the next time, whether it is needed, and tokens."""
        sides = [
            _shifted(tokenize(part_B), texts, begin_B)
            for begin_B, part_B in _sides(texts, size_B, truncation)
        ]
        counts = [tokens.ids.row_lengths() for tokens in sides]
        is_short_B = tf.reduce_min(tf.stack(counts), axis=0) < max_tokens
        is_short_B &= length_B > num_sides * size_B
        larger_B = 4 * tf.minimum(size_B, length_B // 4 + 1)
        tokens = sides[0] if len(sides) == 1 else concat_tokens(sides, axis=1)
        return tf.where(is_short_B, larger_B, size_B), tf.reduce_any(is_short_B), tokens

    size_B = tf.fill(tf.shape(length_B), BYTES_PER_TOKEN * max_tokens)
    size_B, tokens = _repeated(read, size_B)
    read_B = tf.minimum(num_sides * size_B, length_B)
    # The tokens that are not read are about as long as the others.
    per_byte_B = tokens.ids.row_lengths() / tf.cast(tf.maximum(read_B, 1), tf.int64)
    unread_B = tf.cast(per_byte_B * tf.cast(length_B - read_B, tf.float64), tf.int64)
    return tokens._replace(unread=unread_B)


def last_cuts(texts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the last position at or before `positions` where a text may be cut.

    Positions are int32 `(B,)`, in bytes; 0 if there is no cut within `REACH` bytes.
    """
    begin_B = tf.maximum(positions - REACH, 0)
    # Two more bytes are read because an ideograph is recognized by all of its three bytes.
    bytes_BX = tf.strings.substr(texts, begin_B, tf.fill(tf.shape(begin_B), REACH + 3))
    bytes_BX = tf.io.decode_raw(bytes_BX, tf.uint8, fixed_length=REACH + 3)
    is_mark = np.zeros(256, bool)
    is_mark[list(CUT_BEFORE)] = True
    is_cut_BX = tf.gather(tf.constant(is_mark), tf.cast(bytes_BX[:, :-2], tf.int32))
    is_ideograph_BX = (bytes_BX[:, :-2] >= IDEOGRAPHS[0]) & (bytes_BX[:, :-2] <= IDEOGRAPHS[1])
    is_continuation_BX = (bytes_BX & 0xC0) == 0x80
    is_cut_BX |= is_ideograph_BX & is_continuation_BX[:, 1:-1] & is_continuation_BX[:, 2:]
    position_BX = begin_B[:, tf.newaxis] + tf.range(REACH + 1)
    is_cut_BX &= position_BX <= positions[:, tf.newaxis]
    return tf.reduce_max(tf.where(is_cut_BX, position_BX, 0), axis=1)


def truncate_utf8(texts: tf.Tensor, max_bytes: int = MAX_BYTES) -> tf.Tensor:
    """Truncate strings of any shape to at most `max_bytes` bytes, at a character boundary.

    For example, ["abc", "dé"] with max_bytes=2 becomes ["ab", "d"]. Invalid UTF-8 is cut at
    `max_bytes` exactly.
    """
    texts_B = tf.reshape(texts, [-1])
    lengths_B = tf.strings.length(texts_B)
    (long,) = tf.unstack(tf.where(lengths_B > max_bytes), axis=1)
    # Inspect the last bytes up to the first one that is cut off. If that one continues a character,
    # the beginning of the character is cut off too.
    before = min(LONGEST_CHARACTER - 1, max_bytes)
    last = tf.strings.substr(tf.gather(texts_B, long), max_bytes - before, before + 1)
    last = tf.io.decode_raw(last, tf.uint8, fixed_length=before + 1)
    is_continuation = tf.cast((last & 0xC0) == 0x80, tf.int32)
    # Number of consecutive continuation bytes, counted from the end.
    count = tf.reduce_sum(tf.math.cumprod(is_continuation, axis=1, reverse=True), axis=1)
    kept = tf.tensor_scatter_nd_update(
        tf.minimum(lengths_B, max_bytes),
        long[:, tf.newaxis],
        max_bytes - tf.where(count <= before, count, 0),
    )
    return tf.reshape(tf.strings.substr(texts_B, tf.zeros_like(kept), kept), tf.shape(texts))


def _repeated(read, size_B):
    """Call `read` with the sizes that it returns until it asks for no other.

    Returns the last sizes and the tokens.

    A graph gets a loop that makes the first call as well. Another call before it would add all
    operations of the tokenizer a second time, and TensorFlow would take longer to optimize them.
    """
    if tf.executing_eagerly():
        is_short = True
        while is_short:
            size_B, is_short, tokens = read(size_B)
        return size_B, tokens

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def columns(size_B):
        size_B, is_short, tokens = read(size_B)
        return size_B, is_short, [ragged for ragged in tokens if ragged is not None]

    columns = columns.get_concrete_function()
    spec = columns.structured_outputs[-1]
    parts = [tf.zeros([0], part.dtype) for part in tf.nest.flatten(spec, expand_composites=True)]

    def body(size_B, is_short, parts):
        size_B, is_short, ragged = columns(size_B)
        return size_B, is_short, tf.nest.flatten(ragged, expand_composites=True)

    size_B, _, parts = tf.while_loop(
        lambda size_B, is_short, parts: is_short,
        body,
        (size_B, True, parts),
        (size_B.shape, tf.TensorShape([]), [tf.TensorShape([None])] * len(parts)),
        parallel_iterations=1,
    )
    return size_B, Tokens(*tf.nest.pack_sequence_as(spec, parts, expand_composites=True))


def _shifted(tokens, texts, begin_B):
    """Return tokens with offsets in `texts` instead of in excerpts that begin at `begin_B`."""
    if begin_B is None or tokens.starts is None:
        return tokens
    # Characters are counted as in the tokenizer, where invalid bytes are replaced.
    before_B = tf.strings.substr(texts, tf.zeros_like(begin_B), begin_B)
    before = tf.strings.unicode_decode(before_B, "UTF-8", errors="replace")
    shift = tf.cast(before.row_lengths(), tf.int32)[:, tf.newaxis]
    return Tokens(tokens.ids, tokens.starts + shift, tokens.ends + shift)


def _sides(texts, size_B, truncation):
    """Return a (begin, excerpt) pair per end that is kept; begin is `None` for the head."""
    length_B = tf.strings.length(texts)
    is_long_B = length_B > (2 if truncation == "head_tail" else 1) * size_B
    (row_b,) = tf.unstack(tf.where(is_long_B), axis=1)
    long_b, size_b = tf.gather(texts, row_b), tf.gather(size_B, row_b)

    def cut(positions_b, of_short_B):
        cuts_b = last_cuts(long_b, positions_b)
        return tf.tensor_scatter_nd_update(of_short_B, row_b[:, tf.newaxis], cuts_b)

    sides = []
    if truncation != "tail":
        end_B = cut(size_b, length_B)
        sides.append((None, tf.strings.substr(texts, tf.zeros_like(end_B), end_B)))
    if truncation != "head":
        # Short texts are read from one end only.
        of_short_B = tf.zeros_like(length_B) if truncation == "tail" else length_B
        begin_B = cut(tf.strings.length(long_b) - size_b, of_short_B)
        sides.append((begin_B, tf.strings.substr(texts, begin_B, length_B - begin_B)))
    return sides
