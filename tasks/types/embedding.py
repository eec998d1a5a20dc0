"""Embedding of texts: vectors from the layers of an encoder (Devlin et al. 2019, 5.3, table 7).

Shape suffixes: N texts, B sequences of a batch, L tokens of a sequence, T of a batch, D size of a
vector.
"""

import dataclasses
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.weights.pretrained_encoder import Encoder
from tasks.base.task import OutputSpec
from tasks.base.text_task import TextTask
from tasks.data.examples import Examples, Tensors
from tasks.graph.heads import mean_of_tokens
from tasks.graph.serving_functions import ROWS_PER_CALL
from tasks.model.task_model import TaskModel


def first_token(sequence: tf.Tensor, inputs: Tensors) -> tf.Tensor:
    """Return the vector of [CLS]; arguments as of `mean_of_tokens`."""
    sequence = tf.cast(sequence, tf.float32)
    if "row_splits" in inputs:
        return tf.gather(sequence, inputs["row_splits"][:-1])
    return sequence[:, 0]


# By name: number of last layers, and their combination. Embeddings are not a layer.
LAYERS = {
    "last": (1, lambda outputs: outputs[0]),
    "second_to_last": (2, lambda outputs: outputs[0]),
    "sum_last_4": (4, tf.add_n),
    "concat_last_4": (4, lambda outputs: tf.concat(outputs, axis=-1)),
}
POOLING = {"cls": first_token, "mean": mean_of_tokens}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingTask(TextTask):
    """One vector per text or pair of texts. It has no labels and is not trained."""

    kind = "embedding"
    description = "Returns a vector for a text or for a pair of texts."
    outputs = {"vector": OutputSpec("vector of the text or pair", is_vector=True)}
    no_labels = "an embedding has no metrics; expected a run with labels, or tasks.predict"

    layers: str = "last"  # A key of LAYERS.
    pooling: str = "mean"  # A key of POOLING.

    def __post_init__(self) -> None:
        for name, expected in (("layers", LAYERS), ("pooling", POOLING)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in expected:
                raise UserError(f"{name}={value!r}: expected one of {', '.join(expected)}")

    def build_model(self, config: BertConfig, dtype: str = "float32") -> "EmbeddingModel":
        """Return the encoder with pooling; raises UserError if it has too few layers."""
        expected = LAYERS[self.layers][0]
        if expected > config.num_hidden_layers:
            raise UserError(
                f"layers={self.layers}: requires {expected} layers, but the encoder has "
                f"{config.num_hidden_layers}"
            )
        return EmbeddingModel(config, self.layers, self.pooling, dtype)


class EmbeddingModel(keras.Model):
    """Encoder and pooling, built on construction.

    Args:
        config: Configuration of the encoder.
        layers: A key of LAYERS.
        pooling: A key of POOLING.
        dtype: Keras dtype policy of the encoder.
    """

    def __init__(
        self, config: BertConfig, layers: str, pooling: str, dtype: str = "float32"
    ) -> None:
        super().__init__(name=EmbeddingTask.kind)
        self.num_layers, self.combine = LAYERS[layers]
        self.pool = POOLING[pooling]
        self.vector_size = config.hidden_size * (4 if layers == "concat_last_4" else 1)
        self.encoder = Encoder(config, dtype=dtype)
        self.encoder.build()
        self.built = True

    def call(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Return the vectors of a batch in either layout, "vector", float32 `(B, D)`."""
        return {"vector": self.pool(self.token_vectors(inputs, training, seed), inputs)}

    def token_vectors(
        self, inputs: Tensors, training: bool = False, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return a vector per token, `(B, L, D)`, or `(T, D)` in the flat layout."""
        outputs = self.encoder(inputs, training=training, seed=seed, output_hidden_states=True)
        return self.combine(outputs["hidden_states"][-self.num_layers :])


@keras.saving.register_keras_serializable("bert_tf")
class TextEmbedder(TaskModel):
    """Embedder: one vector per text or pair. It is not trained.

    Options of `from_pretrained`:
        layers: Encoder layers that the vectors are taken from: "last", "second_to_last",
            "sum_last_4" or "concat_last_4", which has 4 H numbers per vector.
        pooling: "mean" over all tokens, [CLS] and [SEP] included, or "cls".
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = EmbeddingTask
    has_head = False
    options = ("layers", "pooling", "pairs", "truncation")

    @property
    def vector_size(self) -> int:
        """Number of components of a vector, D."""
        return self.network.vector_size

    def predict(  # type: ignore[override]  # The only output is returned without a dict.
        self, x: Any, batch_size: int = ROWS_PER_CALL, **kwargs: Any
    ) -> np.ndarray:
        """Return the vectors of rows, float32 `(N, D)`.

        Args:
            x: Strings; for pairs a tuple of two lists, a dict or a DataFrame. Or a dict of token
                ids.
            batch_size: Rows per call of the traced function.
            **kwargs: Arguments of keras.Model.predict, for token ids only.

        Raises:
            UserError: If x has no rows, or rows that are no strings.
        """
        return super().predict(x, batch_size, **kwargs)["vector"]

    def token_vectors(
        self, x: Any, batch_size: int = ROWS_PER_CALL
    ) -> list[tuple[list[str], np.ndarray]]:
        """Return tokens and vectors per row, [CLS] and [SEP] included.

        Args:
            x: Rows, as for `predict`.
            batch_size: Rows per call of the traced function.

        Returns:
            Per row L tokens, and float32 `(L, D)`.
        """
        entries, rows = self.vocabulary.entries, []
        for texts in Examples(self.task.columns(x), []).slices(batch_size):
            packed = self.serving.pipeline.encode(**texts).packed
            vectors_BLD = self._token_vectors(to_padded(packed, self.vocabulary)).numpy()
            for ids, vectors_LD in zip(packed.input_ids.to_list(), vectors_BLD, strict=True):
                rows.append(([entries[number] for number in ids], vectors_LD[: len(ids)]))
        return rows

    @tf.function(reduce_retracing=True, autograph=False)
    def _token_vectors(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return self.network.token_vectors(inputs)

    def predict_rows(self, x: Any, batch_size: int = ROWS_PER_CALL) -> list[dict[str, Any]]:
        """Return one {"vector": [...]} per row, as tasks.extract writes."""
        return [{"vector": vector} for vector in self.predict(x, batch_size).tolist()]

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UserError, since there are no labels to train or evaluate with."""
        raise UserError(
            "TextEmbedder: has no labels, so it is neither trained nor evaluated; fit "
            "TextClassifier or TextRegressor instead, or another model on the vectors of predict"
        )

    fit = train = evaluate = report = tune = compile
