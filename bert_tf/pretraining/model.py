"""BERT with its two pretraining heads (Devlin et al. 2019, 3.1; released run_pretraining.py).

Shape suffixes: B examples, L tokens, T flattened tokens, P predictions per example, N masked
positions (B * P), H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model.dense import activation, dense, initializer, linear, tied_embeddings
from bert_tf.model.layers import LayerNorm
from bert_tf.train.losses import is_correct, softmax_cross_entropy, vocab_cross_entropy
from bert_tf.weights.pretrained_encoder import Encoder

LOSSES: dict[str, Callable[..., tf.Tensor]] = {
    "masked_lm": vocab_cross_entropy,
    "next_sentence": softmax_cross_entropy,
}
METRICS = {
    "masked_lm_accuracy": ("masked_lm", is_correct),
    "next_sentence_accuracy": ("next_sentence", is_correct),
}


class MaskedLmHead(keras.layers.Layer):
    """Masked language model head: dense, GELU, LayerNorm and a tied output projection.

    The output projection is the transposed token embedding table of the encoder, which receives
    gradients from it too. The output bias belongs to this head.
    """

    def __init__(self, config: BertConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.transform = dense(config, config.hidden_size, "transform", self.dtype_policy)
        self.norm = LayerNorm(config.layer_norm_eps, dtype=self.dtype_policy, name="LayerNorm")

    def build(self, input_shape: Any = None) -> None:
        """Create the weights; their shapes depend on the config only."""
        hidden = (None, self.config.hidden_size)
        self.transform.build(hidden)
        self.norm.build(hidden)
        self.output_bias_V = self.add_weight(
            shape=(self.config.vocab_size,), initializer="zeros", name="output_bias", autocast=False
        )

    def call(
        self,
        vectors_NH: tf.Tensor,
        project: Callable[[tf.Tensor], tf.Tensor],
        seed: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Score each vocabulary entry at the masked positions.

        Args:
            vectors_NH: `(N, H)`, encoder outputs at the masked positions.
            project: The output projection: maps `(N, H)`, in the compute dtype, to `(N, V)`.
            seed: Dropout seed, or `None` in inference. It only selects fused training operations.

        Returns:
            Logits, float32 `(N, V)`.
        """
        hidden_NH = activation(linear(vectors_NH, self.transform, seed), self.config, seed)
        hidden_NH = self.norm(hidden_NH, seed=seed)
        # The logits are float32 under every policy, because the softmax over V entries needs it.
        return tf.cast(project(hidden_NH), tf.float32) + tf.convert_to_tensor(self.output_bias_V)


class NextSentenceHead(keras.layers.Layer):
    """Next sentence head: logits of "B follows A" (0) and "B is random" (1)."""

    def __init__(self, config: BertConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config

    def build(self, input_shape: Any = None) -> None:
        """Create the weights; their shapes depend on the config only."""
        # The released checkpoints store this kernel as (2, H), unlike all others.
        self.output_weights_2H = self.add_weight(
            shape=(2, self.config.hidden_size),
            initializer=initializer(self.config),
            name="output_weights",
            autocast=False,
        )
        self.output_bias_2 = self.add_weight(
            shape=(2,), initializer="zeros", name="output_bias", autocast=False
        )

    def call(self, pooled_BH: tf.Tensor) -> tf.Tensor:
        """Map pooled vectors `(B, H)` to logits, float32 `(B, 2)`."""
        pooled_BH = tf.cast(pooled_BH, tf.float32)
        weights_2H = tf.convert_to_tensor(self.output_weights_2H)
        logits_B2 = tf.matmul(pooled_BH, weights_2H, transpose_b=True)
        return logits_B2 + tf.convert_to_tensor(self.output_bias_2)


@keras.saving.register_keras_serializable("bert_tf")
class PretrainingModel(keras.Model):
    """Encoder with one or both pretraining heads, built on construction.

    Args:
        config: `BertConfig`, or its dict form as stored in a Keras config.
        dtype: Keras dtype policy of encoder and masked language model head.
        recompute: Gradient checkpointing in the encoder.
        name: Model name.
        next_sentence: Whether the model has a next sentence head.
    """

    def __init__(
        self,
        config: BertConfig | Mapping[str, Any],
        dtype: str = "float32",
        recompute: bool = False,
        name: str = "pretraining",
        next_sentence: bool = True,
    ) -> None:
        super().__init__(name=name, autocast=False)  # Token ids may be floats.
        config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.config = config
        self.encoder = Encoder(config, name="bert", dtype=dtype, recompute=recompute)
        self.masked_lm = MaskedLmHead(config, name="masked_lm", dtype=dtype)
        for layer in (self.encoder, self.masked_lm):
            layer.build((None, config.hidden_size))
        self.next_sentence: NextSentenceHead | None = None
        if next_sentence:
            self.next_sentence = NextSentenceHead(config, name="next_sentence", dtype="float32")
            self.next_sentence.build((None, config.hidden_size))
        self.built = True

    def freeze_next_sentence(self) -> None:
        """Exclude the pooler and the next sentence head from training.

        Call this before the optimizer is built.
        """
        self.encoder.pooler.trainable = False
        if self.next_sentence:
            self.next_sentence.trainable = False

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Run the encoder and the heads.

        Args:
            inputs: Encoder inputs in either layout, and `masked_lm_positions`, int `(B, P)`:
                indices of flattened tokens or, in a padded batch, of the example's.
            training: Turns dropout on.
            seed: int64 `(2,)`, the dropout seed; see `Encoder`.

        Returns:
            Dict of float32 logits: "masked_lm" `(B, P, V)` and, with this head, "next_sentence"
            `(B, 2)`.
        """
        seed = self.encoder.dropout_seed(training, seed)
        inputs = dict(inputs)
        positions_BP = tf.cast(inputs.pop("masked_lm_positions"), tf.int32)
        embeddings_VH = tf.convert_to_tensor(self.encoder.embeddings.word_embeddings_VH)
        look_up, project = tied_embeddings(embeddings_VH, self.masked_lm.compute_dtype, seed)
        outputs = self.encoder(inputs, training=training, seed=seed, look_up=look_up)
        hidden_TH = outputs["sequence"]
        if not inputs.keys() & {"row_splits", "sequence_ids"}:
            # In a padded batch positions count within an example; the offset of the example turns
            # them into indices of flattened tokens.
            length = tf.shape(hidden_TH)[1]
            positions_BP += tf.range(tf.shape(hidden_TH)[0])[:, tf.newaxis] * length
        hidden_TH = tf.reshape(hidden_TH, [-1, self.config.hidden_size])
        masked_NH = tf.gather(hidden_TH, tf.reshape(positions_BP, [-1]))
        logits_NV = self.masked_lm(masked_NH, project=project, seed=seed)
        shape = [-1, positions_BP.shape[1] or tf.shape(positions_BP)[1], self.config.vocab_size]
        logits = {"masked_lm": tf.reshape(logits_NV, shape)}
        if self.next_sentence:
            logits["next_sentence"] = self.next_sentence(outputs["pooled"])
        return logits

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the `BertConfig` as a dict."""
        return {
            "config": self.config.to_dict(),
            "dtype": self.encoder.dtype_policy.name,
            "recompute": self.encoder.recompute,
            "name": self.name,
            "next_sentence": self.next_sentence is not None,
        }


def to_batch(examples: Mapping[str, tf.Tensor]) -> tuple[dict[str, tf.Tensor], ...]:
    """Split the features of bert_tf.data.batches into a batch of the train step.

    Returns:
        Tuple (inputs, labels, weights) of dicts. Labels and weights are keyed "masked_lm" `(B, P)`
        and, for pairs of segments, "next_sentence" `(B,)`.
    """
    inputs = dict(examples)
    labels = {"masked_lm": inputs.pop("masked_lm_ids")}
    weights = {"masked_lm": inputs.pop("masked_lm_weights")}
    if "next_sentence_labels" in inputs:
        labels["next_sentence"] = inputs.pop("next_sentence_labels")
        weights["next_sentence"] = tf.ones_like(labels["next_sentence"], tf.float32)
        if "token_indices" in inputs:  # Examples without tokens fill up the batch.
            is_filled_B = inputs["token_indices"][..., 0] >= 0
            weights["next_sentence"] = tf.cast(is_filled_B, tf.float32)
    return inputs, labels, weights
