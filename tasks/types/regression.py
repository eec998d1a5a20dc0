"""Regression: a number for a text or a pair, as STS-B's similarity (Devlin et al. 2019, 4.1).

The output is the number itself, trained with squared error; it is neither clipped nor scaled. With
the activation "sigmoid", as of cross-encoders, it is from 0 to 1.

Shape suffixes: N examples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from bert_tf.config import BertConfig
from bert_tf.train.losses import squared_difference, squared_error
from tasks.base.task import LabelledTextTask, OutputSpec, check_choice, described
from tasks.data.examples import Arrays, EncodedExamples, Tensors
from tasks.data.windows import Windows
from tasks.graph.heads import SequenceClassifier
from tasks.metrics.regression import mean_squared_error, pearson, spearman
from tasks.model.task_model import TaskModel

# Name in Keras by that in task.json.
ACTIVATIONS = {"identity": None, "sigmoid": "sigmoid"}
LARGEST = float(np.finfo(np.float32).max)


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
    can_stream = True
    best_metric = "spearman"

    activation: str = described("activation of the output", "identity")

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, ACTIVATIONS)

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
        activation: "identity", or "sigmoid" for numbers from 0 to 1.
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
    """

    task_class = RegressionTask
    options = ("activation", "pairs", "truncation")
