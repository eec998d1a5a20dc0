"""Classification of a text, or of a pair, into one of two or more labels (Devlin et al. 2019, 4.1).

Two labels: one sigmoid logit, which stands for the second, and binary cross-entropy. More: softmax.

Legend: B texts, C labels.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train.losses import sigmoid_cross_entropy, softmax_cross_entropy
from tasks.forms.glue import GLUE
from tasks.forms.records import strict
from tasks.heads import TextModel
from tasks.metrics import labels as label_metrics
from tasks.texts import TextTask, raw_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(TextTask):
    """One classification task: its columns, its labels in order, and all that follows from them."""

    labels: tuple[str, ...]

    kind = "classification"

    @classmethod
    def from_data(cls, path, *, labels=(), **options):
        """The task that a training file shows: the labels as given, or those in the file in order.

        Raises UserError if the file holds fewer than two labels, or one that is not among `labels`.
        """
        task = cls(labels=tuple(labels), **options)
        found = set()
        for row in strict(raw_rows(task, path, labelled=True)):
            label = row.values[task.label_column]
            if not label.strip():
                raise UserError(
                    f"{row.where}: column {task.label_column!r} is empty, wanted a label"
                )
            found.add(label)
        if len(found) < 2:
            raise UserError(
                f"{path}: every row has the label {min(found)!r}; there is nothing to tell apart"
            )
        published = GLUE[task.form].labels if task.form in GLUE else ()
        return dataclasses.replace(task, labels=task.labels or published or _in_order(found))

    @property
    def is_binary(self):
        return len(self.labels) == 2

    @property
    def best_metric(self):
        return self._metric_names[0]

    @property
    def _metric_names(self):
        """GLUE's own for its data sets."""
        if self.form in GLUE:
            return GLUE[self.form].metrics
        return ("accuracy", "f1" if self.is_binary else "macro_f1")

    @property
    def losses(self):
        return {"label": sigmoid_cross_entropy if self.is_binary else softmax_cross_entropy}

    def description(self):
        return f"; labels {', '.join(self.labels)}"

    def label_of(self, text):
        if text not in self.labels:
            raise ValueError(f"label {text!r} is none of the task's: {', '.join(self.labels)}")
        return self.labels.index(text)

    def targets(self, examples, windows):
        labels = np.array(examples.labels, np.int32)
        return {"label": labels}, {"label": np.ones(len(labels), np.float32)}

    def build_model(self, config, dtype="float32"):
        units = 1 if self.is_binary else len(self.labels)
        model = TextModel(config, units, name=self.kind, dtype=dtype)
        model.build()
        return model

    def metrics(self, data, outputs):
        labels_N = data.labels["label"]
        predictions_N = self.probabilities(outputs).numpy().argmax(-1)
        return {name: _METRICS[name](labels_N, predictions_N) for name in self._metric_names}

    def probabilities(self, outputs):
        """{"label": logits} -> float32 [B, C], C = 2 if binary."""
        logits = outputs["label"]
        if not self.is_binary:
            return tf.nn.softmax(logits)
        positive_B1 = tf.sigmoid(logits)
        return tf.concat([1.0 - positive_B1, positive_B1], axis=1)

    def answer(self, texts, windows, outputs):
        probabilities_BC = self.probabilities(outputs)
        names_C = tf.constant(self.labels)
        return {
            "label": tf.gather(names_C, tf.argmax(probabilities_BC, axis=-1)),
            "score": tf.reduce_max(probabilities_BC, axis=-1),
            "probabilities": probabilities_BC,
            "labels": tf.repeat(names_C[tf.newaxis], tf.shape(probabilities_BC)[0], axis=0),
        }


_METRICS = {
    "accuracy": label_metrics.accuracy,
    "f1": functools.partial(label_metrics.f1, positive=1),
    "macro_f1": label_metrics.macro_f1,
    "matthews": label_metrics.matthews_correlation,
}


def _in_order(labels):
    """As numbers if all are integers, else as text."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels))
