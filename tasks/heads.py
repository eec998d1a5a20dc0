"""The heads of the published tasks on the encoder (Devlin et al. 2019, figure 4).

Each is dropout (but for answer spans) and one dense layer, float32; outputs are dicts
{name: float32}, batch first.

Legend: B texts (windows), Q questions, L tokens of the longest text, T rows, H hidden size, C
outputs, or choices.
"""

import keras
import tensorflow as tf

import bert_tf.train.losses
import bert_tf.train.optimizer  # noqa: F401  Where a saved, compiled model finds its loss and AdamW.
from bert_tf.config import BertConfig
from bert_tf.model.encoder import Encoder
from bert_tf.model.fused_ops import dropout
from bert_tf.model.layers import dense
from bert_tf.model.layout import MASKED_SCORE

HEAD_DROPOUT_ID = 2**15  # Beyond any of the encoder's.


class _Model(keras.Model):
    """An encoder and a dense layer "classifier" of `units`; `call` says what it reads."""

    has_head_dropout = True

    def __init__(self, config, units, name=None, **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.units = units
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.head = dense(self.config, units, "classifier", "float32")

    def build(self, inputs_shape=None):
        self.encoder.build()
        self.head.build((None, self.config.hidden_size))

    def scores(self, hidden, seed):
        """[..., H] -> [..., C], after dropout where the head has it."""
        rate = self.config.hidden_dropout_prob if self.has_head_dropout else 0.0
        return self.head(dropout(hidden, rate, seed, HEAD_DROPOUT_ID))

    def get_config(self):
        return {**super().get_config(), "config": self.config.to_dict(), "units": self.units}


@keras.saving.register_keras_serializable("bert_tf", name="TextModel")
class SequenceClassifier(_Model):
    """Of the whole text or pair, from [CLS] -> {`output`: [B, C]}."""

    def __init__(self, config, units, output="label", **kwargs):
        super().__init__(config, units, **kwargs)
        self.output_key = output

    def call(self, inputs, training=False, seed=None):
        seed = self.encoder.dropout_seed(training, seed)
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return {self.output_key: self.scores(pooled_BH, seed)}

    def get_config(self):
        return {**super().get_config(), "output": self.output_key}


@keras.saving.register_keras_serializable("bert_tf")
class ChoiceModel(_Model):
    """One score a text, compared within each question (SWAG; 4.4) -> {"choice": [Q, C]}.

    `inputs` holds beside the texts "windows" int32 [Q, C]: which texts are a question's choices, -1
    where it has fewer, whose score is far below all others.
    """

    def __init__(self, config, units=1, **kwargs):
        super().__init__(config, units, **kwargs)

    def call(self, inputs, training=False, seed=None):
        inputs = dict(inputs)
        windows_QC = tf.cast(inputs.pop("windows"), tf.int32)
        seed = self.encoder.dropout_seed(training, seed)
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return {"choice": on_grid(self.scores(pooled_BH, seed)[:, 0], windows_QC)}


def on_grid(scores_B, windows_QC):
    """A score a text -> [Q, C], MASKED_SCORE where `windows_QC` is -1."""
    scores_B = tf.pad(scores_B, [[1, 0]], constant_values=MASKED_SCORE)
    return tf.gather(scores_B, windows_QC + 1)


class _TokenWise(_Model):
    """Scores of every token. The pooler has no part in it and stays as it came."""

    def __init__(self, config, units, **kwargs):
        super().__init__(config, units, **kwargs)
        self.encoder.pooler.trainable = False

    def token_scores(self, inputs, training, seed):
        """[B, L, C], and is_token bool [B, L]; where it is False scores mean nothing."""
        seed = self.encoder.dropout_seed(training, seed)
        sequence = self.encoder(inputs, training=training, seed=seed)["sequence"]
        scores = self.scores(sequence, seed)
        if "row_splits" not in inputs:
            return scores, tf.cast(inputs["input_mask"], tf.bool)
        splits = tf.cast(inputs["row_splits"], tf.int32)
        rows = tf.RaggedTensor.from_row_splits(scores[: splits[-1]], splits, validate=False)
        lengths_B = splits[1:] - splits[:-1]
        return rows.to_tensor(), tf.sequence_mask(lengths_B)


@keras.saving.register_keras_serializable("bert_tf", name="TokenModel")
class TokenClassifier(_TokenWise):
    """A label a token (named entities; 5.3) -> {"tag": [B, L, C]}."""

    def call(self, inputs, training=False, seed=None):
        return {"tag": self.token_scores(inputs, training, seed)[0]}


@keras.saving.register_keras_serializable("bert_tf")
class SpanModel(_TokenWise):
    """Two softmaxes over the tokens (4.2) -> {"start": [B, L], "end": [B, L]}."""

    has_head_dropout = False  # As in the released run_squad.py and in transformers.

    def __init__(self, config, units=2, **kwargs):
        super().__init__(config, units, **kwargs)

    def call(self, inputs, training=False, seed=None):
        scores_BL2, is_token_BL = self.token_scores(inputs, training, seed)
        return {
            name: tf.where(is_token_BL, scores_BL2[:, :, number], MASKED_SCORE)
            for number, name in enumerate(("start", "end"))
        }
