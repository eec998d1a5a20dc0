"""Regression: a number for a text or a pair, as STS-B's similarity (Devlin et al. 2019, 4.1).

The output is the number itself, trained with squared error; it is neither clipped nor scaled. With
the activation "sigmoid", as of cross-encoders, it is from 0 to 1.

Shape suffixes: N examples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.train.losses import squared_difference, squared_error
from tasks.base.task import LabelledTextTask, OutputSpec, check_choice, described
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.labels import check_batch
from tasks.data.readers.rows import Example, FileRows, Source
from tasks.data.windows import Windows
from tasks.graph.heads import SequenceClassifier
from tasks.metrics.regression import mean_squared_error, pearson, spearman
from tasks.model.task_model import TaskModel

# Name in Keras by that in task.json.
ACTIVATIONS = {"identity": None, "sigmoid": "sigmoid"}
LARGEST = float(np.finfo(np.float32).max)
_NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionTask(LabelledTextTask):
    """Prediction of a number per text or pair of texts.

    Attributes:
        activation: A key of ACTIVATIONS, of the output.
    """

    kind = "regression"
    description = "Predicts a number for a text or for a pair of texts."
    outputs = {"value": OutputSpec("predicted number")}
    losses = {"value": squared_error}
    soft_losses = {"value": squared_difference}
    label_dtype = np.float32
    best_metric = "spearman"

    activation: str = described("activation of the output", "identity")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation", self.activation, ACTIVATIONS)

    @classmethod
    def from_data(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task; "identity" replaces a "sigmoid" that does not reach all labels."""
        task = super().from_data(data, max_seq_length=max_seq_length, **options)
        if task.activation == "sigmoid":
            rows = task.iter_examples(data, labelled=True)
            if not all(task._reaches(row.label) for row in rows if isinstance(row, Example)):
                return dataclasses.replace(task, activation="identity")
        return task

    @classmethod
    def options_from(
        cls, source: Mapping[str, Any], given: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the activation of a regressor."""
        if source.get("kind") != cls.kind or "activation" not in source:
            return {}
        return {"activation": source["activation"]}

    def label_of(self, label: str) -> float:
        """Return the number; raises ValueError if it is not a finite float32."""
        try:
            number = float(label)
        except ValueError:
            number = float("nan")
        if not abs(number) <= LARGEST:
            raise ValueError(f"label {label!r:.80}: expected a number")
        return number

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> float:
        """Return a number."""
        return self.label_of(str(value))

    def batch_labels(self, y: tf.Tensor) -> tf.Tensor:
        """Return numbers, float32 `(B,)`, of numbers or strings `(B,)` or `(B, 1)`."""
        if y.shape.rank == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.dtype == tf.string:
            with check_batch(tf.strings.regex_full_match(y, _NUMBER), y, "a number"):
                y = tf.strings.to_number(y, tf.float64)
        y = tf.cast(y, tf.float64)
        is_bounded = self.activation == "sigmoid"
        is_good = (y >= 0) & (y <= 1) if is_bounded else tf.abs(y) <= LARGEST
        with check_batch(is_good, y, "a number" + " from 0 to 1" * is_bounded):
            return tf.cast(y, tf.float32)

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the examples; raises UserError if the activation does not reach a label."""
        for label in examples.labels:
            if not self._reaches(label):
                raise UserError(
                    f"label {label}: expected a number from 0 to 1 with activation='sigmoid'; "
                    "scale the labels, or pass activation='identity' to from_pretrained"
                )
        return examples

    def _reaches(self, label):
        return self.activation == "identity" or 0 <= label <= 1

    def build_model(self, config: BertConfig, dtype: str = "float32") -> SequenceClassifier:
        """Return the encoder with one output."""
        options: dict[str, Any] = {"name": self.kind, "dtype": dtype}
        return SequenceClassifier(config, 1, "value", ACTIVATIONS[self.activation], **options)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return the predicted value, float32 `(B,)`."""
        return {"value": outputs["value"][:, 0]}

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return Pearson's and Spearman's correlation and the mean squared error."""
        values_N, predictions_N = data.labels["value"], outputs["value"][:, 0]
        return {
            # The functions' names are the metrics' names in files.
            metric.__name__: metric(values_N, predictions_N)
            for metric in (pearson, spearman, mean_squared_error)
        }


@keras.saving.register_keras_serializable("bert_tf")
class TextRegressor(TaskModel):
    """Regressor: one number per text or pair.

        model = TextRegressor.from_pretrained(PATH)
        model.fit(["Never again.", "Very good."], [1.0, 5.0], epochs=1)
        model.predict(["Very good."])["value"]  # float32 (1,)

    Options of `from_pretrained`:
        activation: "identity", or "sigmoid" for numbers from 0 to 1; by default that of a
            regressor whose head is kept, else "identity".
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = RegressionTask
    options = ("activation", "pairs", "truncation")
