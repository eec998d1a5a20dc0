"""Regression: a number for a text or a pair, as STS-B's similarity (Devlin et al. 2019, 4.1).

The output is the number itself, trained with squared error; it is neither clipped nor scaled.

Shape suffixes: N examples, B texts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.train.losses import squared_difference, squared_error
from tasks.base.task import OutputSpec, Postprocessor, Reader
from tasks.base.text_task import LabelledTextTask, warnings_of_equal_labels
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.rows import FileRows, Source
from tasks.data.windows import Windows
from tasks.graph.heads import SequenceClassifier
from tasks.metrics.regression import mean_squared_error, pearson, spearman
from tasks.model.task_model import TaskModel

LARGEST = float(np.finfo(np.float32).max)


class RegressionReader(Reader["RegressionTask"]):
    """Reader of texts with a number."""

    def label_of(self, label: str) -> float:
        """Return the number.

        Raises:
            ValueError: If it is not a finite float32.
        """
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


class RegressionPostprocessor(Postprocessor["RegressionTask"]):
    """Postprocessor of numbers."""

    description = "Predicts a number for a text or for a pair of texts."
    outputs = {"value": OutputSpec("predicted number")}

    best_metric = "spearman"

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return Pearson's and Spearman's correlation and the mean squared error."""
        values_N, predictions_N = data.labels["value"], outputs["value"][:, 0]
        return {
            # The functions' names are the metrics' names in files.
            metric.__name__: metric(values_N, predictions_N)
            for metric in (pearson, spearman, mean_squared_error)
        }

    def predictions(
        self, texts: Tensors, windows: Windows, outputs: Tensors
    ) -> dict[str, tf.Tensor]:
        """Return the predicted value, float32 `(B,)`."""
        return {"value": outputs["value"][:, 0]}

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return infinity, since nothing is decided."""
        return tf.fill(tf.shape(predictions["value"]), float("inf"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionTask(LabelledTextTask):
    """Prediction of a number per text or pair of texts."""

    kind = "regression"
    reader_class = RegressionReader
    postprocessor_class = RegressionPostprocessor
    losses = {"value": squared_error}
    soft_losses = {"value": squared_difference}
    can_stream = True

    @classmethod
    def from_data(cls, data: Source | FileRows, **options: Any) -> Self:
        """Create the task from its options alone; nothing is read from the file."""
        return cls(**options)

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return the values and weights of 1, float32 `(N,)`."""
        values = np.array(examples.labels, np.float32)
        return {"value": values}, {"value": np.ones(len(values), np.float32)}

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning if all rows have the same value."""
        return warnings_of_equal_labels(data.examples.labels)

    def build_model(self, config: BertConfig, dtype: str = "float32") -> SequenceClassifier:
        """Build the encoder with one linear output."""
        model = SequenceClassifier(config, 1, output="value", name=self.kind, dtype=dtype)
        model.build()
        return model


@keras.saving.register_keras_serializable("bert_tf")
class TextRegressor(TaskModel):
    """Regressor: one number per text or pair.

    Options of `from_pretrained`:
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = RegressionTask
    options = ("pairs", "truncation")
