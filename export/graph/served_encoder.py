"""Encoder of the served graph: the trained weights, in operations that suit an x86-64 CPU.

The trained Keras layers compute the same, but they serve training as well. Here there is one
product for queries, keys and values, heads are gathered, and weights of products are packed. In
float32 a single short text, the most frequent request, has a graph of its own, since packed
products are slow for many tokens.

oneDNN computes products fastest from a packed copy of the weights. TensorFlow packs weights once
only if they are constants of the graph, and a server copies constants about twenty times while it
loads them. `_MklNativeFusedMatMul`, into which TensorFlow rewrites products on x86-64, packs
variables as well if it is told that they do not change, and so does `_QuantizedMatMul`. Both are
internal operations of TensorFlow, which have no Python function (tests run them in TensorFlow 2.12,
2.20 and 2.21; the one for int8 is not in 2.12). In the graph itself they do not depend on what
TensorFlow can prove. Where they are missing, the trained encoder is served as it is; see
`export.graph.saved_model`.

Shape suffixes: B sequences, L tokens per sequence, T flattened tokens, H hidden size or inputs of a
product, F outputs of a product, N heads, D head size.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

from bert_tf.model.bucketing import SHORT_TOKENS
from bert_tf.model.encoder import Encoder
from bert_tf.model.layers import FEW_NUMBERS, norm_by_moments
from bert_tf.model.layout import MASKED_SCORE, FlatLayout, with_defaults

# TensorFlow keeps the packed weights of the first call. In float32 oneDNN wants another form for
# fewer than 8 rows: if a text of 5 tokens came first, all longer ones would pack weights in each
# call, which doubles their time. So there are at least 8 rows.
MIN_ROWS = 8
# If the rows of a weight matrix are a multiple of 4,096 bytes apart, they all map to the same few
# lines of the L1 cache. On AVX2, oneDNN then takes up to twice as long for products of up to 300
# rows; with AVX-512 it makes no difference. One additional cache line (64 bytes) per row avoids the
# conflicts.
SLOW_WIDTH, FILLER = 1024, 16  # In float32 columns: 4,096 and 64 bytes.
FUSED_PRODUCT = "_MklNativeFusedMatMul"
INT8_PRODUCT = "_QuantizedMatMul"
# Largest integer of a weight. Without VNNI oneDNN adds two products of inputs 0 to 255 and weights
# in 16 bits: up to 2 * 255 * 64 fit, those of larger weights are cut off without an error.
MAX_WEIGHT = 64
# The label under which kernels are registered that TensorFlow uses in place of its own.
ONEDNN_KERNEL = "MklNameChangeOp"


def has_packed_products(precision: str) -> bool:
    """Whether this TensorFlow has packed products of a precision for this CPU."""
    name = INT8_PRODUCT if precision == "int8" else FUSED_PRODUCT
    registered = kernels.get_registered_kernels_for_op(name).kernel
    has_kernel = any(kernel.device_type == "CPU" for kernel in registered)
    return has_kernel and (precision != "bfloat16" or has_bfloat16())


class ServedEncoder:
    """Encoder for inference on flat inputs, with the call arguments of `Encoder`.

    Args:
        encoder: The trained encoder, whose variables are used.
        precision: "float32"; "bfloat16" for matrix products in bfloat16; or "int8" for products of
            8-bit integers, with a scale per column of the weights and per call of the inputs. All
            require `has_packed_products`.

    Attributes:
        short_tokens: Up to this many tokens, a single sequence should be passed as `one_sequence`,
            whose static shape chooses another form of the graph. 0 if there is no such form.
    """

    def __init__(self, encoder: Encoder, precision: str) -> None:
        self.config, self.embeddings = encoder.config, encoder.embeddings
        self.precision = precision
        self.short_tokens = SHORT_TOKENS if precision == "float32" else 0
        self.dtype = tf.bfloat16 if precision == "bfloat16" else tf.float32
        self._layers = [_layer_weights(layer, precision) for layer in encoder.transformer]
        # The pooler takes 1% of the time, and all classifiers depend on it.
        self._pooler = dense_weights((encoder.pooler,), self.dtype)

    def dropout_seed(self, training: bool, seed: tf.Tensor | None = None) -> None:
        """Return `None`: there is no dropout."""

    def __call__(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: None = None,
        output_hidden_states: bool = False,
        pooled_only: bool = False,
        look_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> dict[str, tf.Tensor | list[tf.Tensor]]:
        """Run the encoder; see `Encoder`. Outputs are float32, without attention probabilities."""
        inputs = with_defaults(inputs)
        options = {
            "output_hidden_states": output_hidden_states,
            "pooled_only": pooled_only,
            "look_up": look_up,
        }
        if self.short_tokens and inputs["row_splits"].shape == [2]:
            return self._short_text(inputs, options)
        return self._encoded(inputs, FlatLayout(inputs), is_short=False, **options)

    def _short_text(self, inputs, options):
        """Encode the tokens of one text, without padding beyond MIN_ROWS."""
        count = tf.size(inputs["input_ids"])
        rows = tf.maximum(count, MIN_ROWS)
        tokens = {
            name: tf.pad(inputs[name], [[0, rows - count]]) for name in ("input_ids", "segment_ids")
        }
        outputs = self._encoded(tokens, _OneTextLayout(count, rows), is_short=True, **options)
        return {
            name: output
            if name == "pooled"
            else tf.nest.map_structure(lambda hidden_TH: hidden_TH[:count], output)
            for name, output in outputs.items()
        }

    def _encoded(self, inputs, layout, is_short, output_hidden_states, pooled_only, look_up):
        # In bfloat16 and int8 the packed form suits any number of rows.
        is_packed = is_short or self.precision != "float32"
        input_ids = layout.flatten(inputs["input_ids"])
        # For the form of all LayerNorms. Beside a branch for a short text, other requests with few
        # tokens are rare: a condition in each LayerNorm would save them 1 to 2% of their time, but
        # the first answer would take 0.5 s longer.
        is_few = is_short or (
            not self.short_tokens and tf.size(input_ids) * self.config.hidden_size < FEW_NUMBERS
        )
        branch = _Branch(layout, is_few, is_packed, self.config, self.dtype)
        if self.dtype == tf.bfloat16:
            input_ids = checked_for_bfloat16(input_ids)
        embedded_TH = self.embeddings(
            input_ids,
            layout.flatten(inputs["segment_ids"]),
            layout=layout,
            look_up=look_up,
        )
        states = [tf.cast(embedded_TH, self.dtype)]
        # Traced once for all layers, whose weights are arguments. TensorFlow inlines the calls.
        transformer_layer = tf.function(branch.transformer_layer, autograph=False)
        # The last layer may be another trace. TensorFlow would warn of too many in a small model.
        transformer_layer._omit_frequent_tracing_warning = True
        for layer in self._layers:
            # The pooler reads [CLS] only, so the last layer need not compute other tokens.
            cls_only = pooled_only and layer is self._layers[-1]
            states.append(transformer_layer(states[-1], layer, cls_only))
        first_BH = states[-1] if pooled_only else tf.gather(states[-1], layout.starts_B)
        outputs = {"pooled": branch.product(first_BH, self._pooler, activation="Tanh")}
        if not pooled_only:
            outputs["sequence"] = states[-1]
        if output_hidden_states:
            outputs["hidden_states"] = states
        # Heads compute in float32.
        return tf.nest.map_structure(lambda values: tf.cast(values, tf.float32), outputs)


class _OneTextLayout:
    """Layout of a single sequence, with those attributes of `FlatLayout` that are read here.

    Args:
        count: Number of tokens.
        rows: Number of rows; those after the tokens are padding.
    """

    def __init__(self, count, rows):
        self.length, self.row_T = rows, tf.range(rows)
        self.text_T, self.starts_B = tf.zeros_like(self.row_T), tf.zeros([1], tf.int32)
        self.position_T, self.row_BL = self.row_T, self.row_T[tf.newaxis]
        key_bias_L = tf.where(self.row_T < count, 0.0, MASKED_SCORE)
        self.key_bias = key_bias_L[tf.newaxis, tf.newaxis, tf.newaxis]

    def flatten(self, values_T):
        return values_T

    def positions(self, table_PH):
        return table_PH[: self.length]


class DenseWeights(NamedTuple):
    """Weights of dense layers side by side, to be passed to a tf.function.

    Biases are constants of the graph, since each variable costs several operations in each loop and
    condition that it enters.

    Attributes:
        kernel: Variable `(H, F)`, in the dtype of the products.
        bias: `(F,)`, in the dtype of the result.
        range: float32 `(F,)`, the weight per column that 127 stands for; `None` if not in int8.
    """

    kernel: tf.Variable
    bias: np.ndarray
    range: np.ndarray | None = None


def dense_weights(
    layers: Sequence[keras.layers.Dense], dtype: tf.DType, rows: int = 0, columns: int = 0
) -> DenseWeights:
    """Return the weights of Keras layers with the same input.

    Args:
        layers: The layers.
        dtype: dtype of the kernel; tf.qint8 for integers up to MAX_WEIGHT, scaled per column.
        rows: Number of rows of zeros below the kernel.
        columns: Number of columns of zeros to the right of kernel and bias.
    """
    kernel, bias = (
        np.concatenate([np.asarray(values) for values in of_layers], axis=-1)
        for of_layers in zip(*((layer.kernel, layer.bias) for layer in layers), strict=True)
    )
    kernel, bias = np.pad(kernel, [(0, rows), (0, columns)]), np.pad(bias, (0, columns))
    if dtype != tf.qint8:
        kernel = tf.Variable(tf.cast(kernel, dtype), trainable=False)
        return DenseWeights(kernel, bias.astype(dtype.as_numpy_dtype))
    largest = np.maximum(np.abs(kernel).max(axis=0), np.finfo(np.float32).tiny)
    range_F = largest * (127 / MAX_WEIGHT)
    integers = np.round(kernel / range_F * 127).astype(np.int8)
    return DenseWeights(tf.Variable(tf.bitcast(integers, dtype), trainable=False), bias, range_F)


class _NormWeights(NamedTuple):
    """Constants of a LayerNorm, float32 `(H,)`."""

    gamma: np.ndarray
    beta: np.ndarray
    epsilon: float


class _LayerWeights(NamedTuple):
    """Weights of a Transformer layer, with one product for queries, keys and values."""

    projections: DenseWeights
    attention_output: DenseWeights
    intermediate: DenseWeights
    output: DenseWeights
    attention_norm: _NormWeights
    output_norm: _NormWeights


def _layer_weights(layer, precision):
    """Return the weights of a layer, with `FILLER` zeros in the feed-forward width if it is slow.

    The outputs do not change: the additional activations are gelu(0) = 0, and their rows of the
    second matrix are 0 as well.
    """
    attention, width = layer.attention, layer.intermediate.units
    filler = FILLER if precision == "float32" and width % SLOW_WIDTH == 0 else 0
    dtype = {"float32": tf.float32, "bfloat16": tf.bfloat16, "int8": tf.qint8}[precision]
    norms = [
        _NormWeights(np.asarray(norm.gamma), np.asarray(norm.beta), norm.epsilon)
        for norm in (layer.attention_norm, layer.output_norm)
    ]
    return _LayerWeights(
        dense_weights((attention.query, attention.key, attention.value), dtype),
        dense_weights((attention.output_dense,), dtype),
        dense_weights((layer.intermediate,), dtype, columns=filler),
        dense_weights((layer.output_dense,), dtype, rows=filler),
        *norms,
    )


class _Branch:
    """The operations of one branch of the graph.

    Heads are gathered instead of transposed: a transposition takes ten times as long for few rows.

    Args:
        layout: Layout of the tokens.
        is_few: Whether there are few tokens: a bool, or a tensor if that depends on the request.
        is_packed: Whether products have packed weights.
        config: Configuration of the encoder.
        dtype: dtype of the products.
    """

    def __init__(self, layout, is_few, is_packed, config, dtype):
        self.layout, self.is_few = layout, is_few
        self.product = functools.partial(product, is_packed=is_packed)
        self.config, self.dtype = config, dtype
        self.gelu = "GeluApproximate" if config.hidden_act == "gelu_new" else "GeluExact"
        num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // num_heads
        # Each token has 3 * N vectors (D,): those of queries, keys and values.
        vector_3N = tf.reshape(tf.range(3 * num_heads), [3, 1, num_heads, 1])
        self.vectors_3BNL = layout.row_BL[:, tf.newaxis] * (3 * num_heads) + vector_3N
        grid_TN = layout.text_T[:, tf.newaxis] * num_heads + tf.range(num_heads)
        self.grid_TN = grid_TN * layout.length + layout.position_T[:, tf.newaxis]

    def transformer_layer(self, hidden_TH, layer, cls_only):
        """Apply a layer; with `cls_only` return the [CLS] tokens only, `(B, H)`."""
        projected_T3H = self.product(hidden_TH, layer.projections)
        if cls_only:
            hidden_TH = tf.gather(hidden_TH, self.layout.starts_B)
        context_TH = self.context(projected_T3H, cls_only)
        attended_TH = self.product(context_TH, layer.attention_output, residual=hidden_TH)
        hidden_TH = self.normed(attended_TH, layer.attention_norm)
        inner_TF = self.product(hidden_TH, layer.intermediate, activation=self.gelu)
        output_TH = self.product(inner_TF, layer.output, residual=hidden_TH)
        return self.normed(output_TH, layer.output_norm)

    def context(self, projected_T3H, cls_only):
        """Return the sums of values weighted by attention, `(T, H)`, or `(B, H)`."""
        vectors = tf.reshape(projected_T3H, [-1, self.head_size])
        if cls_only:
            # [CLS] is the first token of each sequence.
            q_BNLD = tf.gather(vectors, self.vectors_3BNL[0, :, :, :1])
            k_BNLD, v_BNLD = tf.unstack(tf.gather(vectors, self.vectors_3BNL[1:]))
        else:
            # The parts of one gather share its memory.
            q_BNLD, k_BNLD, v_BNLD = tf.unstack(tf.gather(vectors, self.vectors_3BNL))
        context_BNLD = tf.matmul(self.attention_probs(q_BNLD, k_BNLD), v_BNLD)
        if not cls_only:
            vectors = tf.reshape(context_BNLD, [-1, self.head_size])
            context_BNLD = tf.gather(vectors, self.grid_TN)
        return tf.reshape(context_BNLD, [-1, self.config.hidden_size])

    def attention_probs(self, q_BNLD, k_BNLD):
        """Return the attention probabilities, `(B, N, L, L)`, in the dtype of the products."""
        scores_BNLL = tf.matmul(q_BNLD, k_BNLD, transpose_b=True)
        bias_B11L = tf.cast(self.layout.key_bias, scores_BNLL.dtype)
        return softmax(scores_BNLL * self.head_size**-0.5 + bias_B11L)

    def normed(self, x_TH, norm):
        """Apply a LayerNorm."""
        x_TH = tf.cast(x_TH, tf.float32)
        if isinstance(self.is_few, bool):
            normed_TH = (norm_by_moments if self.is_few else layer_norm)(x_TH, *norm)
        else:
            normed_TH = tf.cond(
                self.is_few, lambda: norm_by_moments(x_TH, *norm), lambda: layer_norm(x_TH, *norm)
            )
        return tf.cast(normed_TH, self.dtype)


def product(
    x_TH: tf.Tensor,
    dense: DenseWeights,
    is_packed: bool,
    activation: str | None = None,
    residual: tf.Tensor | None = None,
) -> tf.Tensor:
    """Multiply with a kernel, add the bias and a residual, and apply an activation.

    Args:
        x_TH: `(T, H)`, in the dtype of the result.
        dense: The weights.
        is_packed: Whether TensorFlow packs the weights; those of 8-bit integers always are.
        activation: "GeluExact", "GeluApproximate" or "Tanh".
        residual: `(T, F)`.

    Returns:
        `(T, F)`.
    """
    bias = tf.convert_to_tensor(dense.bias)
    if dense.kernel.dtype == tf.qint8:
        return _int8_product(x_TH, dense, bias, activation, residual)
    addends = [bias] if residual is None else [bias, residual]
    return operation(
        FUSED_PRODUCT,
        [x_TH, tf.convert_to_tensor(dense.kernel), *addends],
        x_TH.dtype,
        T=x_TH.dtype,
        num_args=len(addends),
        fused_ops=_fused(activation, residual),
        is_filter_const=is_packed,
        _kernel=ONEDNN_KERNEL,
    )


def _int8_product(x_TH, dense, bias, activation, residual):
    """Return `product` with x rounded to integers, 127 of which are its largest number."""
    # At least 0, since the maximum of no rows is -inf, which is no range.
    largest = tf.maximum(tf.reduce_max(tf.abs(x_TH)), 0.0)
    rounded_TH, low, high = tf.raw_ops.QuantizeV2(
        input=x_TH,
        min_range=-largest,
        max_range=largest,
        T=tf.qint8,
        mode="SCALED",
        round_mode="HALF_TO_EVEN",
        narrow_range=True,
    )
    tensors = [rounded_TH, tf.convert_to_tensor(dense.kernel), bias]
    if residual is not None:
        tensors.append(residual)
    ranges = [low, high, -tf.convert_to_tensor(dense.range), tf.convert_to_tensor(dense.range)]
    return operation(
        INT8_PRODUCT,
        [*tensors, *ranges],
        tf.float32,
        Tdevice_inputs=[tensor.dtype for tensor in tensors],
        Thost_inputs=[tensor.dtype for tensor in ranges],
        Tdevice_outputs=[tf.float32],
        Thost_outputs=[],
        T1=tf.qint8,
        T2=tf.qint8,
        Tbias=tf.float32,
        U=tf.float32,
        Tout=tf.float32,
        fused_ops=[*_fused(activation, residual), "Dequantize"],
        input_quant_mode="SCALED",
        output_quant_mode="SCALED",
        is_weight_const=True,
        is_bias_const=True,
    )


def _fused(activation, residual):
    added = [] if residual is None else ["Add"]
    return ["BiasAdd", *([activation] if activation else []), *added]


def softmax(scores: tf.Tensor) -> tf.Tensor:
    """Return the softmax over the last axis, computed in float32, in the dtype of the scores."""
    return operation("_MklSoftmax", [scores], scores.dtype, T=scores.dtype, _kernel=ONEDNN_KERNEL)


def layer_norm(x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input, also where oneDNN is off by default."""
    tensors = [x_TH, tf.convert_to_tensor(gamma_H), tf.convert_to_tensor(beta_H)]
    return operation("_MklLayerNorm", tensors, tf.float32, T=tf.float32, epsilon=epsilon)


def checked_for_bfloat16(values: tf.Tensor) -> tf.Tensor:
    """Return the values, or fail when the graph runs on a processor without bfloat16.

    oneDNN has it with AVX-512. Without, a product in bfloat16 would end the process: TensorFlow
    does not catch its exception, but that of softmax.
    """
    with tf.name_scope("bfloat16_needs_AVX512_or_an_export_with_portable"):
        check = softmax(tf.zeros([1, 1], tf.bfloat16))
    # Always 1, but TensorFlow does not know that. It would remove a control dependency.
    return values * tf.cast(check[0, 0] > 0, values.dtype)


@functools.cache
def has_bfloat16() -> bool:
    """Whether this processor can run internal operations in bfloat16."""
    function = tf.function(lambda: checked_for_bfloat16(tf.constant(1)), autograph=False)
    try:
        with tf.device("CPU:0"):
            function()
    except tf.errors.OpError:
        return False
    return True


def operation(
    name: str, tensors: Sequence[tf.Tensor], dtype: tf.DType, **attributes: Any
) -> tf.Tensor:
    """Add an operation with one output of a dtype to the graph.

    Attributes are bools, ints, floats, strings, dtypes, or lists of strings or dtypes.
    """
    graph = tf.compat.v1.get_default_graph()
    values = {key: _attribute(value) for key, value in attributes.items()}
    return graph.create_op(name, tensors, [dtype], name="internal", attrs=values).outputs[0]


def _attribute(value):
    """Return the AttrValue of a value."""
    attribute = tf.compat.v1.AttrValue
    if isinstance(value, list):
        strings = [text.encode() for text in value if isinstance(text, str)]
        dtypes = [dtype.as_datatype_enum for dtype in value if isinstance(dtype, tf.DType)]
        return attribute(list=attribute.ListValue(s=strings, type=dtypes))
    if isinstance(value, tf.DType):
        return attribute(type=value.as_datatype_enum)
    if isinstance(value, str):
        return attribute(s=value.encode())
    if isinstance(value, float):
        return attribute(f=value)
    return attribute(b=value) if isinstance(value, bool) else attribute(i=value)
