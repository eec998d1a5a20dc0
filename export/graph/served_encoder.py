"""Encoder of the served graph: the trained layers, with matrix products that suit a CPU.

The trained Keras layers compute the same, but they serve training as well. Here the weights of
matrix products are packed. In float32 a single short text, the most frequent request, has a graph
of its own, since packed products are slow for many tokens.

Shape suffixes: B sequences, L tokens per sequence, T flattened tokens, H hidden size, F outputs of
a product, N heads, D head size.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.model.bucketing import SHORT_TOKENS
from bert_tf.model.encoder import Encoder
from bert_tf.model.inference_norm import FEW_NUMBERS, norm_by_moments, norm_of_inference
from bert_tf.model.layout import MASKED_SCORE, FlatLayout, with_defaults
from export.graph.internal_operations import checked_for_bfloat16, layer_norm, softmax
from export.graph.served_products import DenseWeights, Form, dense_weights, product

# TensorFlow keeps the packed weights of the first call. In float32 oneDNN wants another form for
# fewer than 8 rows: if a text of 5 tokens came first, all longer ones would pack weights in each
# call, which doubles their time. So there are at least 8 rows.
MIN_ROWS = 8
# If the rows of a weight matrix are a multiple of 4,096 bytes apart, they all map to the same few
# lines of the L1 cache. On AVX2, oneDNN then takes up to twice as long for products of up to 300
# rows (benchmarks/few_rows.py). One additional cache line (64 bytes) per row avoids the conflicts.
SLOW_WIDTH, FILLER = 1024, 16  # In float32 columns: 4,096 and 64 bytes.


class ServedEncoder:
    """Encoder for inference on flat inputs, with the call arguments of `Encoder`.

    Args:
        encoder: The trained encoder, whose variables are used.
        precision: "float32"; "bfloat16" for matrix products in bfloat16; or "int8" for products of
            8-bit integers, with a scale per column of the weights and per call of the inputs.
        is_portable: Uses standard operations only, which int8 cannot. Otherwise internal ones of
            TensorFlow for x86-64; see `has_packed_products`.

    Attributes:
        short_tokens: Up to this many tokens, a single sequence should be passed as `one_sequence`,
            whose static shape chooses another form of the graph. 0 if there is no such form.
    """

    def __init__(self, encoder: Encoder, precision: str, is_portable: bool) -> None:
        self.config, self.embeddings = encoder.config, encoder.embeddings
        self.precision, self.is_portable = precision, is_portable
        has_short_branch = precision == "float32" and not is_portable
        self.short_tokens = SHORT_TOKENS if has_short_branch else 0
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
        form = Form.STANDARD if self.is_portable else Form.PACKED if is_packed else Form.PLAIN
        input_ids = layout.flatten(inputs["input_ids"])
        # For the form of all LayerNorms. Beside a branch for a short text, other requests with few
        # tokens are rare: a condition in each LayerNorm would save them 1 to 2% of their time, but
        # the first answer would take 0.5 s longer.
        is_few = is_short or (
            not self.short_tokens and tf.size(input_ids) * self.config.hidden_size < FEW_NUMBERS
        )
        branch = _Branch(layout, is_few, form, self.config, self.dtype)
        if self.dtype == tf.bfloat16 and not self.is_portable:
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
        outputs = {"pooled": branch.product(first_BH, self._pooler, "Tanh")}
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
        form: Form of the products. Attention and LayerNorm have standard operations with STANDARD,
            otherwise internal ones.
        config: Configuration of the encoder.
        dtype: dtype of the products.
    """

    def __init__(self, layout, is_few, form, config, dtype):
        self.layout, self.is_few, self.form = layout, is_few, form
        self.is_portable = form is Form.STANDARD
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
        inner_TF = self.product(hidden_TH, layer.intermediate, self.gelu)
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
        if self.is_portable and not cls_only:
            # TensorFlow has to prove that there are as many rows as in the residual to fuse both.
            return self.layout.merge_heads(context_BNLD)
        if not cls_only:
            vectors = tf.reshape(context_BNLD, [-1, self.head_size])
            context_BNLD = tf.gather(vectors, self.grid_TN)
        return tf.reshape(context_BNLD, [-1, self.config.hidden_size])

    def attention_probs(self, q_BNLD, k_BNLD):
        """Return the attention probabilities, `(B, N, L, L)`, in the dtype of the products."""
        scores_BNLL = tf.matmul(q_BNLD, k_BNLD, transpose_b=True)
        if self.is_portable:
            # TensorFlow's own softmax would add up in bfloat16.
            scores_BNLL = tf.cast(scores_BNLL, tf.float32)
        bias_B11L = tf.cast(self.layout.key_bias, scores_BNLL.dtype)
        scores_BNLL = scores_BNLL * self.head_size**-0.5 + bias_B11L
        if self.is_portable:
            return tf.cast(tf.nn.softmax(scores_BNLL), self.dtype)
        return softmax(scores_BNLL)

    def product(self, x_TH, dense, activation=None, residual=None):
        """Apply a dense layer, see `served_products.product`."""
        return product(x_TH, dense, self.form, activation, residual)

    def normed(self, x_TH, norm):
        """Apply a LayerNorm."""
        x_TH = tf.cast(x_TH, tf.float32)
        arguments = (x_TH, norm.gamma, norm.beta, norm.epsilon)
        if self.is_portable:
            normed_TH = norm_of_inference(*arguments)
        elif isinstance(self.is_few, bool):
            normed_TH = (norm_by_moments if self.is_few else layer_norm)(*arguments)
        else:
            normed_TH = tf.cond(
                self.is_few, lambda: norm_by_moments(*arguments), lambda: layer_norm(*arguments)
            )
        return tf.cast(normed_TH, self.dtype)
