"""Models of the published task types: encoder plus head (Devlin et al. 2019, figure 4).

A head is dropout (except for answer spans) and one dense layer in float32. Outputs are dicts of
float32, batch first.

Shape suffixes: B texts (windows), Q questions, L tokens of the longest text, T flattened tokens, H
hidden size, C outputs, or choices.
"""

from collections.abc import Mapping

import keras
import tensorflow as tf

import bert_tf.train.losses
import bert_tf.train.optimizer  # noqa: F401  Registers losses and AdamW for compiled models.
from bert_tf.config import BertConfig
from bert_tf.model.dense import dense
from bert_tf.model.fused_ops import dropout
from bert_tf.model.layout import MASKED_SCORE, by_sequence
from bert_tf.weights.pretrained_encoder import Encoder

HEAD_DROPOUT_ID = 2**15  # Larger than all dropout ids of the encoder.


class _Model(keras.Model):
    """Encoder and a dense layer "classifier"; subclasses define `call`."""

    has_head_dropout = True

    def __init__(self, config: BertConfig | dict, units: int, name: str | None = None, **kwargs):
        """Create the layers.

        Args:
            config: Configuration of the encoder.
            units: Outputs of the head.
            name: Name of the model.
            **kwargs: Arguments of keras.Model.
        """
        super().__init__(name=name, **kwargs)
        self.config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.units = units
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.head = dense(self.config, units, "classifier", "float32")

    def build(self, inputs_shape: object = None) -> None:
        """Create all weights; shapes follow from the configuration."""
        self.encoder.build()
        self.head.build((None, self.config.hidden_size))

    def scores(self, hidden: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """Apply the head to `(..., H)`; returns `(..., C)`. There is no dropout if seed is None."""
        rate = self.config.hidden_dropout_prob if self.has_head_dropout else 0.0
        return self.head(dropout(hidden, rate, seed, HEAD_DROPOUT_ID))

    def get_config(self) -> dict[str, object]:
        """Return the constructor's arguments."""
        return {**super().get_config(), "config": self.config.to_dict(), "units": self.units}


@keras.saving.register_keras_serializable("bert_tf")
class SequenceClassifier(_Model):
    """Classifier or regressor of a text or pair, on the pooled [CLS] vector."""

    def __init__(self, config: BertConfig | dict, units: int, output: str = "label", **kwargs):
        """Create the layers; `output` is the name of the output."""
        super().__init__(config, units, **kwargs)
        self.output_key = output

    def call(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Compute logits.

        Args:
            inputs: Batch in either layout of the encoder.
            training: Whether dropout is applied.
            seed: Seed of dropout; drawn by the encoder if None.

        Returns:
            Logits `(B, C)` by the name of the output.
        """
        seed = self.encoder.dropout_seed(training, seed)
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return {self.output_key: self.scores(pooled_BH, seed)}

    def get_config(self) -> dict[str, object]:
        """Return the constructor's arguments."""
        return {**super().get_config(), "output": self.output_key}


@keras.saving.register_keras_serializable("bert_tf")
class ChoiceModel(_Model):
    """Multiple choice (SWAG; Devlin et al. 2019, 4.4): one score per choice of a question."""

    def __init__(self, config: BertConfig | dict, units: int = 1, **kwargs):
        """Create the layers."""
        super().__init__(config, units, **kwargs)

    def call(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Compute scores.

        Args:
            inputs: Batch in either layout of the encoder, and `windows`, int32 `(Q, C)`: indices of
                the texts of each question's choices, -1 for a missing choice.
            training: Whether dropout is applied.
            seed: Seed of dropout.

        Returns:
            Dict of `choice`, `(Q, C)`, MASKED_SCORE for a missing choice.
        """
        inputs = dict(inputs)
        windows_QC = tf.cast(inputs.pop("windows"), tf.int32)
        seed = self.encoder.dropout_seed(training, seed)
        return {"choice": on_grid(self.text_scores(inputs, training, seed), windows_QC)}

    def text_scores(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return the score of each text `(B,)`; arguments as in `call`, without `windows`."""
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return self.scores(pooled_BH, seed)[:, 0]


def on_grid(scores_B: tf.Tensor, windows_QC: tf.Tensor) -> tf.Tensor:
    """Arrange scores by question, `(Q, C)`, with MASKED_SCORE where `windows_QC` is -1."""
    # The padding in front gets index 0 after 1 is added to all indices.
    scores_B = tf.pad(scores_B, [[1, 0]], constant_values=MASKED_SCORE)
    return tf.gather(scores_B, windows_QC + 1)


class _TokenWise(_Model):
    """Model with scores per token."""

    def __init__(self, config: BertConfig | dict, units: int, **kwargs):
        """Create the layers; the pooler is frozen, because it is not used."""
        super().__init__(config, units, **kwargs)
        self.encoder.pooler.trainable = False

    def token_scores(
        self, inputs: Mapping[str, tf.Tensor], training: bool, seed: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return scores `(B, L, C)`, and is_token, bool `(B, L)`, false at padding."""
        seed = self.encoder.dropout_seed(training, seed)
        sequence = self.encoder(inputs, training=training, seed=seed)["sequence"]
        return by_sequence(self.scores(sequence, seed), inputs)


@keras.saving.register_keras_serializable("bert_tf")
class TokenModel(_TokenWise):
    """Token classification, such as named entities (Devlin et al. 2019, 5.3)."""

    def call(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Return logits `tag`, `(B, L, C)`; values at padding are undefined."""
        return {"tag": self.token_scores(inputs, training, seed)[0]}


@keras.saving.register_keras_serializable("bert_tf")
class SpanModel(_TokenWise):
    """Span prediction for question answering (Devlin et al. 2019, 4.2)."""

    has_head_dropout = False  # As in the released run_squad.py and in transformers.

    def __init__(self, config: BertConfig | dict, units: int = 2, **kwargs):
        """Create the layers."""
        super().__init__(config, units, **kwargs)

    def call(
        self,
        inputs: Mapping[str, tf.Tensor],
        training: bool = False,
        seed: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Return logits `start` and `end`, `(B, L)`, MASKED_SCORE at padding."""
        scores_BL2, is_token_BL = self.token_scores(inputs, training, seed)
        return {
            name: tf.where(is_token_BL, scores_BL2[:, :, number], MASKED_SCORE)
            for number, name in enumerate(("start", "end"))
        }
