"""Layouts: which rows of [T, H] are one text. All else in the encoder does not ask.

Legend: B texts, L their padded length, T rows (B * L here), N heads, D head size, H hidden size (N
* D), P positions.
"""

import tensorflow as tf

MASKED_SCORE = (
    -1e9
)  # Added to the score of a key nobody may attend to; its float32 softmax is exactly 0.


class Padded:
    """Texts of one length L, short ones filled up: rows are the [B, L] grid, read line by line.

    Made from input_mask [B, L] (1 = token, 0 = padding). Shapes stay static where they are known.
    """

    def __init__(self, input_mask_BL):
        shape = tf.shape(input_mask_BL)
        self.batch = shape[0] if input_mask_BL.shape[0] is None else input_mask_BL.shape[0]
        self.length = shape[1] if input_mask_BL.shape[1] is None else input_mask_BL.shape[1]
        self.key_bias_B11L = (1.0 - tf.cast(input_mask_BL, tf.float32))[
            :, tf.newaxis, tf.newaxis, :
        ] * MASKED_SCORE

    def rows(self, values_BL):
        """[B, L] -> [T]."""
        return tf.reshape(values_BL, [-1])

    def positions(self, table_PH):
        """The position embedding of each row, [T, H]."""
        hidden = table_PH.shape[1]
        return tf.reshape(
            tf.broadcast_to(table_PH[: self.length], [self.batch, self.length, hidden]),
            [-1, hidden],
        )

    def split_heads(self, qkv_TE, num_heads):
        """[T, 3 * H], queries, keys, values side by side -> three of [B, N, L, D]."""
        head_size = qkv_TE.shape[-1] // (3 * num_heads)
        qkv = tf.reshape(qkv_TE, [self.batch, self.length, 3, num_heads, head_size])
        return tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))

    def merge_heads(self, context_BNLD):
        """[B, N, L, D] -> [T, H]."""
        hidden = context_BNLD.shape[1] * context_BNLD.shape[3]
        return tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [-1, hidden])

    def first_rows(self, hidden_TH):
        """The row of each text's [CLS], [B, H]."""
        return tf.gather(hidden_TH, tf.range(self.batch) * self.length)

    def restore(self, hidden_TH):
        """[T, H] -> [B, L, H], the shape the inputs had."""
        return tf.reshape(hidden_TH, [self.batch, self.length, hidden_TH.shape[-1]])
