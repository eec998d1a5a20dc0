"""BERT with its two pretraining heads (Devlin et al. 2019, 3.1; released run_pretraining.py).

Legend: B examples, L tokens, T rows, P predictions of an example, H hidden size, V vocabulary.
"""

import keras
import tensorflow as tf

from bert_tf.model.encoder import Encoder
from bert_tf.model.layers import LayerNorm, activation, dense, initializer, linear
from bert_tf.train.losses import is_correct, softmax_cross_entropy, vocab_cross_entropy

LOSSES = {"masked_lm": vocab_cross_entropy, "next_sentence": softmax_cross_entropy}
METRICS = {
    "masked_lm_accuracy": ("masked_lm", is_correct),
    "next_sentence_accuracy": ("next_sentence", is_correct),
}


class MaskedLmHead(keras.layers.Layer):
    """Vectors at the masked positions -> a score for each entry: dense, gelu, LayerNorm, tied.

    The last product is with the encoder's token embeddings, which learn from it too; the bias is
    this head's own.
    """

    def __init__(self, config, **kwargs):
        super().__init__(**kwargs)
        self.config = config
        self.transform = dense(config, config.hidden_size, "transform", self.dtype_policy)
        self.norm = LayerNorm(config.layer_norm_eps, dtype=self.dtype_policy, name="LayerNorm")

    def build(self, input_shape=None):
        hidden = (None, self.config.hidden_size)
        self.transform.build(hidden)
        self.norm.build(hidden)
        self.output_bias_V = self.add_weight(
            shape=(self.config.vocab_size,), initializer="zeros", name="output_bias", autocast=False
        )

    def call(self, vectors_NH, embeddings_VH, seed=None):
        """[N, H] and [V, H] -> logits float32 [N, V]."""
        hidden_NH = activation(linear(vectors_NH, self.transform, seed), self.config, seed)
        hidden_NH = self.norm(hidden_NH, seed=seed)
        embeddings_VH = tf.cast(embeddings_VH, hidden_NH.dtype)
        logits_NV = tf.matmul(hidden_NH, embeddings_VH, transpose_b=True)
        return tf.cast(logits_NV, tf.float32) + tf.convert_to_tensor(self.output_bias_V)


class NextSentenceHead(keras.layers.Layer):
    """Pooled vector -> two scores: B follows A, B is random."""

    def __init__(self, config, **kwargs):
        super().__init__(**kwargs)
        self.config = config

    def build(self, input_shape=None):
        # Released as [2, H]: exchanged with other programs as it is.
        self.output_weights_2H = self.add_weight(
            shape=(2, self.config.hidden_size),
            initializer=initializer(self.config),
            name="output_weights",
            autocast=False,
        )
        self.output_bias_2 = self.add_weight(
            shape=(2,), initializer="zeros", name="output_bias", autocast=False
        )

    def call(self, pooled_BH):
        """[B, H] -> logits float32 [B, 2]."""
        pooled_BH = tf.cast(pooled_BH, tf.float32)
        weights_2H = tf.convert_to_tensor(self.output_weights_2H)
        logits_B2 = tf.matmul(pooled_BH, weights_2H, transpose_b=True)
        return logits_B2 + tf.convert_to_tensor(self.output_bias_2)


class PretrainingModel(keras.Model):
    """Encoder and both heads, built.

    Takes what the encoder takes, in either layout, and masked_lm_positions [B, P], which in flat
    count through all rows. Returns {"masked_lm": logits [B, P, V], "next_sentence": [B, 2]}.
    """

    def __init__(self, config, dtype="float32", recompute=False, name="pretraining"):
        super().__init__(name=name)
        self.config = config
        self.encoder = Encoder(config, name="bert", dtype=dtype, recompute=recompute)
        self.masked_lm = MaskedLmHead(config, name="masked_lm", dtype=dtype)
        self.next_sentence = NextSentenceHead(config, name="next_sentence", dtype="float32")
        for layer in (self.encoder, self.masked_lm, self.next_sentence):
            layer.build((None, config.hidden_size))
        self.built = True

    def call(self, inputs, training=False, seed=None):
        seed = self.encoder.dropout_seed(training, seed)
        inputs = dict(inputs)
        positions_BP = tf.cast(inputs.pop("masked_lm_positions"), tf.int32)
        outputs = self.encoder(inputs, training=training, seed=seed)
        hidden_TH = outputs["sequence"]
        if "row_splits" not in inputs:
            length = tf.shape(hidden_TH)[1]
            positions_BP += tf.range(tf.shape(hidden_TH)[0])[:, tf.newaxis] * length
            hidden_TH = tf.reshape(hidden_TH, [-1, self.config.hidden_size])
        masked_NH = tf.gather(hidden_TH, tf.reshape(positions_BP, [-1]))
        embeddings_VH = tf.convert_to_tensor(self.encoder.embeddings.word_embeddings_VH)
        logits_NV = self.masked_lm(masked_NH, embeddings_VH, seed=seed)
        shape = [-1, positions_BP.shape[1] or tf.shape(positions_BP)[1], self.config.vocab_size]
        return {
            "masked_lm": tf.reshape(logits_NV, shape),
            "next_sentence": self.next_sentence(outputs["pooled"]),
        }


def to_batch(examples):
    """{feature: tensor} of bert_tf.data.batches -> (inputs, labels, weights) of the train step."""
    names = ("input_ids", "input_mask", "segment_ids", "row_splits", "masked_lm_positions")
    labels_B = examples["next_sentence_labels"]
    return (
        {name: examples[name] for name in names if name in examples},
        {"masked_lm": examples["masked_lm_ids"], "next_sentence": labels_B},
        {
            "masked_lm": examples["masked_lm_weights"],
            "next_sentence": tf.ones_like(labels_B, tf.float32),
        },
    )
