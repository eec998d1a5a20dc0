"""What is unusual: texts unlike those of the normal classes, the only ones that training sees.

The score is an autoencoder's error on the frozen encoder's vectors (tasks.autoencoder); from a
threshold on it is an alarm. Legend: B texts, N examples.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train.losses import identity_loss
from tasks.autoencoder import AutoencoderModel
from tasks.examples import Example
from tasks.metrics.labels import ratio
from tasks.metrics.ranking import pr_auc, roc_auc
from tasks.metrics.thresholds import threshold_for_false_alarms
from tasks.readers.records import BadRow, as_label, raise_bad_rows
from tasks.readers.tables import read_rows
from tasks.text_task import TextTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anomaly(TextTask):
    """Rows whose label is none of `normal_labels` are unusual.

    Without a `label_column` that is "label" where a file has one; in a file without labels every
    row is normal. `threshold` lets a share of at most `false_alarm_rate` of the normal rows of
    dev pass as unusual. The best checkpoint is that of the best ranking of dev's unusual rows.
    """

    label_column: str | None = None
    normal_labels: tuple[str, ...] = ()
    latent_dim: int = 32
    false_alarm_rate: float = 0.05
    threshold: float | None = None

    kind = "anomaly"
    best_metric = "roc_auc"
    tunable_fields = ("threshold",)
    predicts_untuned = False
    trains_on_vectors = True

    @classmethod
    def from_data(cls, path, **options):
        """The task that a training file shows.

        Raises UserError if one of the normal labels is not in it, or if none are given and it has
        several.
        """
        normal_labels = tuple(map(as_label, options.pop("normal_labels", ())))
        task = cls(normal_labels=normal_labels, **options)
        labels = {label for _, label in raise_bad_rows(task._labelled(path)) if label is not None}
        if not labels:
            return task
        found = ", ".join(sorted(labels)[:10]) + ", ..." * (len(labels) > 10)
        if not task.normal_labels:
            if len(labels) > 1:
                raise UserError(
                    f"{path}: has the labels {found}; say with --normal_labels which of them are "
                    "normal"
                )
            return dataclasses.replace(task, normal_labels=tuple(labels))
        for label in task.normal_labels:
            if label not in labels:
                raise UserError(
                    f"--normal_labels: no row of {path} has the label {label!r}; there are {found}"
                )
        return task

    @property
    def losses(self):
        return {"score": identity_loss}

    def iter_examples(self, path, labelled):
        if not labelled:
            yield from super().iter_examples(path, labelled)
            return
        for item in self._labelled(path):
            if isinstance(item, BadRow):
                yield item
                continue
            row, label = item
            if label is not None and not self.normal_labels:
                yield BadRow(
                    row.location,
                    f"label {label!r}, but the rows of training had none; say with "
                    "--normal_labels which labels are normal",
                )
                continue
            # Earlier versions saved them as read.
            is_unusual = label is not None and label not in map(as_label, self.normal_labels)
            texts = {"text": row.values[self.text_columns[0]]}
            yield Example(texts, int(is_unusual), row.location)

    def _labelled(self, path):
        """Yields (Row, its label, None where the file has none), or a BadRow."""
        column = self.label_column or "label"
        required, optional = ((column,), ()) if self.label_column else ((), (column,))
        columns = (*self.text_columns, *required)
        has_labels = None
        for row in read_rows(path, columns, unescape_html=self.unescape_html, optional=optional):
            if isinstance(row, BadRow):
                yield row
                continue
            label = row.values.get(column)
            if has_labels is None:
                has_labels = label is not None
            if (label is not None) != has_labels:
                which = "no label, but the rows" if has_labels else "a label, but no row"
                yield BadRow(row.location, f"has {which} before it in column {column!r}")
            elif label is not None and not as_label(label):
                yield BadRow(row.location, f"column {column!r} is empty, wanted a label")
            else:
                yield row, label if label is None else as_label(label)

    def select_training_examples(self, examples):
        return examples.filter(lambda number: not examples.labels[number])

    def targets(self, examples, windows):
        """The labels, 1 = unusual, are for the metrics; the loss is that of the normal."""
        is_unusual_N = np.array(examples.labels, np.int32)
        return {"score": is_unusual_N}, {"score": (1 - is_unusual_N).astype(np.float32)}

    def build_model(self, config, dtype="float32"):
        if self.latent_dim >= config.hidden_size:
            raise UserError(
                f"--latent_dim={self.latent_dim}: wanted less than {config.hidden_size}, the size "
                "of "
                "the encoder's vectors"
            )
        model = AutoencoderModel(config, self.latent_dim, name=self.kind, dtype=dtype)
        model.build()
        return model

    def init_head(self, model, encoded):
        model.adapt(encoded.vectors_SH)

    def metrics(self, data, outputs):
        """Areas under the curves, also of what the autoencoder has to beat; rates once decided."""
        is_unusual_N = data.labels["score"] == 1
        result = {
            "roc_auc": roc_auc(is_unusual_N, outputs["score"]),
            "pr_auc": pr_auc(is_unusual_N, outputs["score"]),
            **{
                f"{name}_roc_auc": roc_auc(is_unusual_N, outputs[name])
                for name in ("mean_distance", "pca")
            },
        }
        if self.threshold is None:
            return result
        is_anomaly_N = self.is_anomaly(outputs["score"])
        return {
            **result,
            **{
                name: float(ratio(np.sum(is_anomaly_N & which_N), np.sum(which_N)))
                for name, which_N in (
                    ("false_alarm_rate", ~is_unusual_N),
                    ("detection_rate", is_unusual_N),
                )
            },
        }

    def is_anomaly(self, scores):
        """float32 [B], an array or a tensor -> bool [B]. Raises UserError if not decided yet."""
        if self.threshold is None:
            raise UserError(
                "the threshold is not decided yet, which is done when training ends; "
                "run the same tasks.finetune again"
            )
        return scores >= self.threshold

    def check_dev(self, examples):
        if all(examples.labels):
            raise UserError(
                "--dev: the first file holds no normal row, from which the threshold is decided; "
                "name one that does, and a new --output_dir"
            )
        if not any(examples.labels):
            return ["no row is unusual: nothing says how well the unusual is found"]
        return []

    def tune(self, data, outputs):
        is_normal_N = data.labels["score"] == 0
        threshold = threshold_for_false_alarms(outputs["score"][is_normal_N], self.false_alarm_rate)
        return dataclasses.replace(self, threshold=threshold)

    def serving_outputs(self, texts, windows, outputs):
        return {"score": outputs["score"], "is_anomaly": self.is_anomaly(outputs["score"])}

    def margin(self, predictions, windows, outputs):
        """By the score's part of the threshold, since it is no probability."""
        return tf.abs(predictions["score"] / self.threshold - 1.0)

    def description(self):
        if not self.normal_labels:
            return "; no labels in --train: every row of it is normal"
        return f"; normal is {', '.join(self.normal_labels)}"

    def warning(self, metrics):
        if metrics["pr_auc"] == 0:
            return "no row of dev is unusual: nothing says how well the unusual is found"
        others = {
            "the distance to the mean": metrics["mean_distance_roc_auc"],
            "PCA of equal width": metrics["pca_roc_auc"],
        }
        better = [
            f"{name} ({value:.4f})" for name, value in others.items() if value >= metrics["roc_auc"]
        ]
        if better:
            return (
                f"the autoencoder's ROC-AUC ({metrics['roc_auc']:.4f}) does not beat "
                f"{' and '.join(better)}: it is not worth having here"
            )
        return None
