"""Layers of the encoder, on flattened tokens `(T, H)`.

Only attention and position embeddings ask the layout where a sequence starts.

Shape suffixes: T flattened tokens, H hidden size, F feed-forward size, B sequences, N heads, L
tokens per sequence, D head size, V vocabulary size, P positions.

`seed` is an int64 pair, or `None` for inference without dropout. Each dropout adds its own
dropout_id, so no two of them draw the same mask. Embedding tables, LayerNorm and softmax are
float32 under every dtype policy; `compute_dtype` is the dtype of the matrix products. Policies of
training have all variables in float32. The policy "bfloat16" also stores the weights of products in
it, for serving.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model import fused_ops
from bert_tf.model.dense import activation_linear, dense, initializer, linear, linears
from bert_tf.model.layout import Layout, PackedLayout

# Below this number of elements (85 tokens of BERT-base) the LayerNorm formula is faster than
# oneDNN's kernel, which has a fixed cost per call.
FEW_NUMBERS = 2**16


class LayerNorm(keras.layers.Layer):
    """Layer normalization over the last axis, with float32 statistics (Ba et al. 2016)."""

    def __init__(self, epsilon: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        """Create gamma and beta, float32 `(H,)`."""
        options = {"shape": input_shape[-1:], "dtype": "float32", "autocast": False}
        self.gamma = self.add_weight(initializer="ones", name="gamma", **options)
        self.beta = self.add_weight(initializer="zeros", name="beta", **options)

    def call(self, x_TH: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        """Return LayerNorm(x).

        Args:
            x_TH: `(T, H)`.
            seed: Dropout seed, or `None` in inference. It only selects fused training operations.

        Returns:
            `(T, H)`, in the compute dtype.
        """
        if seed is None:
            return self._of_inference(x_TH)
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        return fused_ops.norm(x_TH, gamma, beta, self.epsilon)

    def dropout_add_norm(
        self,
        x_TH: tf.Tensor,
        residual_TH: tf.Tensor,
        rate: float,
        seed: tf.Tensor | None,
        dropout_id: int,
    ) -> tuple[tf.Tensor, fused_ops.Recompute | None]:
        """Return LayerNorm(dropout(x) + residual), and how the backward pass recomputes it.

        Args:
            x_TH: `(T, H)`.
            residual_TH: `(T, H)`.
            rate: Dropout rate.
            seed: Dropout seed, or `None` in inference.
            dropout_id: Identifies this dropout among those of a step.

        Returns:
            `(T, H)`, in the compute dtype, and a function for `linear`, `None` in inference.
        """
        if seed is None:
            return self._of_inference(x_TH + residual_TH), None
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        return fused_ops.dropout_add_norm(
            x_TH, residual_TH, gamma, beta, self.epsilon, rate, seed, dropout_id
        )

    def _of_inference(self, x_TH):
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        x_TH = tf.cast(x_TH, tf.float32)
        return tf.cast(_norm_of_inference(x_TH, gamma, beta, self.epsilon), self.compute_dtype)


def _norm_of_inference(
    x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input, by the form that is fastest."""
    arguments = (x_TH, gamma_H, beta_H, epsilon)
    # The fused kernel is for CPUs only. TensorFlow would place it on a GPU, where it fails, and XLA
    # computes the variance as E[x^2] - E[x]^2, which cancels if the mean is far from 0.
    if _may_be_on_gpu(x_TH) or _is_for_xla():
        return norm_by_moments(*arguments)
    normed_TH = tf.cond(
        tf.size(x_TH) < FEW_NUMBERS,
        lambda: norm_by_moments(*arguments),
        lambda: _norm_as_one_kernel(*arguments),
    )
    # tf.cond loses the static shape; the reshape tells TensorFlow that it is unchanged.
    return tf.reshape(normed_TH, tf.shape(x_TH))


def norm_by_moments(
    x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input, by its formula: mean and variance."""
    centered_TH = x_TH - tf.reduce_mean(x_TH, -1, keepdims=True)
    variance_T1 = tf.reduce_mean(tf.square(centered_TH), -1, keepdims=True)
    return centered_TH * tf.math.rsqrt(variance_T1 + epsilon) * gamma_H + beta_H


def _norm_as_one_kernel(x_TH, gamma_H, beta_H, epsilon):
    """Normalize by batch normalization, with each token as a channel of one image.

    TensorFlow with oneDNN fuses this form of LayerNorm into one kernel. It is several times as fast
    for many tokens and slower for few, because a call costs about 0.3 ms.
    """
    rows = tf.shape(x_TH)[0]
    normed_1TH1, *_ = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x_TH, [1, rows, x_TH.shape[-1], 1]),
        scale=tf.ones([rows]),
        offset=tf.zeros([rows]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=epsilon,
        data_format="NCHW",
        is_training=True,
    )
    return tf.reshape(normed_1TH1, tf.shape(x_TH)) * gamma_H + beta_H


def _may_be_on_gpu(x_TH):
    """Return True if a tensor is computed on a GPU: that of its graph, else that of the process."""
    if x_TH.device:
        return "GPU" in x_TH.device
    return bool(tf.config.get_visible_devices("GPU"))


def _is_for_xla():
    """Return True if XLA compiles the current graph, or parts of it (set_jit)."""
    return bool(tf.config.optimizer.get_jit()) or fused_ops.is_compiled()


class Embeddings(keras.layers.Layer):
    """Sum of token, segment and position embeddings, then LayerNorm and dropout.

    Follows Devlin et al. 2019, figure 2.
    """

    DROPOUT_ID = 0

    def __init__(self, config: BertConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.norm = LayerNorm(config.layer_norm_eps, dtype=self.dtype_policy, name="LayerNorm")

    def build(self, input_shape: Any = None) -> None:
        """Create the three embedding tables, float32 `(V, H)`, `(P, H)` and `(types, H)`."""

        def table(name, rows):
            # Without autocast, a step casts the vectors that it looks up, not the entire table.
            return self.add_weight(
                shape=(rows, self.config.hidden_size),
                name=name,
                dtype="float32",
                autocast=False,
                initializer=initializer(self.config),
            )

        self.word_embeddings_VH = table("word_embeddings", self.config.vocab_size)
        self.position_embeddings_PH = table(
            "position_embeddings", self.config.max_position_embeddings
        )
        self.token_type_embeddings = table("token_type_embeddings", self.config.type_vocab_size)
        self.norm.build((None, self.config.hidden_size))

    def call(
        self,
        input_ids_T: tf.Tensor,
        segment_ids_T: tf.Tensor,
        layout: Layout,
        seed: tf.Tensor | None = None,
        look_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Embed flattened tokens.

        Args:
            input_ids_T: int32 `(T,)`, token ids.
            segment_ids_T: int32 `(T,)`, segment (token type) ids.
            layout: Layout of the batch; supplies the position of each token.
            seed: Dropout seed, or `None` in inference.
            look_up: Maps token ids to their embeddings. Defaults to a lookup in the table of this
                layer.

        Returns:
            `(T, H)`, in the compute dtype.
        """
        # Inference needs no gradient, nor an operation for it in the graph.
        table_of = tf.convert_to_tensor if seed is None else fused_ops.densely_differentiated
        if look_up is None:
            look_up = functools.partial(tf.gather, table_of(self.word_embeddings_VH))
        types_H = tf.convert_to_tensor(self.token_type_embeddings)
        if seed is None:
            type_TH = tf.gather(types_H, segment_ids_T)
        else:
            # The gradient of a lookup adds T rows to two, one after the other on a GPU. An id that
            # the table does not have becomes NaN, 0 / 0, which stops training on every device.
            chosen_TS = tf.one_hot(segment_ids_T, types_H.shape[0])
            chosen_TS /= tf.reduce_sum(chosen_TS, axis=1, keepdims=True)
            type_TH = tf.matmul(chosen_TS, types_H)
        summed_TH = (
            look_up(input_ids_T) + type_TH + layout.positions(table_of(self.position_embeddings_PH))
        )
        return fused_ops.dropout(
            self.norm(summed_TH, seed=seed),
            self.config.hidden_dropout_prob,
            seed,
            self.DROPOUT_ID,
        )


class SelfAttention(keras.layers.Layer):
    """Multi-head self-attention with output projection (Vaswani et al. 2017, 3.2.2).

    Dropout, residual sum and LayerNorm of its output belong to `TransformerLayer`.
    """

    def __init__(self, config: BertConfig, dropout_id: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.dropout_id = dropout_id
        self.query, self.key, self.value, self.output_dense = (
            dense(config, config.hidden_size, name, self.dtype_policy)
            for name in ("query", "key", "value", "output")
        )

    def build(self, input_shape: Any = None) -> None:
        """Create query, key, value and output kernels `(H, H)` and biases `(H,)`."""
        for layer in (self.query, self.key, self.value, self.output_dense):
            layer.build((None, self.config.hidden_size))

    def call(
        self,
        hidden_TH: tf.Tensor,
        layout: Layout,
        seed: tf.Tensor | None = None,
        cls_only: bool = False,
        recompute_hidden: fused_ops.Recompute | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Attend within each sequence.

        Padding is masked as a key. The outputs of padding tokens themselves are meaningless.

        Args:
            hidden_TH: `(T, H)`.
            layout: Layout of the batch.
            seed: Dropout seed, or `None` in inference.
            cls_only: Uses only the [CLS] token of each sequence as a query.
            recompute_hidden: Computes `hidden_TH` again in the backward pass.

        Returns:
            Projected context, `(T, H)`, and the attention probabilities before dropout, float32
            `(B, N, L, L)`. With `cls_only`, `(B, H)` and `(B, N, 1, L)`; the latter for one
            sequence per row.
        """
        num_heads = self.config.num_attention_heads
        head_size = self.config.hidden_size // num_heads
        # In a row of several sequences, the queries of all tokens share one product with its keys.
        is_cls_query = cls_only and layout.rows_are_sequences
        if is_cls_query:
            k_TH, v_TH = linears(hidden_TH, (self.key, self.value), seed, recompute_hidden)
            q_BH = linear(layout.cls_vectors(hidden_TH), self.query, seed)
            q_BNLD = tf.reshape(q_BH, [-1, num_heads, 1, head_size])
        else:
            q_TH, k_TH, v_TH = linears(
                hidden_TH, (self.query, self.key, self.value), seed, recompute_hidden
            )
            q_BNLD = layout.split_heads(q_TH, num_heads)
        k_BNLD, v_BNLD = (layout.split_heads(of_TH, num_heads) for of_TH in (k_TH, v_TH))

        # Softmax runs in float32, because bfloat16 probabilities would not sum to 1.
        scores_BNLL = tf.matmul(q_BNLD, k_BNLD, transpose_b=True)
        # In training, only needed if attentions are returned; otherwise graph pruning removes it.
        probs_BNLL = tf.nn.softmax(
            tf.cast(scores_BNLL, tf.float32) * head_size**-0.5 + layout.key_bias
        )
        merge: Callable[[tf.Tensor], tf.Tensor] = layout.merge_heads
        merge_gradient = functools.partial(layout.merge_heads_gradient, num_heads=num_heads)
        if is_cls_query:
            merge = functools.partial(tf.reshape, shape=[-1, self.config.hidden_size])
            merge_gradient = functools.partial(tf.reshape, shape=[-1, num_heads, 1, head_size])
        elif cls_only and isinstance(layout, PackedLayout):
            merge = layout.merge_cls_heads
            merge_gradient = functools.partial(layout.merge_cls_heads_gradient, num_heads=num_heads)
        if seed is None:
            context_TH = merge(tf.matmul(tf.cast(probs_BNLL, v_BNLD.dtype), v_BNLD))
            return linear(context_TH, self.output_dense, seed), probs_BNLL
        return fused_ops.attention_linear(
            q_BNLD,
            k_BNLD,
            v_BNLD,
            tf.convert_to_tensor(self.output_dense.kernel),
            tf.convert_to_tensor(self.output_dense.bias),
            layout.key_bias,
            merge,
            merge_gradient,
            self.config.attention_probs_dropout_prob,
            seed,
            self.dropout_id,
        ), probs_BNLL


class TransformerLayer(keras.layers.Layer):
    """Post-norm Transformer layer: attention and feed-forward (Vaswani et al. 2017, 3.1).

    Dropout, residual sum and LayerNorm follow each of the two sublayers.

    Args:
        config: `BertConfig`.
        index: Index of the layer, from 0; determines its dropout_ids.
    """

    def __init__(self, config: BertConfig, index: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.dropout_id = 3 * index + 1  # Three per layer; the embeddings have id 0.
        self.attention = SelfAttention(
            config, self.dropout_id, dtype=self.dtype_policy, name="attention"
        )
        self.attention_norm = LayerNorm(
            config.layer_norm_eps, dtype=self.dtype_policy, name="attention_norm"
        )
        self.intermediate = dense(
            config, config.intermediate_size, "intermediate", self.dtype_policy
        )
        self.output_dense = dense(config, config.hidden_size, "output", self.dtype_policy)
        self.output_norm = LayerNorm(
            config.layer_norm_eps, dtype=self.dtype_policy, name="output_norm"
        )

    def build(self, input_shape: Any = None) -> None:
        """Create the weights of both sublayers."""
        hidden = (None, self.config.hidden_size)
        for layer in (self.attention, self.attention_norm, self.intermediate, self.output_norm):
            layer.build(hidden)
        self.output_dense.build((None, self.config.intermediate_size))

    def call(
        self,
        hidden_TH: tf.Tensor,
        layout: Layout,
        seed: tf.Tensor | None = None,
        cls_only: bool = False,
        recompute_hidden: fused_ops.Recompute | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, fused_ops.Recompute | None]:
        """Apply the layer.

        Args:
            hidden_TH: `(T, H)`.
            layout: Layout of the batch.
            seed: Dropout seed, or `None` in inference.
            cls_only: Computes only the [CLS] token of each sequence.
            recompute_hidden: Computes `hidden_TH` again in the backward pass, which does not keep
                it then. Defaults to keeping it.

        Returns:
            Hidden states, `(T, H)`, the attention probabilities before dropout, float32
            `(B, N, L, L)`, and a function that computes the hidden states again, for the next
            layer; `None` in inference. With `cls_only`, `(B, H)` and `(B, N, 1, L)`.
        """
        rate = self.config.hidden_dropout_prob
        attended_TH, probs_BNLL = self.attention(
            hidden_TH,
            layout=layout,
            seed=seed,
            cls_only=cls_only,
            recompute_hidden=recompute_hidden,
        )
        # The residual connection has to match the attention output.
        if cls_only:
            hidden_TH = layout.cls_vectors(hidden_TH)
        hidden_TH, recompute = self.attention_norm.dropout_add_norm(
            attended_TH, hidden_TH, rate, seed, self.dropout_id + 1
        )
        inner_TF = linear(hidden_TH, self.intermediate, seed, recompute)
        output_TH = activation_linear(inner_TF, self.output_dense, self.config, seed)
        hidden_TH, recompute = self.output_norm.dropout_add_norm(
            output_TH, hidden_TH, rate, seed, self.dropout_id + 2
        )
        return hidden_TH, probs_BNLL, recompute
