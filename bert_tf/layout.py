"""Padded and flat layout: how the encoder's inputs are made and read.

`to_padded`, `to_flat` and `padded_to_flat` make them. `PaddedLayout` and `FlatLayout` tell the
encoder which of the flattened tokens `(T, H)` form a sequence. These two have the same methods and
the attribute `key_bias_B11L`. In both, attention runs on a `(B, L)` grid and everything else on
flattened tokens.

Shape suffixes: B sequences, L tokens of the longest sequence, possibly rounded up, (L) of each
sequence (ragged), T flattened tokens, N heads, D head size, H hidden size (N * D), P positions.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from bert_tf.bucketing import round_up_to_bucket
from bert_tf.custom_gradient import custom_gradient
from bert_tf.text.packing import Packed
from bert_tf.text.vocabulary import Vocabulary

# Added to the attention scores of padding keys; their float32 softmax is exactly 0.
MASKED_SCORE = -1e9
TOO_LONG = (
    "a sequence is longer than max_position_embeddings; truncate it with pack(..., max_seq_length)"
)
WRONG_SPLITS = (
    "row_splits: expected to start at 0, to increase strictly and to end within input_ids"
)


def to_padded(
    packed: Packed, vocabulary: Vocabulary, length: int | None = None
) -> dict[str, tf.Tensor]:
    """Convert packed sequences to the padded layout.

    Args:
        packed: Packed sequences.
        vocabulary: Provides the id of [PAD].
        length: L. Defaults to the length of the longest sequence.

    Returns:
        Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids".
    """
    shape = [None, length]
    return {
        "input_ids": packed.input_ids.to_tensor(vocabulary["[PAD]"], shape=shape),
        "input_mask": tf.ones_like(packed.input_ids).to_tensor(0, shape=shape),
        "segment_ids": packed.segment_ids.to_tensor(0, shape=shape),
    }


def to_flat(packed: Packed, vocabulary: Vocabulary, exact_tokens: int = 0) -> dict[str, tf.Tensor]:
    """Convert packed sequences to the flat layout.

    T is rounded up to a bucket size; tokens after row_splits[-1] are [PAD] and are ignored.

    Args:
        packed: Packed sequences.
        vocabulary: Provides the id of [PAD].
        exact_tokens: Up to this many tokens, T is not rounded up.

    Returns:
        Dict of int32: "input_ids" and "segment_ids" `(T,)`, "row_splits" `(B + 1,)`.
    """
    return _flat(
        packed.input_ids.flat_values,
        packed.segment_ids.flat_values,
        tf.cast(packed.input_ids.row_splits, tf.int32),
        vocabulary["[PAD]"],
        exact_tokens,
    )


def one_sequence(packed: Packed) -> dict[str, tf.Tensor]:
    """Convert a single sequence to the flat layout, without padding.

    The static shape of row_splits is `(2,)`, so that a graph can be made for one sequence.

    Args:
        packed: One packed sequence.

    Returns:
        Dict as of `to_flat`; T is the number of tokens.
    """
    input_ids = packed.input_ids.flat_values
    return {
        "input_ids": input_ids,
        "segment_ids": packed.segment_ids.flat_values,
        "row_splits": tf.stack([0, tf.size(input_ids)]),
    }


def padded_to_flat(inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Convert the padded layout to the flat one.

    Args:
        inputs: Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids".

    Returns:
        Dict as of `to_flat`, with 0 instead of [PAD] in the tail.
    """
    is_token_BL = inputs["input_mask"] > 0
    lengths_B = tf.reduce_sum(inputs["input_mask"], axis=1)
    return _flat(
        tf.boolean_mask(inputs["input_ids"], is_token_BL),
        tf.boolean_mask(inputs["segment_ids"], is_token_BL),
        tf.concat([[0], tf.cumsum(lengths_B)], axis=0),
        pad_id=0,
    )


def flat_to_padded(inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Convert the flat layout to the padded one.

    Args:
        inputs: Dict as of `to_flat`.

    Returns:
        Dict of int32 `(B, L)`: "input_ids", "input_mask" and "segment_ids". L is the longest
        sequence; padding is 0 instead of [PAD].
    """
    splits = inputs["row_splits"]
    tokens = {name: inputs[name][: splits[-1]] for name in ("input_ids", "segment_ids")}
    tokens["input_mask"] = tf.ones_like(tokens["input_ids"])
    return {
        name: tf.RaggedTensor.from_row_splits(values, splits, validate=False).to_tensor(0)
        for name, values in tokens.items()
    }


def _flat(input_ids, segment_ids, row_splits, pad_id, exact_tokens=0):
    """Return the flat layout of tokens without padding, completed to a bucket size."""
    count = tf.size(input_ids)
    rounded = tf.where(count <= exact_tokens, count, round_up_to_bucket(count))
    tail = [[0, rounded - count]]
    return {
        "input_ids": tf.pad(input_ids, tail, constant_values=pad_id),
        "segment_ids": tf.pad(segment_ids, tail),
        "row_splits": row_splits,
    }


def to_dense_like(values: Any, inputs: Mapping[str, tf.Tensor]) -> Any:
    """Pad per-token values with 0 to the shape of the inputs.

    Args:
        values: Ragged `(B, (L))` or `(B, (L), C)`. Any other value is returned unchanged.
        inputs: Encoder inputs in either layout.

    Returns:
        `(B, L)` or `(B, L, C)`; L is that of padded inputs, or the longest sequence of flat ones.
    """
    if not isinstance(values, tf.RaggedTensor):
        return values
    # If L is not static, values and inputs have the same longest sequence.
    length = None if "row_splits" in inputs else inputs["input_ids"].shape[1]
    return values.to_tensor(0, shape=[None, length, *values.shape[2:]])


def count_tokens(inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the number of tokens without padding, int32; 0 for inputs that are not tokens."""
    counts = inputs["row_splits"][-1] if "row_splits" in inputs else inputs.get("input_mask", 0)
    return tf.reduce_sum(tf.cast(counts, tf.int32))


class PaddedLayout:
    """Layout of sequences padded to a common length L: T = B * L, in row-major order.

    Dimensions of `input_mask` that are statically known stay static.

    Args:
        input_mask_BL: Int `(B, L)`; 1 marks a token, 0 padding.

    Attributes:
        batch: B, an int if static, otherwise an int32 scalar.
        length: L, an int if static, otherwise an int32 scalar.
        key_bias_B11L: float32 `(B, 1, 1, L)`, added to the attention scores.
    """

    def __init__(self, input_mask_BL: tf.Tensor) -> None:
        shape = tf.shape(input_mask_BL)
        self.batch = shape[0] if input_mask_BL.shape[0] is None else input_mask_BL.shape[0]
        self.length = shape[1] if input_mask_BL.shape[1] is None else input_mask_BL.shape[1]
        self.key_bias_B11L = _key_bias(tf.cast(input_mask_BL, tf.bool))

    def flatten(self, values_BL: tf.Tensor) -> tf.Tensor:
        """Flatten per-token values `(B, L)` to `(T,)`."""
        return tf.reshape(values_BL, [-1])

    def positions(self, table_PH: tf.Tensor) -> tf.Tensor:
        """Return the position embedding of each token.

        Args:
            table_PH: `(P, H)`, the position embeddings.

        Returns:
            `(T, H)`, in the dtype of the table.

        Raises:
            ValueError: The static length exceeds P.
        """
        if isinstance(self.length, int) and self.length > table_PH.shape[0]:
            raise ValueError(f"{self.length} tokens, {table_PH.shape[0]} positions: {TOO_LONG}")
        hidden = table_PH.shape[1]
        return tf.reshape(
            tf.broadcast_to(table_PH[: self.length], [self.batch, self.length, hidden]),
            [-1, hidden],
        )

    def split_heads(self, vectors_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Split flattened vectors `(T, H)` into heads `(B, N, L, D)`."""
        head_size = vectors_TH.shape[-1] // num_heads
        split_BLND = tf.reshape(vectors_TH, [self.batch, self.length, num_heads, head_size])
        return tf.transpose(split_BLND, [0, 2, 1, 3])

    def merge_heads(self, context_BNLD: tf.Tensor) -> tf.Tensor:
        """Merge heads `(B, N, L, D)` into flattened vectors `(T, H)`."""
        return _merge_heads(context_BNLD)

    def merge_heads_gradient(self, upstream_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Return the gradient `(B, N, L, D)` of `merge_heads` for that of its output."""
        return self.split_heads(upstream_TH, num_heads)

    def cls_vectors(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Return the [CLS] vector of each sequence, `(B, H)`."""
        return self.unflatten(hidden_TH)[:, 0]

    def unflatten(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Restore the layout of the inputs: `(T, H)` to `(B, L, H)`."""
        return tf.reshape(hidden_TH, [self.batch, self.length, hidden_TH.shape[-1]])


class FlatLayout:
    """Layout of sequences stored back to back, without padding outside of attention.

    Args:
        inputs: Dict with `input_ids` `(T,)` and `row_splits` `(B + 1,)`, both int. Sequence b is
            `row_splits[b]:row_splits[b + 1]` and has at least one token. Tokens after
            `row_splits[-1]` are padding: no sequence attends to them and their outputs are
            meaningless.

    Attributes:
        length: L, an int32 scalar: the longest sequence, rounded up to a bucket.
        key_bias_B11L: float32 `(B, 1, 1, L)`, added to the attention scores.
        row_T: int32 `(T,)`, the numbers 0 to T - 1.
        text_T: int32 `(T,)`, the sequence of each token.
        position_T: int32 `(T,)`, the position of each token in its sequence.
        starts_B: int32 `(B,)`, the index of each sequence's first token.
        row_BL: int32 `(B, L)`, the index of each token of the grid; 0 for padding.

    Raises:
        tf.errors.InvalidArgumentError: `row_splits` is malformed; raised when the graph runs.
    """

    def __init__(self, inputs: Mapping[str, tf.Tensor]) -> None:
        splits = tf.cast(inputs["row_splits"], tf.int32)
        fits = (splits[0] == 0) & (splits[-1] <= tf.size(inputs["input_ids"]))
        fits &= tf.reduce_all(splits[1:] > splits[:-1])
        # This check has to precede every gather: on a GPU an index out of range is not an error.
        with tf.control_dependencies([tf.debugging.assert_equal(fits, True, message=WRONG_SPLITS)]):
            splits = tf.identity(splits)
        starts_B, lengths_B = splits[:-1], splits[1:] - splits[:-1]
        self.length = round_up_to_bucket(tf.reduce_max(lengths_B))
        # Every tensor with T as its first dimension is gathered through this index or computed from
        # it. Only then can TensorFlow prove that their shapes agree, which it has to before it
        # fuses matrix product, bias and residual sum.
        self.row_T = tf.cumsum(tf.ones_like(inputs["input_ids"], tf.int32)) - 1
        self._is_owned_T = self.row_T < splits[-1]
        # Ones at the first token of every sequence but the first; their running sum is the index of
        # each token's sequence.
        starts_text_T = tf.tensor_scatter_nd_add(
            tf.zeros_like(self.row_T), splits[1:-1, tf.newaxis], tf.ones_like(splits[1:-1])
        )
        self.text_T = tf.cumsum(starts_text_T)
        # Padding gets position 0, a valid index whose result is ignored.
        self.position_T = tf.where(
            self._is_owned_T, self.row_T - tf.gather(starts_B, self.text_T), 0
        )
        self.starts_B = starts_B
        position_L = tf.range(self.length)
        self._is_token_BL = position_L < lengths_B[:, tf.newaxis]
        # Padding of the grid reads token 0 and is masked by the key bias.
        self.row_BL = tf.where(self._is_token_BL, starts_B[:, tf.newaxis] + position_L, 0)
        self.key_bias_B11L = _key_bias(self._is_token_BL)

    def flatten(self, values_T: tf.Tensor) -> tf.Tensor:
        """Return per-token values `(T,)` unchanged; they are flat already."""
        return tf.gather(values_T, self.row_T)

    def positions(self, table_PH: tf.Tensor) -> tf.Tensor:
        """Return the position embedding of each token, as `PaddedLayout.positions`.

        Raises:
            tf.errors.InvalidArgumentError: A sequence has more than P tokens.
        """
        last = tf.reduce_max(self.position_T)
        fits = tf.debugging.assert_less(last, table_PH.shape[0], message=TOO_LONG)
        with tf.control_dependencies([fits]):
            position_T = tf.identity(self.position_T)
        return tf.gather(table_PH, position_T)

    def split_heads(self, vectors_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Split flattened vectors `(T, H)` into heads `(B, N, L, D)`.

        Each head's slice of a token is gathered directly, without a transpose.
        """
        head_TN = self.text_T[:, tf.newaxis] * num_heads + tf.range(num_heads)
        grid_TN = head_TN * self.length + self.position_T[:, tf.newaxis]
        return _gather(
            tf.reshape(vectors_TH, [-1, vectors_TH.shape[-1] // num_heads]),
            self._head_BNL(num_heads),
            grid_TN,
            self._is_owned_T[:, tf.newaxis, tf.newaxis],
        )

    def merge_heads(self, context_BNLD: tf.Tensor) -> tf.Tensor:
        """Merge heads `(B, N, L, D)` into flattened vectors `(T, H)`."""
        return tf.gather(_merge_heads(context_BNLD), self.text_T * self.length + self.position_T)

    def merge_heads_gradient(self, upstream_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Return the gradient `(B, N, L, D)` of `merge_heads` for that of its output.

        TensorFlow's own is a scatter-add, which takes three times as long.
        """
        heads = tf.reshape(upstream_TH, [-1, upstream_TH.shape[-1] // num_heads])
        gradient_BNLD = tf.gather(heads, self._head_BNL(num_heads))
        is_token_B1L1 = self._is_token_BL[:, tf.newaxis, :, tf.newaxis]
        return tf.where(is_token_B1L1, gradient_BNLD, tf.zeros([], gradient_BNLD.dtype))

    def _head_BNL(self, num_heads):
        """Return the index of each head's slice of a token among all slices."""
        return self.row_BL[:, tf.newaxis] * num_heads + tf.range(num_heads)[:, tf.newaxis]

    def cls_vectors(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Return the [CLS] vector of each sequence, `(B, H)`."""
        is_first_T = self._is_owned_T & (self.position_T == 0)
        return _gather(hidden_TH, self.starts_B, self.text_T, is_first_T[:, tf.newaxis])

    def unflatten(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Return `(T, H)` unchanged, the layout of the inputs."""
        return hidden_TH


Layout = PaddedLayout | FlatLayout


def with_defaults(inputs: Mapping[str, tf.Tensor] | tf.Tensor) -> dict[str, tf.Tensor]:
    """Complete encoder inputs: without `segment_ids` all are 0, without `input_mask` all are 1.

    Inputs that are given add no operation to the graph.

    Args:
        inputs: Encoder inputs in either layout, or `input_ids` `(B, L)` alone.

    Returns:
        Dict of the inputs with `segment_ids` and, in the padded layout, `input_mask`.
    """
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    if "segment_ids" not in inputs:
        inputs["segment_ids"] = tf.zeros_like(inputs["input_ids"])
    if "row_splits" not in inputs and "input_mask" not in inputs:
        inputs["input_mask"] = tf.ones_like(inputs["input_ids"])
    return inputs


def infer_layout(inputs: Mapping[str, tf.Tensor]) -> Layout:
    """Return the layout of encoder inputs: flat with `row_splits`, else padded, by `input_mask`."""
    return FlatLayout(inputs) if "row_splits" in inputs else PaddedLayout(inputs["input_mask"])


def _key_bias(is_token_BL):
    """Return the additive attention mask, float32 `(B, 1, 1, L)`."""
    # LiteRT has no operation for two tf.newaxis if sizes are unknown.
    return tf.expand_dims(tf.expand_dims(tf.where(is_token_BL, 0.0, MASKED_SCORE), 1), 1)


def _merge_heads(context_BNLD):
    """Merge heads `(B, N, L, D)` into the vectors `(B * L, H)` of the grid."""
    hidden = context_BNLD.shape[1] * context_BNLD.shape[3]
    return tf.reshape(tf.transpose(context_BNLD, [0, 2, 1, 3]), [-1, hidden])


def _gather(values, index, inverse, has_source):
    """Gather along axis 0, with a gradient that is a gather too.

    TensorFlow's own gradient of `tf.gather` is a scatter-add, which takes three times as long.

    Args:
        values: `(M, K)`.
        index: Int; the entries to gather.
        inverse: Int `(M,)` or a reshape of it; the output position of each value.
        has_source: Bool, broadcastable; whether each value was gathered. If not, its gradient is 0.
    """

    def gradient(upstream):
        gathered = tf.gather(tf.reshape(upstream, [-1, values.shape[-1]]), inverse)
        gathered = tf.where(has_source, gathered, tf.zeros([], gathered.dtype))
        return tf.reshape(gathered, tf.shape(values))

    return custom_gradient(lambda values: (tf.gather(values, index), gradient))(values)
