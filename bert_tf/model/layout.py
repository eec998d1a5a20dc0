"""Packed and flat layout: how the encoder reads its inputs.

Packed inputs have static shapes, as XLA requires: rows of one length that hold one or several
sequences each. Padded inputs are packed ones with one sequence per row. Flat inputs are sequences
stored back to back, of any total length. bert_tf.text.encoder_inputs makes them.

`PackedLayout` and `FlatLayout` tell the encoder which of the flattened tokens `(T, H)` form a
sequence; they have the same methods and the attribute `key_bias`. In both, attention runs on a grid
of rows and everything else on flattened tokens.

Shape suffixes: B sequences, R rows, L tokens of a row, S tokens of the longest sequence, (L) of
each sequence (ragged), T flattened tokens, N heads, D head size, H hidden size (N * D), P
positions.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.bucketing import round_up_to_bucket
from bert_tf.model.custom_gradient import custom_gradient

# Added to the attention scores of padding keys; their float32 softmax is exactly 0.
MASKED_SCORE = -1e9
TOO_LONG = (
    "a sequence is longer than max_position_embeddings; truncate it with pack(..., max_seq_length)"
)
WRONG_SPLITS = (
    "row_splits: expected to start at 0, to increase strictly and to end within input_ids"
)

_PER_TOKEN = ("input_ids", "segment_ids", "input_mask", "sequence_ids", "position_ids")
_INPUTS = {*_PER_TOKEN, "row_splits", "token_indices"}


def to_dense_like(values: Any, inputs: Mapping[str, tf.Tensor]) -> Any:
    """Pad per-token values with 0 to the shape of the inputs.

    Args:
        values: Ragged `(B, (L))` or `(B, (L), C)`. Any other value is returned unchanged.
        inputs: Encoder inputs in either layout.

    Returns:
        `(B, S)` or `(B, S, C)`, as `by_sequence` returns outputs per token.
    """
    if not isinstance(values, tf.RaggedTensor):
        return values
    # If S is not static, values and inputs have the same longest sequence.
    of_length = inputs.get("token_indices", inputs["input_ids"])
    length = None if "row_splits" in inputs else of_length.shape[1]
    return values.to_tensor(0, shape=[None, length, *values.shape[2:]])


def by_sequence(values: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Arrange outputs per token by sequence.

    Args:
        values: `(R, L, C)`, or `(T, C)` in the flat layout.
        inputs: Encoder inputs in either layout.

    Returns:
        `(B, S, C)`, and is_token, bool `(B, S)`, false at padding, where values are undefined. S is
        the longest sequence in the flat layout, L in a padded batch.
    """
    if "row_splits" in inputs:
        splits = tf.cast(inputs["row_splits"], tf.int32)
        rows = tf.RaggedTensor.from_row_splits(values[: splits[-1]], splits, validate=False)
        return rows.to_tensor(), tf.sequence_mask(splits[1:] - splits[:-1])
    if "token_indices" not in inputs:
        return values, tf.cast(_input_mask(inputs), tf.bool)
    index_BS = tf.cast(inputs["token_indices"], tf.int32)
    layout = PackedLayout(inputs)
    slot_T = layout.sequence_T * tf.shape(index_BS)[1] + layout.position_T
    flat = tf.reshape(values, [-1, values.shape[-1]])
    is_owned_T1 = layout.is_owned_T[:, tf.newaxis]
    return _gather(flat, tf.maximum(index_BS, 0), slot_T, is_owned_T1), index_BS >= 0


def count_tokens(inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the number of tokens without padding, int32; 0 for inputs that are not tokens.

    The inputs may be stacked batches, dense or ragged.
    """
    if "row_splits" in inputs:
        last = tf.reduce_max(inputs["row_splits"], axis=-1)
        return tf.cast(tf.reduce_sum(last), tf.int32)
    if "sequence_ids" in inputs:
        return tf.reduce_sum(tf.cast(inputs["sequence_ids"] > 0, tf.int32))
    if "input_ids" not in inputs:
        return tf.constant(0)
    return tf.reduce_sum(tf.cast(_input_mask(inputs), tf.int32))


class PackedLayout:
    """Layout of rows of a common length L: T = R * L, in row-major order.

    Dimensions that are statically known stay static.

    Args:
        inputs: Dict of int `(R, L)`. Either `input_mask`, 1 for tokens and 0 for padding, with one
            sequence per row; or `sequence_ids`, `position_ids` and, `(B, S)`, `token_indices`, as
            of `to_packed`.

    Attributes:
        rows: R, an int if static, otherwise an int32 scalar.
        length: L, an int if static, otherwise an int32 scalar.
        key_bias: float32 `(R, 1, 1, L)`, or `(R, 1, L, L)` with several sequences per row, added
            to the attention scores.
        rows_are_sequences: Whether a row of the attention grid is one sequence.
    """

    def __init__(self, inputs: Mapping[str, tf.Tensor]) -> None:
        of_tokens = inputs["sequence_ids"] if "sequence_ids" in inputs else inputs["input_mask"]
        shape = tf.shape(of_tokens)
        self.rows = shape[0] if of_tokens.shape[0] is None else of_tokens.shape[0]
        self.length = shape[1] if of_tokens.shape[1] is None else of_tokens.shape[1]
        self._inputs = inputs
        self._has_several = "sequence_ids" in inputs
        self.rows_are_sequences = not self._has_several
        if self._has_several:
            # Padding attends to padding, which nothing reads.
            is_same_RLL = of_tokens[:, :, tf.newaxis] == of_tokens[:, tf.newaxis, :]
            self.key_bias = tf.where(is_same_RLL, 0.0, MASKED_SCORE)[:, tf.newaxis]
        else:
            self.key_bias = _key_bias(tf.cast(of_tokens, tf.bool))

    @property
    def is_owned_T(self) -> tf.Tensor:
        """Bool `(T,)`, true at tokens, with several sequences per row."""
        return tf.reshape(self._inputs["sequence_ids"], [-1]) > 0

    @property
    def sequence_T(self) -> tf.Tensor:
        """int32 `(T,)`, the sequence of each token, 0 at padding."""
        sequence_ids_RL = tf.cast(self._inputs["sequence_ids"], tf.int32)
        return tf.maximum(tf.reshape(sequence_ids_RL, [-1]) - 1, 0)

    @property
    def position_T(self) -> tf.Tensor:
        """int32 `(T,)`, the position of each token in its sequence."""
        return tf.reshape(tf.cast(self._inputs["position_ids"], tf.int32), [-1])

    def flatten(self, values_RL: tf.Tensor) -> tf.Tensor:
        """Flatten per-token values `(R, L)` to `(T,)`."""
        return tf.reshape(values_RL, [-1])

    def positions(self, table_PH: tf.Tensor) -> tf.Tensor:
        """Return the position embedding of each token.

        Args:
            table_PH: `(P, H)`, the position embeddings.

        Returns:
            `(T, H)`, in the dtype of the table.

        Raises:
            ValueError: The static length of padded inputs exceeds P.
        """
        if self._has_several:
            return tf.gather(table_PH, self.position_T)
        if isinstance(self.length, int) and self.length > table_PH.shape[0]:
            raise ValueError(f"{self.length} tokens, {table_PH.shape[0]} positions: {TOO_LONG}")
        hidden = table_PH.shape[1]
        return tf.reshape(
            tf.broadcast_to(table_PH[: self.length], [self.rows, self.length, hidden]),
            [-1, hidden],
        )

    def split_heads(self, vectors_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Split flattened vectors `(T, H)` into heads `(R, N, L, D)`."""
        head_size = vectors_TH.shape[-1] // num_heads
        split_RLND = tf.reshape(vectors_TH, [self.rows, self.length, num_heads, head_size])
        return tf.transpose(split_RLND, [0, 2, 1, 3])

    def merge_heads(self, context_RNLD: tf.Tensor) -> tf.Tensor:
        """Merge heads `(R, N, L, D)` into flattened vectors `(T, H)`."""
        return _merge_heads(context_RNLD)

    def merge_heads_gradient(self, upstream_TH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Return the gradient `(R, N, L, D)` of `merge_heads` for that of its output."""
        return self.split_heads(upstream_TH, num_heads)

    def cls_vectors(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Return the [CLS] vector of each sequence, `(B, H)`."""
        if not self._has_several:
            return self.unflatten(hidden_TH)[:, 0]
        cls_B = tf.maximum(tf.cast(self._inputs["token_indices"], tf.int32)[:, 0], 0)
        return _gather(hidden_TH, cls_B, self.sequence_T, self._is_cls_T1)

    def merge_cls_heads(self, context_RNLD: tf.Tensor) -> tf.Tensor:
        """Merge the heads of the [CLS] token of each sequence, `(B, H)`."""
        return self.cls_vectors(self.merge_heads(context_RNLD))

    def merge_cls_heads_gradient(self, upstream_BH: tf.Tensor, num_heads: int) -> tf.Tensor:
        """Return the gradient `(R, N, L, D)` of `merge_cls_heads` for that of its output."""
        upstream_TH = tf.gather(upstream_BH, self.sequence_T)
        upstream_TH = tf.where(self._is_cls_T1, upstream_TH, tf.zeros([], upstream_TH.dtype))
        return self.split_heads(upstream_TH, num_heads)

    @property
    def _is_cls_T1(self):
        return (self.is_owned_T & (self.position_T == 0))[:, tf.newaxis]

    def unflatten(self, hidden_TH: tf.Tensor) -> tf.Tensor:
        """Restore the layout of the inputs: `(T, H)` to `(R, L, H)`."""
        return tf.reshape(hidden_TH, [self.rows, self.length, hidden_TH.shape[-1]])


class FlatLayout:
    """Layout of sequences stored back to back, without padding outside of attention.

    Args:
        inputs: Dict with `input_ids` `(T,)` and `row_splits` `(B + 1,)`, both int. Sequence b is
            `row_splits[b]:row_splits[b + 1]` and has at least one token. Tokens after
            `row_splits[-1]` are padding: no sequence attends to them and their outputs are
            meaningless.

    Attributes:
        length: L, an int32 scalar: the longest sequence, rounded up to a bucket.
        key_bias: float32 `(B, 1, 1, L)`, added to the attention scores.
        rows_are_sequences: True, as a row of the attention grid is one sequence.
        row_T: int32 `(T,)`, the numbers 0 to T - 1.
        text_T: int32 `(T,)`, the sequence of each token.
        position_T: int32 `(T,)`, the position of each token in its sequence.
        starts_B: int32 `(B,)`, the index of each sequence's first token.
        row_BL: int32 `(B, L)`, the index of each token of the grid; 0 for padding.

    Raises:
        tf.errors.InvalidArgumentError: `row_splits` is malformed; raised when the graph runs.
    """

    rows_are_sequences = True

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
        self.key_bias = _key_bias(self._is_token_BL)

    def flatten(self, values_T: tf.Tensor) -> tf.Tensor:
        """Return per-token values `(T,)` unchanged; they are flat already."""
        return tf.gather(values_T, self.row_T)

    def positions(self, table_PH: tf.Tensor) -> tf.Tensor:
        """Return the position embedding of each token, as `PackedLayout.positions`.

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


Layout = PackedLayout | FlatLayout


def with_defaults(inputs: Mapping[str, tf.Tensor] | tf.Tensor) -> dict[str, tf.Tensor]:
    """Complete encoder inputs: without `segment_ids` all are 0, without `input_mask` all are 1.

    Inputs that are given add no operation to the graph.

    Args:
        inputs: Encoder inputs in either layout, or `input_ids` `(B, L)` alone.

    Returns:
        Dict of the inputs with `segment_ids` and, in a padded batch, `input_mask`.

    Raises:
        UserError: If `input_ids` are missing, or an input has another name, and would be ignored.
    """
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    unknown = sorted(inputs.keys() - _INPUTS)
    if unknown or "input_ids" not in inputs:
        raise UserError(
            f"{', '.join(unknown or inputs)}: expected as inputs of the encoder input_ids, and any "
            "of input_mask (1 at tokens), segment_ids and row_splits; rename or remove others"
        )
    if "segment_ids" not in inputs:
        inputs["segment_ids"] = tf.zeros_like(inputs["input_ids"])
    if not inputs.keys() & {"row_splits", "sequence_ids"}:
        inputs["input_mask"] = _input_mask(inputs)
    return inputs


def _input_mask(inputs):
    """Return the mask of a padded batch, by default 1 everywhere."""
    return inputs["input_mask"] if "input_mask" in inputs else tf.ones_like(inputs["input_ids"])


def infer_layout(inputs: Mapping[str, tf.Tensor]) -> Layout:
    """Return the layout of encoder inputs: flat with `row_splits`, else packed.

    Raises:
        UserError: If an input per token has other axes, or another shape than `input_ids`.
    """
    is_flat = "row_splits" in inputs
    rank, axes = (1, "(T,)") if is_flat else (2, "(B, L), or (T,) with row_splits")
    # Without sequences, positions are those of the tokens.
    names = _PER_TOKEN if "sequence_ids" in inputs else _PER_TOKEN[:-1]
    given = {name: inputs[name] for name in names if name in inputs}
    expected = None
    for name, values in given.items():
        if isinstance(values, tf.RaggedTensor):
            raise UserError(
                f"{name}: expected a dense tensor, received a ragged one; pass to_tensor() and an "
                "input_mask"
            )
        shape = tf.TensorShape(values.shape)
        if shape.rank not in (None, rank):
            raise UserError(f"{name}: expected the shape {axes}, received {shape}")
        expected = expected or shape
        if not shape.is_compatible_with(expected):
            raise UserError(
                f"{name}: expected the shape of input_ids, {expected}, received {shape}"
            )
    return FlatLayout(inputs) if is_flat else PackedLayout(inputs)


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
