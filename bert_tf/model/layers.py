"""The layers of the encoder. They take rows, [T, H], and a layout that knows who belongs together.

Legend: T rows, H hidden size, F feed-forward size, B texts, N heads, L tokens of a text, D head
size, V vocabulary, P positions. `seed` is an int64 pair; a dropout adds its own dropout_id, so
that no two share their noise; None means inference, without any. Variables, LayerNorm statistics
and softmax are float32 under every precision; `compute_dtype` is that of the products.
"""

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from bert_tf.model import fused_ops
from bert_tf.model.layout import split_cls_heads

# LayerNorm of fewer, 85 tokens of BERT-base, is faster by its formula than by oneDNN's kernel.
FEW_NUMBERS = 2**16


def initializer(config):
    """Truncated normal; a new one for each weight, since a shared instance repeats its draw."""
    return keras.initializers.TruncatedNormal(stddev=config.initializer_range)


def dense(config, units, name, dtype, activation=None):
    return keras.layers.Dense(
        units, activation=activation, kernel_initializer=initializer(config), dtype=dtype, name=name
    )


def linear(x_TH, layer, seed):
    """A dense layer before its activation; matrix product and bias, which TensorFlow joins."""
    kernel, bias = tf.convert_to_tensor(layer.kernel), tf.convert_to_tensor(layer.bias)
    output_TF = tf.matmul(x_TH, kernel)
    if seed is not None and output_TF.dtype == tf.bfloat16:
        # On a CPU the gradient of bias_add is summed in bfloat16, where 256 + 1 is 256. The
        # gradient of a plain sum is a reduce_sum, which accumulates in float32.
        return output_TF + bias
    return tf.nn.bias_add(output_TF, bias)


def activation(x_TF, config, seed):
    """The configuration's gelu."""
    approximate = config.hidden_act == "gelu_new"
    if seed is None:
        return tf.nn.gelu(x_TF, approximate=approximate)
    return fused_ops.gelu(x_TF, approximate)


@keras.saving.register_keras_serializable("bert_tf")
class LayerNorm(keras.layers.Layer):
    """LayerNorm over the last axis, statistics in float32 (Ba et al. 2016)."""

    def __init__(self, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape):
        self.gamma = self.add_weight(
            shape=input_shape[-1:], initializer="ones", name="gamma", autocast=False
        )
        self.beta = self.add_weight(
            shape=input_shape[-1:], initializer="zeros", name="beta", autocast=False
        )

    def call(self, x_TH, residual_TH=None, rate=0.0, seed=None, dropout_id=0):
        """LayerNorm of x, or of dropout(x) + residual."""
        if seed is None:
            return self._of_inference(x_TH if residual_TH is None else x_TH + residual_TH)
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        if residual_TH is None:
            return fused_ops.norm(x_TH, gamma, beta, self.epsilon)
        return fused_ops.dropout_add_norm(
            x_TH, residual_TH, gamma, beta, self.epsilon, rate, seed, dropout_id
        )

    def _of_inference(self, x_TH):
        x_TH = tf.cast(x_TH, tf.float32)
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        # The one kernel is the processor's alone: TensorFlow has put it on GPUs too, and failed,
        # and XLA computes its variance as E[x^2] - E[x]^2, which cancels in rows far from 0.
        if tf.config.list_logical_devices("GPU") or _is_for_xla():
            normed_TH = self._by_moments(x_TH, gamma, beta)
        else:
            normed_TH = tf.cond(
                tf.size(x_TH) < FEW_NUMBERS,
                lambda: self._by_moments(x_TH, gamma, beta),
                lambda: self._as_one_kernel(x_TH, gamma, beta),
            )
            # A cond hides from TensorFlow that there are as many rows as before.
            normed_TH = tf.reshape(normed_TH, tf.shape(x_TH))
        return tf.cast(normed_TH, self.compute_dtype)

    def _by_moments(self, x_TH, gamma, beta):
        centered_TH = x_TH - tf.reduce_mean(x_TH, -1, keepdims=True)
        variance_T1 = tf.reduce_mean(tf.square(centered_TH), -1, keepdims=True)
        return centered_TH * tf.math.rsqrt(variance_T1 + self.epsilon) * gamma + beta

    def _as_one_kernel(self, x_TH, gamma, beta):
        """The same, each row a channel of one picture.

        So written, TensorFlow with oneDNN joins all of LayerNorm in one kernel: several times as
        fast for many rows, and slower for few, since a call of it takes some 0.3 ms.
        """
        rows = tf.shape(x_TH)[0]
        normed_1TH1, *_ = tf.raw_ops.FusedBatchNormV3(
            x=tf.reshape(x_TH, [1, rows, x_TH.shape[-1], 1]),
            scale=tf.ones([rows]),
            offset=tf.zeros([rows]),
            mean=tf.zeros([0]),
            variance=tf.zeros([0]),
            epsilon=self.epsilon,
            data_format="NCHW",
            is_training=True,
        )
        return tf.reshape(normed_1TH1, tf.shape(x_TH)) * gamma + beta

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


def _is_for_xla():
    """Whether what is traced now will be compiled by XLA: under jit_compile, set_jit or a TPU."""
    graph = tf.compat.v1.get_default_graph()
    return bool(tf.config.optimizer.get_jit()) or GraphOrParentsInXlaContext(graph)


class Embeddings(keras.layers.Layer):
    """Token + segment + position embeddings, LayerNorm, dropout (Devlin et al. 2019, figure 2)."""

    DROPOUT_ID = 0

    def __init__(self, config, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.norm = LayerNorm(config.layer_norm_eps, dtype=self.dtype_policy, name="LayerNorm")

    def build(self, input_shape=None):
        def table(name, rows):
            # autocast=False: looked up first and cast after, so that a step does not cast the whole
            # table.
            return self.add_weight(
                shape=(rows, self.config.hidden_size),
                name=name,
                autocast=False,
                initializer=initializer(self.config),
            )

        self.word_embeddings_VH = table("word_embeddings", self.config.vocab_size)
        self.position_embeddings_PH = table(
            "position_embeddings", self.config.max_position_embeddings
        )
        self.token_type_embeddings = table("token_type_embeddings", self.config.type_vocab_size)
        self.norm.build((None, self.config.hidden_size))

    def call(self, input_ids_T, segment_ids_T, layout, seed=None):
        summed_TH = (
            tf.gather(tf.convert_to_tensor(self.word_embeddings_VH), input_ids_T)
            + tf.gather(tf.convert_to_tensor(self.token_type_embeddings), segment_ids_T)
            + layout.positions(tf.convert_to_tensor(self.position_embeddings_PH))
        )
        return fused_ops.dropout(
            self.norm(summed_TH, seed=seed),
            self.config.hidden_dropout_prob,
            seed,
            self.DROPOUT_ID,
        )


class SelfAttention(keras.layers.Layer):
    """Multi-head self-attention before the residual sum (Vaswani et al. 2017, 3.2.2).

    Returns context [T, H] and probs [B, N, L, L], the float32 attention probabilities before
    dropout. Padding is ignored as key; the rows of padding themselves come out meaningless. With
    cls_only=True only the first token of each text asks: context [B, H], probs [B, N, 1, L].
    """

    def __init__(self, config, dropout_id, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.dropout_id = dropout_id
        self.query, self.key, self.value, self.output_dense = (
            dense(config, config.hidden_size, name, self.dtype_policy)
            for name in ("query", "key", "value", "output")
        )

    def build(self, input_shape=None):
        for layer in (self.query, self.key, self.value, self.output_dense):
            layer.build((None, self.config.hidden_size))

    def call(self, hidden_TH, layout, seed=None, cls_only=False):
        num_heads = self.config.num_attention_heads
        if cls_only:
            q_BNLD = split_cls_heads(
                linear(layout.cls_vectors(hidden_TH), self.query, seed), num_heads
            )
        else:
            q_BNLD = layout.split_heads(linear(hidden_TH, self.query, seed), num_heads)
        k_BNLD = layout.split_heads(linear(hidden_TH, self.key, seed), num_heads)
        v_BNLD = layout.split_heads(linear(hidden_TH, self.value, seed), num_heads)

        head_size = self.config.hidden_size // self.config.num_attention_heads
        scores_BNLL = tf.matmul(q_BNLD, k_BNLD, transpose_b=True)
        # In training for those alone who ask for them: else TensorFlow leaves them out.
        probs_BNLL = tf.nn.softmax(
            tf.cast(scores_BNLL, tf.float32) * head_size**-0.5 + layout.key_bias_B11L
        )
        if seed is None:
            dropped_BNLL = tf.cast(probs_BNLL, v_BNLD.dtype)
        else:
            dropped_BNLL = fused_ops.softmax_dropout(
                scores_BNLL,
                layout.key_bias_B11L,
                head_size,
                self.config.attention_probs_dropout_prob,
                seed,
                self.dropout_id,
            )
        context_BNLD = tf.matmul(dropped_BNLL, v_BNLD)
        if cls_only:
            context_TH = tf.reshape(context_BNLD, [-1, self.config.hidden_size])
        else:
            context_TH = layout.merge_heads(context_BNLD)
        return linear(context_TH, self.output_dense, seed), probs_BNLL


class TransformerLayer(keras.layers.Layer):
    """Attention and feed-forward, each with dropout, residual sum, LayerNorm (post-norm).

    Takes and returns rows [T, H]; also returns the attention probabilities [B, N, L, L]. With
    cls_only=True it returns those of the first token of each text, [B, H] and [B, N, 1, L].
    """

    def __init__(self, config, index, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.dropout_id = 3 * index + 1  # Of its three dropouts, after that of the embeddings.
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

    def build(self, input_shape=None):
        hidden = (None, self.config.hidden_size)
        for layer in (self.attention, self.attention_norm, self.intermediate, self.output_norm):
            layer.build(hidden)
        self.output_dense.build((None, self.config.intermediate_size))

    def call(self, hidden_TH, layout, seed=None, cls_only=False):
        rate = self.config.hidden_dropout_prob
        attended_TH, probs_BNLL = self.attention(
            hidden_TH, layout=layout, seed=seed, cls_only=cls_only
        )
        if cls_only:
            hidden_TH = layout.cls_vectors(hidden_TH)
        hidden_TH = self.attention_norm(
            attended_TH, residual_TH=hidden_TH, rate=rate, seed=seed, dropout_id=self.dropout_id + 1
        )
        inner_TF = activation(linear(hidden_TH, self.intermediate, seed), self.config, seed)
        output_TH = linear(inner_TF, self.output_dense, seed)
        hidden_TH = self.output_norm(
            output_TH, residual_TH=hidden_TH, rate=rate, seed=seed, dropout_id=self.dropout_id + 2
        )
        return hidden_TH, probs_BNLL
