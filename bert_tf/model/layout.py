"""Layouts: which rows of [T, H] are one text. All else in the encoder does not ask.

Both have the same methods, and `key_bias_B11L`. Attention is computed on a [B, L] grid in either,
all else on rows.

Legend: B texts, L tokens of the longest or a few more, T rows, N heads, D head size, H hidden size
(N * D), P positions.
"""

import tensorflow as tf

from bert_tf.bucketing import round_up_to_bucket

# Added to the score of a key nobody may attend to; its float32 softmax is exactly 0.
MASKED_SCORE = -1e9
TOO_LONG = "a text has more tokens than max_position_embeddings: cut with pack(..., max_seq_length)"

WRONG_SPLITS = (
    "row_splits begins with 0, leaves each text at least one token, and ends within input_ids"
)


def infer_layout(inputs):
    """The layout that a batch came in, by its keys: `row_splits` is flat, `input_mask` padded."""
    return FlatLayout(inputs) if "row_splits" in inputs else PaddedLayout(inputs["input_mask"])


def split_cls_heads(vectors_BH, num_heads):
    """One row a text, [B, H] -> [B, N, 1, D], as `split_heads` gives L of them."""
    return tf.reshape(vectors_BH, [-1, num_heads, 1, vectors_BH.shape[-1] // num_heads])


class PaddedLayout:
    """Texts of one length L, short ones filled up: rows are the [B, L] grid, read line by line.

    Made from input_mask [B, L] (1 = token, 0 = padding). Shapes stay static where they are known.
    """

    def __init__(self, input_mask_BL):
        shape = tf.shape(input_mask_BL)
        self.batch = shape[0] if input_mask_BL.shape[0] is None else input_mask_BL.shape[0]
        self.length = shape[1] if input_mask_BL.shape[1] is None else input_mask_BL.shape[1]
        self.key_bias_B11L = _key_bias(tf.cast(input_mask_BL, tf.bool))

    def flatten(self, values_BL):
        """[B, L] -> [T]."""
        return tf.reshape(values_BL, [-1])

    def positions(self, table_PH):
        """The position embedding of each row, [T, H]."""
        if isinstance(self.length, int) and self.length > table_PH.shape[0]:
            raise ValueError(f"{self.length} tokens, {table_PH.shape[0]} positions: {TOO_LONG}")
        hidden = table_PH.shape[1]
        return tf.reshape(
            tf.broadcast_to(table_PH[: self.length], [self.batch, self.length, hidden]),
            [-1, hidden],
        )

    def split_heads(self, vectors_TH, num_heads):
        """[T, H] -> [B, N, L, D]."""
        head_size = vectors_TH.shape[-1] // num_heads
        split_BLND = tf.reshape(vectors_TH, [self.batch, self.length, num_heads, head_size])
        return tf.transpose(split_BLND, [0, 2, 1, 3])

    def merge_heads(self, context_BNLD):
        """[B, N, L, D] -> [T, H]."""
        hidden = context_BNLD.shape[1] * context_BNLD.shape[3]
        return tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [-1, hidden])

    def cls_vectors(self, hidden_TH):
        """The row of each text's [CLS], [B, H]."""
        return self.unflatten(hidden_TH)[:, 0]

    def unflatten(self, hidden_TH):
        """[T, H] -> [B, L, H], the shape the inputs had."""
        return tf.reshape(hidden_TH, [self.batch, self.length, hidden_TH.shape[-1]])


class FlatLayout:
    """Texts one behind the other: a row is a token, and no padding is computed but in attention.

    Made from input_ids [T] and row_splits [B + 1]: text b has the rows row_splits[b] up to
    row_splits[b + 1], at least one. Rows from row_splits[-1] on are nobody's: no text sees them,
    and what is computed for them means nothing.
    """

    def __init__(self, inputs):
        splits = tf.cast(inputs["row_splits"], tf.int32)
        fits = (splits[0] == 0) & (splits[-1] <= tf.size(inputs["input_ids"]))
        fits &= tf.reduce_all(splits[1:] > splits[:-1])
        # Looked at before any gather: a GPU's takes whatever index, and says nothing.
        with tf.control_dependencies([tf.debugging.assert_equal(fits, True, message=WRONG_SPLITS)]):
            splits = tf.identity(splits)
        starts_B, lengths_B = splits[:-1], splits[1:] - splits[:-1]
        self.length = round_up_to_bucket(tf.reduce_max(lengths_B))
        # Everything of T rows is gathered through this one index or computed from it: only so is
        # TensorFlow sure that their shapes agree, and joins product, bias and residual sum.
        self._row_T = tf.cumsum(tf.ones_like(inputs["input_ids"], tf.int32)) - 1
        self._is_owned_T = self._row_T < splits[-1]
        starts_text_T = tf.tensor_scatter_nd_add(
            tf.zeros_like(self._row_T), splits[1:-1, tf.newaxis], tf.ones_like(splits[1:-1])
        )
        self._text_T = tf.cumsum(starts_text_T)
        self._position_T = tf.where(
            self._is_owned_T, self._row_T - tf.gather(starts_B, self._text_T), 0
        )
        self._starts_B = starts_B
        position_L = tf.range(self.length)
        self._is_token_BL = position_L < lengths_B[:, tf.newaxis]
        self._row_BL = tf.where(self._is_token_BL, starts_B[:, tf.newaxis] + position_L, 0)
        self.key_bias_B11L = _key_bias(self._is_token_BL)

    def flatten(self, values_T):
        """[T], as it is."""
        return tf.gather(values_T, self._row_T)

    def positions(self, table_PH):
        """The position embedding of each row, [T, H]."""
        last = tf.reduce_max(self._position_T)
        fits = tf.debugging.assert_less(last, table_PH.shape[0], message=TOO_LONG)
        with tf.control_dependencies([fits]):
            position_T = tf.identity(self._position_T)
        return tf.gather(table_PH, position_T)

    def split_heads(self, vectors_TH, num_heads):
        """[T, H] -> [B, N, L, D]: each head's piece of a row is read where it lies."""
        head_N = tf.range(num_heads)
        piece_BNL = self._row_BL[:, tf.newaxis] * num_heads + head_N[:, tf.newaxis]
        head_TN = self._text_T[:, tf.newaxis] * num_heads + head_N
        grid_TN = head_TN * self.length + self._position_T[:, tf.newaxis]
        return _gather(
            tf.reshape(vectors_TH, [-1, vectors_TH.shape[-1] // num_heads]),
            piece_BNL,
            grid_TN,
            self._is_owned_T[:, tf.newaxis, tf.newaxis],
        )

    def merge_heads(self, context_BNLD):
        """[B, N, L, D] -> [T, H]."""
        hidden = context_BNLD.shape[1] * context_BNLD.shape[3]
        return _gather(
            tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [-1, hidden]),
            self._text_T * self.length + self._position_T,
            self._row_BL,
            self._is_token_BL[:, :, tf.newaxis],
        )

    def cls_vectors(self, hidden_TH):
        """The row of each text's [CLS], [B, H]."""
        is_first_T = self._is_owned_T & (self._position_T == 0)
        return _gather(hidden_TH, self._starts_B, self._text_T, is_first_T[:, tf.newaxis])

    def unflatten(self, hidden_TH):
        """[T, H], as it is."""
        return hidden_TH


def _key_bias(is_token_BL):
    return tf.where(is_token_BL, 0.0, MASKED_SCORE)[:, tf.newaxis, tf.newaxis, :]


def _gather(values, index, inverse, has_source):
    """gather(values, index), whose gradient is a gather too, through the index's inverse.

    The gradient of value j stands at inverse[j], where has_source[j] (of a shape that broadcasts);
    elsewhere it is 0. TensorFlow's own gradient of gather adds up row by row, three times as slow.
    """

    def gradient(upstream):
        gathered = tf.gather(tf.reshape(upstream, [-1, values.shape[-1]]), inverse)
        gathered = tf.where(has_source, gathered, tf.zeros([], gathered.dtype))
        return tf.reshape(gathered, tf.shape(values))

    return tf.custom_gradient(lambda values: (tf.gather(values, index), gradient))(values)
