"""The layers of the encoder. They take rows, [T, H], and a layout that knows who belongs together.

Legend: T rows, H hidden size, F feed-forward size, B texts, N heads, L tokens of a text, D head
size, V vocabulary, P positions. `seed` is an int64 pair; a dropout adds its own place number, so
that no two share their noise. Variables, LayerNorm statistics and softmax are float32 under every
precision; `compute_dtype` is that of the products.
"""

import keras
import tensorflow as tf


def dropout(x, rate, seed, place):
    """Zeroes a share `rate` of x and scales the rest; (seed, place) alone decide which.

    `seed` None means no dropout (inference).
    """
    if seed is None or rate == 0:
        return x
    # Drawn in float32: in bfloat16 a uniform number has 8 bits, and a rate of 0.1 would become
    # 0.102.
    uniform = tf.random.stateless_uniform(
        tf.shape(x), tf.stack([seed[0], seed[1] + place]), dtype=tf.float32
    )
    return tf.where(uniform >= rate, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros([], x.dtype))


def initializer(config):
    """Truncated normal; a new one for each weight, since a shared instance repeats its draw."""
    return keras.initializers.TruncatedNormal(stddev=config.initializer_range)


def dense(config, units, name, dtype, activation=None):
    return keras.layers.Dense(
        units, activation=activation, kernel_initializer=initializer(config), dtype=dtype, name=name
    )


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

    def call(self, x):
        x = tf.cast(x, tf.float32)
        centered = x - tf.reduce_mean(x, -1, keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + self.epsilon)
        return tf.cast(centered * scale * self.gamma + self.beta, self.compute_dtype)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


class Embeddings(keras.layers.Layer):
    """Token + segment + position embeddings, LayerNorm, dropout (Devlin et al. 2019, figure 2)."""

    DROPOUT_PLACE = 0

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
        return dropout(
            self.norm(summed_TH), self.config.hidden_dropout_prob, seed, self.DROPOUT_PLACE
        )


class SelfAttention(keras.layers.Layer):
    """Multi-head self-attention before the residual sum (Vaswani et al. 2017, 3.2.2).

    Returns context [T, H] and probs [B, N, L, L], the float32 attention probabilities before
    dropout. Padding is ignored as key; the rows of padding themselves come out meaningless.
    """

    def __init__(self, config, place, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.place = place
        self.query, self.key, self.value, self.output_dense = (
            dense(config, config.hidden_size, name, self.dtype_policy)
            for name in ("query", "key", "value", "output")
        )

    def build(self, input_shape=None):
        for layer in (self.query, self.key, self.value, self.output_dense):
            layer.build((None, self.config.hidden_size))

    def call(self, hidden_TH, layout, seed=None):
        # One product for all three. The variables stay apart, as released: LAMB and importers see
        # them one by one.
        parts = (self.query, self.key, self.value)
        kernel = tf.concat([tf.convert_to_tensor(part.kernel) for part in parts], axis=1)
        bias = tf.concat([tf.convert_to_tensor(part.bias) for part in parts], axis=0)
        qkv_TE = tf.nn.bias_add(tf.matmul(hidden_TH, kernel), bias)
        q_BNLD, k_BNLD, v_BNLD = layout.split_heads(qkv_TE, self.config.num_attention_heads)

        head_size = self.config.hidden_size // self.config.num_attention_heads
        scores_BNLL = tf.cast(tf.matmul(q_BNLD, k_BNLD, transpose_b=True), tf.float32)
        probs_BNLL = tf.nn.softmax(scores_BNLL * head_size**-0.5 + layout.key_bias_B11L)
        dropped_BNLL = dropout(
            tf.cast(probs_BNLL, v_BNLD.dtype),
            self.config.attention_probs_dropout_prob,
            seed,
            self.place,
        )
        context_TH = layout.merge_heads(tf.matmul(dropped_BNLL, v_BNLD))
        return self.output_dense(context_TH), probs_BNLL


class TransformerLayer(keras.layers.Layer):
    """Attention and feed-forward, each with dropout, residual sum, LayerNorm (post-norm).

    Takes and returns rows [T, H]; also returns the attention probabilities [B, N, L, L].
    """

    def __init__(self, config, index, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.place = 3 * index + 1  # Of its three dropouts, after that of the embeddings.
        self.attention = SelfAttention(
            config, self.place, dtype=self.dtype_policy, name="attention"
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

    def call(self, hidden_TH, layout, seed=None):
        rate = self.config.hidden_dropout_prob
        attended_TH, probs_BNLL = self.attention(hidden_TH, layout=layout, seed=seed)
        hidden_TH = self.attention_norm(
            dropout(attended_TH, rate, seed, self.place + 1) + hidden_TH
        )
        inner_TF = tf.nn.gelu(
            self.intermediate(hidden_TH), approximate=self.config.hidden_act == "gelu_new"
        )
        output_TH = dropout(self.output_dense(inner_TF), rate, seed, self.place + 2)
        return self.output_norm(output_TH + hidden_TH), probs_BNLL
