"""Embedder: one vector per text, from the tokens of an encoder, and similarities of vectors.

Shape suffixes: N texts, M texts, D size of a vector.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary
from tasks.base.task import OutputSpec, Postprocessor, Reader, described
from tasks.base.text_task import TextTask
from tasks.data.examples import Examples, Tensors
from tasks.data.readers.rows import BadRow, Example, FileRows, Source
from tasks.data.windows import Windows
from tasks.graph.pooling import POOLING
from tasks.graph.serving_functions import ROWS_PER_CALL
from tasks.model.task_model import TaskModel
from tasks.types.similarity.embedding_model import (
    ACTIVATIONS,
    LAYERS,
    SIMILARITIES,
    EmbeddingModel,
)


class SimilarityReader(Reader["SimilarityTask"]):
    """Reader of texts without labels."""

    def iter_rows(self, data: Source | FileRows, labelled: bool) -> Iterable[Example | BadRow]:
        """Return the rows of a file; there are no labelled rows."""
        if labelled:
            raise UserError(
                f"{data}: an embedding has no metrics; expected a run with labels, or tasks.predict"
            )
        return super().iter_rows(data, labelled)


class SimilarityPostprocessor(Postprocessor["SimilarityTask"]):
    """Postprocessor of vectors, which are returned as they are."""

    description = "Returns a vector for a text or for a pair of texts."
    outputs = {"embedding": OutputSpec("vector of the text or pair", is_vector=True)}

    def predictions(
        self, texts: Tensors, windows: Windows, outputs: Tensors
    ) -> dict[str, tf.Tensor]:
        """Return the vectors, float32 `(N, D)`."""
        return dict(outputs)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return infinity, since nothing is decided."""
        return tf.fill(tf.shape(predictions["embedding"])[:1], float("inf"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityTask(TextTask):
    """One vector per text, or per pair of texts.

    Attributes:
        layers: A key of LAYERS.
        pooling: A key of POOLING, or several joined by "+", whose vectors are concatenated.
        dense_units: Outputs of each dense layer after pooling.
        dense_activations: A key of ACTIVATIONS per dense layer.
        normalize: Whether vectors have the norm 1.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt that every text gets, or `None`.
        similarity: A key of SIMILARITIES.
    """

    kind = "similarity"
    reader_class = SimilarityReader
    postprocessor_class = SimilarityPostprocessor

    layers: str = described("encoder layers that the vectors are taken from", "last")
    pooling: str = described("vector of a text from those of its tokens", "mean")
    dense_units: tuple[int, ...] = ()
    dense_activations: tuple[str, ...] = ()
    normalize: bool = described("whether vectors have the norm 1", False)
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = described("name of the prompt before every text", None)
    similarity: str = described("function that compares two vectors", "cosine")

    def __post_init__(self) -> None:
        for name, expected in (("layers", LAYERS), ("similarity", SIMILARITIES)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in expected:
                raise UserError(f"{name}={value!r:.80}: expected one of {', '.join(expected)}")
        if not isinstance(self.pooling, str) or not set(self.pooling.split("+")) <= set(POOLING):
            raise UserError(
                f"pooling={self.pooling!r:.80}: expected one of {', '.join(POOLING)}, or several "
                "joined by +"
            )
        for name in ("dense_units", "dense_activations"):  # Lists are accepted in Python.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(type(units) is not int or units < 1 for units in self.dense_units):
            raise UserError(f"dense_units={self.dense_units}: expected integers >= 1")
        if len(self.dense_activations) != len(self.dense_units) or not set(
            self.dense_activations
        ) <= set(ACTIVATIONS):
            raise UserError(
                f"dense_activations={self.dense_activations}: expected {len(self.dense_units)} of "
                f"{', '.join(ACTIVATIONS)}, one per dense layer"
            )
        if self.default_prompt is not None:
            self.prompt_text(self.default_prompt, "default_prompt")
            if len(self.text_columns) > 1:
                raise UserError(
                    f"default_prompt={self.default_prompt!r:.80}: expected none with pairs"
                )

    def prompt_text(self, name: str, argument: str = "prompt") -> str:
        """Return a prompt by its name; raises UserError, which names the argument."""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none, since the model has no prompts"
            raise UserError(f"{argument}={name!r:.80}: expected one of {known}")
        return self.prompts[name]

    def encode(
        self, texts: Tensors, tokenize: Callable[[tf.Tensor], Tokens], vocabulary: Vocabulary
    ) -> Windows:
        """Tokenize and truncate texts to one window each, with the default prompt before them."""
        if self.default_prompt is None:
            return super().encode(texts, tokenize, vocabulary)
        prompt = tf.constant(self.prompts[self.default_prompt])
        return self.encode_prompted(texts, prompt, tokenize, vocabulary)

    def encode_prompted(
        self,
        texts: Tensors,
        prompt: tf.Tensor,
        tokenize: Callable[[tf.Tensor], Tokens],
        vocabulary: Vocabulary,
    ) -> Windows:
        """Tokenize texts after a prompt that replaces the default one.

        Args:
            texts: Strings `(N,)` by input name.
            prompt: String, `()` or `(N,)`.
            tokenize: As for `encode`. Offsets count characters of the text without the prompt; they
                are -1 for the tokens of the prompt.
            vocabulary: As for `encode`.
        """
        prompted = {name: tf.strings.join([prompt, values]) for name, values in texts.items()}
        windows = super().encode(prompted, tokenize, vocabulary)
        packed = windows.packed
        if packed.starts is None or packed.ends is None:
            return windows
        shift_B = tf.broadcast_to(
            tf.strings.length(prompt, unit="UTF8_CHAR"), tf.shape(packed.ends.row_lengths())
        )
        shift_T = tf.gather(shift_B, packed.ends.value_rowids())
        is_of_text_T = packed.ends.flat_values > shift_T

        def without_prompt(offsets):
            shifted_T = tf.maximum(offsets.flat_values - shift_T, 0)
            return offsets.with_flat_values(tf.where(is_of_text_T, shifted_T, -1))

        starts, ends = without_prompt(packed.starts), without_prompt(packed.ends)
        return windows._replace(packed=packed._replace(starts=starts, ends=ends))

    def build_model(self, config: BertConfig, dtype: str = "float32") -> EmbeddingModel:
        """Return the network; raises UserError if the encoder has too few layers."""
        expected = LAYERS[self.layers][0]
        if expected > config.num_hidden_layers:
            raise UserError(
                f"layers={self.layers}: requires {expected} layers, but the encoder has "
                f"{config.num_hidden_layers}"
            )
        return EmbeddingModel(
            config,
            self.layers,
            self.pooling,
            self.dense_units,
            self.dense_activations,
            self.normalize,
            dtype,
            name=self.kind,
        )


@keras.saving.register_keras_serializable("bert_tf")
class TextEmbedder(TaskModel):
    """Embedder: one vector per text or pair. It is not trained.

    Options of `from_pretrained`:
        layers: Encoder layers that the vectors are taken from: "last", "second_to_last",
            "sum_last_4" or "concat_last_4", which has 4 H numbers per vector.
        pooling: "mean" over all tokens, [CLS] and [SEP] included, "cls", "max", "mean_sqrt_len",
            the sum divided by the square root of the number of tokens, or several joined by "+".
        dense_units: Outputs of each dense layer after pooling.
        dense_activations: "tanh" or "identity" per dense layer.
        normalize: Whether vectors have the norm 1.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt that every text gets.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = SimilarityTask
    has_head = False
    options = (
        *("layers", "pooling", "dense_units", "dense_activations", "normalize"),
        *("prompts", "default_prompt", "similarity", "pairs", "truncation"),
    )

    @property
    def task(self) -> SimilarityTask:
        """The task."""
        return cast(SimilarityTask, super().task)

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
        return super().predict(x, batch_size, **kwargs)["embedding"]

    def similarity(self, a: Any, b: Any) -> np.ndarray:
        """Return the similarity of each vector of `a` to each of `b`, float32 `(N, M)`.

        It is the task's `similarity`; distances are negated, so that more similar vectors have
        larger values.

        Args:
            a: N vectors of `predict`, or one.
            b: M vectors of `predict`, or one.
        """
        a_ND, b_MD = (
            tf.constant(np.atleast_2d(np.asarray(vectors, np.float32))) for vectors in (a, b)
        )
        compare = SIMILARITIES[self.task.similarity]
        # Row by row, since the differences of all pairs may not fit into memory.
        return np.stack([compare(vector_D, b_MD).numpy() for vector_D in a_ND])

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
        for texts in Examples(self.task.reader.columns(x), []).slices(batch_size):
            packed = self.serving.pipeline.encode(**texts).packed
            vectors_BLD = self._token_vectors(to_padded(packed, self.vocabulary)).numpy()
            for ids, vectors_LD in zip(packed.input_ids.to_list(), vectors_BLD, strict=True):
                rows.append(([entries[number] for number in ids], vectors_LD[: len(ids)]))
        return rows

    @tf.function(reduce_retracing=True, autograph=False)
    def _token_vectors(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return self.network.token_vectors(inputs)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UserError, since there are no labels to train or evaluate with."""
        raise UserError(
            "TextEmbedder: has no labels, so it is neither trained nor evaluated; fit "
            "TextClassifier or TextRegressor instead, or another model on the vectors of predict"
        )

    fit = train = evaluate = report = tune = compile
