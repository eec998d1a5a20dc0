"""Classification of a text, or of a pair, into one of two or more labels (Devlin et al. 2019, 4.1).

Two labels: one sigmoid logit, which stands for the second, and binary cross-entropy. More: softmax.

Legend: B texts, H hidden size, C labels.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import bert_tf.train.optimizer  # noqa: F401  Where a saved, compiled model finds its AdamW.
from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model.encoder import Encoder
from bert_tf.model.layers import dense, dropout
from bert_tf.train.losses import sigmoid_cross_entropy, softmax_cross_entropy
from tasks import metrics
from tasks.examples import Examples
from tasks.forms.records import strict
from tasks.forms.rows import read_rows

HEAD_DROPOUT_PLACE = 2**15  # Beyond any of the encoder's.


@keras.saving.register_keras_serializable("bert_tf")
class Classifier(keras.Model):
    """Encoder, dropout, dense -> {"label": logits float32 [B, C]}, C = 1 if binary."""

    def __init__(self, config, num_logits, name="classification", **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config if isinstance(config, BertConfig) else BertConfig.from_dict(config)
        self.num_logits = num_logits
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.head = dense(self.config, num_logits, "classifier", "float32")

    def build(self, inputs_shape=None):
        self.encoder.build()
        self.head.build((None, self.config.hidden_size))

    def call(self, inputs, training=False, seed=None):
        seed = self.encoder.dropout_seed(training, seed)
        pooled_BH = self.encoder(inputs, training=training, seed=seed, pooled_only=True)["pooled"]
        return {
            "label": self.head(
                dropout(pooled_BH, self.config.hidden_dropout_prob, seed, HEAD_DROPOUT_PLACE)
            )
        }

    def get_config(self):
        return {
            **super().get_config(),
            "config": self.config.to_dict(),
            "num_logits": self.num_logits,
        }


@dataclasses.dataclass(frozen=True)
class Classification:
    """One classification task: its columns, its labels in order, and all that follows from them."""

    text_columns: tuple[str, ...]
    label_column: str
    labels: tuple[str, ...]
    max_seq_length: int

    kind = "classification"
    best_metric = "accuracy"

    @classmethod
    def from_data(cls, path, *, text_columns, label_column, labels, max_seq_length):
        """The task that a training file shows: the labels as given, or those in the file in order.

        Raises UserError if the file holds fewer than two labels, or one that is not among `labels`.
        """
        found = set()
        for row in strict(read_rows(path, (*text_columns, label_column))):
            if not row.values[label_column].strip():
                raise UserError(f"{row.where}: column {label_column!r} is empty, wanted a label")
            found.add(row.values[label_column])
        if len(found) < 2:
            raise UserError(
                f"{path}: every row has the label {min(found)!r}; there is nothing to tell apart"
            )
        return cls(
            tuple(text_columns), label_column, tuple(labels) or _in_order(found), max_seq_length
        )

    @classmethod
    def from_dict(cls, values):
        wanted = sorted(field.name for field in dataclasses.fields(cls))
        if sorted(values) != wanted:
            raise UserError(f"task.json: holds {', '.join(values)}, wanted {', '.join(wanted)}")
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
        )

    def to_dict(self):
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @property
    def is_binary(self):
        return len(self.labels) == 2

    @property
    def input_names(self):
        """What the texts are called in a served request."""
        return ("text",) if len(self.text_columns) == 1 else ("text_a", "text_b")

    @property
    def losses(self):
        return {"label": sigmoid_cross_entropy if self.is_binary else softmax_cross_entropy}

    def read(self, path, labelled=True):
        """Examples of a file. Raises UserError at a label that the task does not have."""
        texts, labels = {name: [] for name in self.input_names}, []
        columns = (*self.text_columns, self.label_column) if labelled else self.text_columns
        for row in strict(read_rows(path, columns)):
            for name, column in zip(self.input_names, self.text_columns, strict=True):
                texts[name].append(row.values[column])
            if labelled:
                label = row.values[self.label_column]
                if label not in self.labels:
                    raise UserError(
                        f"{row.where}: label {label!r} is none of the task's: "
                        f"{', '.join(self.labels)}"
                    )
                labels.append(self.labels.index(label))
        return Examples(texts, {"label": np.array(labels, np.int32)} if labelled else {})

    def build_model(self, config, dtype="float32"):
        model = Classifier(config, 1 if self.is_binary else len(self.labels), dtype=dtype)
        model.build()
        return model

    def metrics(self, labels, outputs):
        """{name: figure} from {"label": ids [N]} and {"label": logits [N, C]}."""
        labels_N, logits = labels["label"], outputs["label"]
        losses_N = self.losses["label"](labels_N, logits).numpy()
        predictions_N = self.probabilities(outputs).numpy().argmax(-1)
        result = {"accuracy": metrics.accuracy(labels_N, predictions_N)}
        if self.is_binary:
            result["f1"] = metrics.f1(labels_N, predictions_N, positive=1)
        else:
            result["macro_f1"] = metrics.macro_f1(labels_N, predictions_N)
        return {**result, "loss": float(losses_N.mean())}

    def probabilities(self, outputs):
        """{"label": logits} -> float32 [B, C], C = 2 if binary."""
        logits = outputs["label"]
        if not self.is_binary:
            return tf.nn.softmax(logits)
        positive_B1 = tf.sigmoid(logits)
        return tf.concat([1.0 - positive_B1, positive_B1], axis=1)

    def answer(self, outputs):
        """What predict writes and the served model returns; see the README for the fields."""
        probabilities_BC = self.probabilities(outputs)
        names_C = tf.constant(self.labels)
        return {
            "label": tf.gather(names_C, tf.argmax(probabilities_BC, axis=-1)),
            "score": tf.reduce_max(probabilities_BC, axis=-1),
            "probabilities": probabilities_BC,
            "labels": tf.repeat(names_C[tf.newaxis], tf.shape(probabilities_BC)[0], axis=0),
        }


def _in_order(labels):
    """As numbers if all are integers, else as text."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels))
