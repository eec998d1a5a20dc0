"""Regression: a number for a text or a pair, as STS-B's similarity (Devlin et al. 2019, 4.1).

The output is the number itself, learned by squared error; nothing cuts or scales it.

Legend: N examples, B texts.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.train.losses import squared_error
from tasks.heads import SequenceClassifier
from tasks.metrics.regression import mean_squared_error, pearson, spearman
from tasks.text_task import TextTask

LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(TextTask):
    """A number for a text, or for a pair of texts."""

    kind = "regression"
    best_metric = "spearman"
    losses = {"value": squared_error}

    @classmethod
    def from_data(cls, path, **options):
        """The task as the options say it: there is nothing to learn from the file."""
        return cls(**options)

    def label_of(self, text):
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not abs(value) <= LARGEST:
            raise ValueError(f"label {text!r:.80}, wanted a number")
        return value

    def targets(self, examples, windows):
        values = np.array(examples.labels, np.float32)
        return {"value": values}, {"value": np.ones(len(values), np.float32)}

    def build_model(self, config, dtype="float32"):
        model = SequenceClassifier(config, 1, output="value", name=self.kind, dtype=dtype)
        model.build()
        return model

    def metrics(self, data, outputs):
        values_N, predictions_N = data.labels["value"], outputs["value"][:, 0]
        return {
            metric.__name__: metric(values_N, predictions_N)
            for metric in (pearson, spearman, mean_squared_error)
        }

    def serving_outputs(self, texts, windows, outputs):
        return {"value": outputs["value"][:, 0]}

    def margin(self, predictions, windows, outputs):
        """Nothing is decided."""
        return tf.fill(tf.shape(predictions["value"]), float("inf"))
