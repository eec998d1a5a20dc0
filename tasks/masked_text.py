"""Tokens of texts that say [MASK] where an entry is asked for.

Legend: B texts, P pieces of all texts, which are what stands between masks, (T) tokens of a piece
or text, ragged.
"""

import tensorflow as tf

from bert_tf.text.tokenizer import Tokens

MASK = "[MASK]"


def tokenize_masked(texts, tokenize, vocabulary):
    """[B] string -> Tokens, with the vocabulary's [MASK] for each literal "[MASK]".

    The texts are split there before `tokenize`, a Tokenizer's method, sees them, since by its rules
    brackets are punctuation. Offsets, where `tokenize` gives them, count characters of the text.

    ["A [MASK]!"] -> ids of a, [MASK], !; starts [0, 2, 8], ends [1, 8, 9].
    """
    pieces = tf.strings.split(texts, MASK)
    tokens = tokenize(pieces.flat_values)
    # A mask stands behind each piece but a text's last.
    masks_P = tf.tensor_scatter_nd_update(
        tf.ones_like(pieces.value_rowids()),
        pieces.row_limits()[:, tf.newaxis] - 1,
        tf.zeros_like(pieces.row_limits()),
    )

    def joined(of_tokens, of_masks):
        """Ragged [P, (T)] and a value for each mask -> [B, (T)]."""
        masks = tf.RaggedTensor.from_row_lengths(of_masks, masks_P, validate=False)
        return pieces.with_values(tf.concat([of_tokens, masks], axis=1)).merge_dims(1, 2)

    num_masks = tf.reduce_sum(masks_P)
    ids = joined(tokens.ids, tf.fill([num_masks], vocabulary[MASK]))
    if tokens.starts is None:
        return Tokens(ids)
    # Counted as the tokenizer counts them.
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
