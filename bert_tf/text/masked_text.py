"""Tokenization of texts that contain [MASK].

Shape suffixes: B texts, P pieces between masks, of all texts, (T) tokens of a piece or text
(ragged).
"""

from collections.abc import Callable

import tensorflow as tf

from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary

MASK = "[MASK]"


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
