"""Networks of encoder and head of several task types (Devlin et al. 2019, figure 4); pooling.

A head is dropout (except for answer spans) and one dense layer in float32. Outputs are dicts of
float32, batch first. A model is built on construction.

Pooling makes one vector per text from those of its tokens, in either layout of the encoder.

Shape suffixes: B texts (windows), Q questions, L tokens of the longest text, T flattened tokens, H
hidden size, C outputs, or choices.
"""

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model.dense import dense
from bert_tf.model.fused_ops import dropout
from bert_tf.model.layout import MASKED_SCORE, by_sequence
from bert_tf.weights.pretrained_encoder import Encoder
from tasks.data.examples import Tensors

HEAD_DROPOUT_ID = 2**15  # Larger than all dropout ids of the encoder.
# Vectors of texts for a head: [CLS] through the pooler, as published, or the mean of all tokens.
TEXT_POOLING = ("pooled", "mean")


class EncoderModel(keras.Model):
    """Model with an `encoder`; what it trains leaves out a pooler that it does not use.

    The pooler itself stays trainable, for other models that share the encoder.
    """

    uses_pooler = True
    missing = MASKED_SCORE  # Output of a missing text, see `on_grid`.

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        """Weights that training changes."""
        unused = [] if self.uses_pooler else self.encoder.pooler.weights
        return _without(unused, super().trainable_weights)

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Variables that training changes, which are weights."""
        return self.trainable_weights

    @property
    def non_trainable_weights(self) -> list[keras.Variable]:
        """The other weights."""
        return _without(self.trainable_weights, self.weights)

    @property
    def non_trainable_variables(self) -> list[keras.Variable]:
        """The other variables."""
        return _without(self.trainable_weights, self.variables)


def _without(excluded, variables):
    """Return the variables that are not among others; == would compare their values."""
    excluded_ids = set(map(id, excluded))
    return [variable for variable in variables if id(variable) not in excluded_ids]


class HeadModel(EncoderModel):
    """Encoder and a dense layer "classifier"; subclasses define `call`, from inputs to outputs.

    Args:
        config: Configuration of the encoder.
        units: Outputs of the head.
        pooling: A key of TEXT_POOLING: what the scores of a text are computed from.
        **kwargs: Arguments of keras.Model.
    """

    has_head_dropout = True

    def __init__(self, config: BertConfig, units: int, pooling: str = "pooled", **kwargs):
        # Keras would round token ids that are floats, as in a graph for GPUs, to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        self.config, self.units = config, units
        self.encoder = Encoder(config, dtype=self.dtype_policy)
        self.head = dense(config, units, "classifier", "float32")
        if pooling == "mean":
            self.uses_pooler = False
            # The published initializer is too narrow: with few rows such a head hardly learns.
            self.head.kernel_initializer = keras.initializers.GlorotUniform()
        self.build()

    def build(self, inputs_shape: object = None) -> None:
        """Create all weights; shapes follow from the configuration."""
        self.encoder.build()
        self.head.build((None, self.config.hidden_size))

    def scores(self, hidden: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """Apply the head to `(..., H)`; returns `(..., C)`. There is no dropout if seed is None."""
        rate = self.config.hidden_dropout_prob if self.has_head_dropout else 0.0
        hidden = dropout(hidden, rate, seed, HEAD_DROPOUT_ID)
        if hidden.shape.rank == 2:
            return self.head(hidden)
        # Keras flattens rows too, but a GPU waits for the sizes as Keras computes them.
        scores = self.head(tf.reshape(hidden, [-1, self.config.hidden_size]))
        return tf.reshape(scores, tf.concat([tf.shape(hidden)[:-1], [self.units]], axis=0))

    def text_scores(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return the scores `(B, C)` of texts; the encoder draws a missing seed."""
        seed = self.encoder.dropout_seed(training, seed)
        if not self.uses_pooler:
            sequence = self.encoder(inputs, training=training, seed=seed)["sequence"]
            return self.scores(mean_of_tokens(sequence, inputs), seed)
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return self.scores(pooled_BH, seed)

    def token_scores(
        self, inputs: Tensors, training: bool, seed: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return scores `(B, L, C)`, and is_token, bool `(B, L)`, false at padding."""
        seed = self.encoder.dropout_seed(training, seed)
        sequence = self.encoder(inputs, training=training, seed=seed)["sequence"]
        return by_sequence(self.scores(sequence, seed), inputs)


class SequenceClassifier(HeadModel):
    """Classifier or regressor of a text or pair; `output` is the name of its output.

    `activation` is the name in Keras of the activation of the output; `None` is for logits.
    """

    def __init__(
        self,
        config: BertConfig,
        units: int,
        output: str = "label",
        activation: str | None = None,
        **kwargs,
    ):
        super().__init__(config, units, **kwargs)
        self.output_key, self.activation = output, activation

    def call(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Return logits `(B, C)` by the name of the output, after the activation, if any."""
        activate = keras.activations.get(self.activation)
        return {self.output_key: activate(self.text_scores(inputs, training, seed))}


class ChoiceModel(HeadModel):
    """Multiple choice (SWAG; Devlin et al. 2019, 4.4): one score per choice of a question.

    `output` is the name of its output.
    """

    def __init__(self, config: BertConfig, output: str = "choice", **kwargs):
        super().__init__(config, 1, **kwargs)
        self.output_key = output

    def call(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Return the scores by the name of the output.

        If `inputs` also has `windows`, int32 `(Q, C)`, the indices of the texts of each question's
        choices, -1 for a missing choice, scores are `(Q, C)`, MASKED_SCORE for a missing choice;
        else they are those of the texts, `(B,)`.
        """
        inputs = dict(inputs)
        windows_QC = inputs.pop("windows", None)
        scores_B = self.text_scores(inputs, training, seed)[:, 0]
        return {self.output_key: scores_B if windows_QC is None else on_grid(scores_B, windows_QC)}


def on_grid(values: tf.Tensor, windows_QC: tf.Tensor, missing: float = MASKED_SCORE) -> tf.Tensor:
    """Arrange values `(B, ...)` by question, `(Q, C, ...)`, `missing` where `windows_QC` is -1."""
    # The padding in front gets index 0 after 1 is added to all indices.
    paddings = [[1, 0], *[[0, 0]] * (values.shape.rank - 1)]
    values = tf.pad(values, paddings, constant_values=missing)
    return tf.gather(values, tf.cast(windows_QC, tf.int32) + 1)


def mean_of_tokens(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the mean vector of all tokens, [CLS] and [SEP] included, without padding.

    Args:
        sequence: Token vectors, `(R, L, H)`, or `(T, H)` in the flat layout.
        inputs: The encoder's inputs.

    Returns:
        float32 `(B, H)`; 0 for a sequence without tokens.
    """
    sum_BH, count_B1 = _sums(sequence, inputs)
    return sum_BH / count_B1


def mean_by_square_root(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the sum of all vectors, divided by the square root of their number.

    Arguments and result as of `mean_of_tokens`.
    """
    sum_BH, count_B1 = _sums(sequence, inputs)
    return sum_BH / tf.sqrt(count_B1)


def largest_of_tokens(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the largest value of all tokens per component.

    Arguments and result as of `mean_of_tokens`; a flat sequence has at least one token.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.reduce_max(_ragged(sequence, inputs), axis=1)
    vectors_BLH, is_token_BL = by_sequence(sequence, inputs)
    is_token_BL1 = tf.expand_dims(is_token_BL, axis=2)
    largest_BH = tf.reduce_max(tf.where(is_token_BL1, vectors_BLH, vectors_BLH.dtype.min), axis=1)
    # The lowest number would overflow in later layers, whose gradients then are NaN.
    return tf.where(tf.reduce_any(is_token_BL1, axis=1), largest_BH, 0.0)


def first_token(sequence: tf.Tensor, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return the vector of [CLS].

    Arguments and result as of `mean_of_tokens`.
    """
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.gather(sequence, inputs["row_splits"][:-1])
    return by_sequence(sequence, inputs)[0][:, 0]


# By name, as in sentence-transformers.
POOLING: dict[str, Callable[[tf.Tensor, Mapping[str, tf.Tensor]], tf.Tensor]] = {
    "cls": first_token,
    "mean": mean_of_tokens,
    "max": largest_of_tokens,
    "mean_sqrt_len": mean_by_square_root,
}


def _sums(sequence, inputs):
    """Return the sum of the vectors of each text, float32 `(B, H)`, and their number `(B, 1)`."""
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        rows = _ragged(sequence, inputs)
        sum_BH = tf.reduce_sum(rows, axis=1)
        count_B1 = tf.expand_dims(tf.cast(rows.row_lengths(), tf.float32), axis=1)
    else:
        vectors_BLH, is_token_BL = by_sequence(sequence, inputs)
        mask_BL1 = tf.expand_dims(tf.cast(is_token_BL, tf.float32), axis=2)
        sum_BH = tf.reduce_sum(vectors_BLH * mask_BL1, axis=1)
        count_B1 = tf.reduce_sum(mask_BL1, axis=1)
    return sum_BH, tf.maximum(count_B1, 1.0)


def _ragged(sequence, inputs):
    splits = tf.cast(inputs["row_splits"], tf.int64)
    return tf.RaggedTensor.from_row_splits(sequence[: splits[-1]], splits, validate=False)
