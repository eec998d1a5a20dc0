"""Anomaly detection: training sees normal texts only.

The score of a text is the reconstruction error of an autoencoder on features of the frozen encoder;
a text is an anomaly if its score reaches a threshold.

Shape suffixes: B texts, b texts of a batch without padding, N examples or training texts, S
samples, H hidden size, K size of the code.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.model.dense import dense
from bert_tf.train.losses import identity_loss
from bert_tf.weights.pretrained_encoder import Encoder
from tasks.base.plots import Plot, draw_histogram
from tasks.base.task import OutputSpec, TextTask, check_positive, described
from tasks.data.examples import HOST, Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.memory import is_missing
from tasks.data.readers.rows import (
    BadRow,
    Example,
    FileRows,
    Source,
    as_label,
    raise_bad_rows,
)
from tasks.data.windows import Windows
from tasks.graph.evaluation import Evaluator
from tasks.graph.heads import mean_of_tokens
from tasks.metrics.classification import pr_auc, roc_auc
from tasks.metrics.thresholds import threshold_for_false_alarms
from tasks.model.task_model import TaskModel

INNER_SIZE = 256
_SET_NORMAL_LABELS = "Set --normal_labels to those of normal rows"


class AutoencoderModel(keras.Model):
    """Autoencoder on the features of a frozen encoder.

    A feature is the mean of the last layer over all tokens, normalized to length 1, because the
    norm of the mean depends on the length of the text. The encoder is frozen; otherwise it would
    learn to map all texts to one feature.

    Encoder and decoder are each a linear map plus a correction by a hidden gelu layer. The
    corrections start at 0 and `adapt` starts the maps with PCA, so training learns what PCA lacks.

    Args:
        config: Configuration of the encoder.
        latent_dim: Size of the code, less than hidden_size.
        **kwargs: Arguments of keras.Model.
    """

    def __init__(self, config: BertConfig, latent_dim: int, **kwargs):
        # With autocast, features would be cast to bfloat16 under a mixed-precision policy.
        super().__init__(autocast=False, **kwargs)
        self.config, self.latent_dim = config, latent_dim
        self.encoder = Encoder(self.config, dtype=self.dtype_policy)
        self.encoder.trainable = False
        self.code = _Corrected(config, latent_dim, dtype="float32", name="code")
        self.reconstruction = _Corrected(
            config, config.hidden_size, dtype="float32", name="reconstruction"
        )
        self.build()

    def build(self, inputs_shape: object = None) -> None:
        """Create all weights; shapes follow from the configuration."""
        hidden_size = self.config.hidden_size
        self.encoder.build()
        self.code.build((None, hidden_size))
        self.reconstruction.build((None, self.latent_dim))

        def fixed(name, shape, initializer):
            return self.add_weight(
                shape=shape, name=name, initializer=initializer, trainable=False, dtype="float32"
            )

        self.mean_H = fixed("mean", (hidden_size,), "zeros")
        self.spread = fixed("spread", (), "ones")
        self.components_HK = fixed("components", (hidden_size, self.latent_dim), "zeros")

    @property
    def is_new(self) -> bool:
        """Whether nothing was learned: the corrections are still 0."""
        return not np.any(self.code.correction.kernel)

    def adapt(self, vectors_NH: np.ndarray | tf.Tensor) -> None:
        """Fit mean, spread and components to features `(N, H)`, and start the maps with PCA."""
        vectors_NH = np.asarray(vectors_NH)
        # Sums over many texts lose precision in float32.
        mean_H = vectors_NH.mean(axis=0, dtype=np.float64).astype(np.float32)
        centered_NH = vectors_NH - mean_H
        self.mean_H.assign(mean_H)
        self.spread.assign(np.sqrt(np.mean(centered_NH**2, dtype=np.float64)) or 1.0)
        # eigh returns eigenvectors as columns, in ascending order of their eigenvalues.
        directions_HH = np.linalg.eigh(centered_NH.T @ centered_NH)[1]
        components_HK = directions_HH[:, : -self.latent_dim - 1 : -1]
        self.components_HK.assign(components_HK)
        self.code.linear.kernel.assign(components_HK)
        self.reconstruction.linear.kernel.assign(components_HK.T)

    def call(
        self, inputs: Mapping[str, tf.Tensor], training: bool = False, seed: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Compute anomaly scores.

        The first three outputs are mean squares over H of standardized features, that is, after
        subtracting the training mean and dividing by the training spread.

        Args:
            inputs: Batch in either layout, or `{"vector": (B, H)}` with precomputed features.
            training: Ignored, as is the seed; there is no dropout.
            seed: Passed by the train step.

        Returns:
            Dict of float32: `score` `(B,)`, reconstruction error of the autoencoder; `pca` `(B,)`,
            reconstruction error with K principal components; `mean_distance` `(B,)`, squared
            distance to the training mean; `vector` `(B, H)`, the features.
        """
        vectors_BH = self._vectors(inputs)
        x_BH = (vectors_BH - self.mean_H) / self.spread
        projected_BH = tf.matmul(
            tf.matmul(x_BH, self.components_HK), self.components_HK, transpose_b=True
        )
        return {
            "score": _mean_square(x_BH - self.reconstruction(self.code(x_BH))),
            "pca": _mean_square(x_BH - projected_BH),
            "mean_distance": _mean_square(x_BH),
            "vector": vectors_BH,
        }

    def _vectors(self, inputs):
        if "vector" in inputs:
            return tf.cast(inputs["vector"], tf.float32)
        means_BH = mean_of_tokens(self.encoder(inputs)["sequence"], inputs)
        return tf.math.l2_normalize(means_BH, axis=-1)


class _Corrected(keras.layers.Layer):
    """Linear map plus a correction by a hidden gelu layer."""

    def __init__(self, config, units, **kwargs):
        super().__init__(**kwargs)
        self.linear, self.inner, self.correction = (
            dense(config, size, name, "float32", activation)
            for name, size, activation in (
                ("linear", units, None),
                ("inner", INNER_SIZE, "gelu"),
                ("correction", units, None),
            )
        )

    def build(self, input_shape):
        self.linear.build(input_shape)
        self.inner.build(input_shape)
        self.correction.build((None, INNER_SIZE))
        self.correction.kernel.assign(tf.zeros_like(self.correction.kernel))

    def call(self, x):
        return self.linear(x) + self.correction(self.inner(x))


def _mean_square(x_BH):
    return tf.reduce_mean(tf.square(x_BH), axis=-1)


class FeatureExamples(EncodedExamples):
    """Examples as features of the frozen encoder: batches of {"vector": float32 (B, H)}.

    The features are computed once, at first use, because a resumed run restores its weights only
    then. All S vectors stay in memory.
    """

    def __init__(self, encoded: EncodedExamples, evaluator: Evaluator):
        """Wrap token ids, and the evaluator of an `AutoencoderModel`."""
        vars(self).update(vars(encoded))
        self.encoded, self.evaluator = encoded, evaluator

    @functools.cached_property
    def vectors_SH(self) -> tf.Tensor:
        """Features of all samples, float32 (S, H)."""
        self.evaluator.log(f"extracting features of {len(self)} rows, once")
        vectors_SH = self.evaluator.outputs(self.encoded)["vector"]
        with tf.device(HOST):
            return tf.constant(vectors_SH)

    def _labelled_batches(self, rows, batch_size, seed):
        """Return batches to train on; a new head starts as the PCA of the features."""
        if self.evaluator.model.is_new:
            self.evaluator.model.adapt(self.vectors_SH)
        return super()._labelled_batches(rows, batch_size, seed)

    def _inputs(self, batch_size):
        vectors_SH = self.vectors_SH  # Computed eagerly, outside of the dataset's graph.
        return lambda numbers_b: {"vector": tf.gather(vectors_SH, numbers_b)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnomalyTask(TextTask):
    """Detection of rows whose label is not in `normal_labels`.

    In a file without labels, every row is normal. No `label_column` means "label" in files that
    have it.
    """

    normal_labels: tuple[str, ...] = ()  # Empty if the training file has no labels.
    latent_dim: int = 32  # Size of the autoencoder's code.
    false_alarm_rate: float = described(
        "maximum fraction of normal dev texts above the threshold", 0.05
    )
    threshold: float | None = described("minimum score of an anomaly", None)

    kind = "anomaly"
    description = "Detects texts that differ from the normal texts of the training data."
    outputs = {
        "score": OutputSpec("anomaly score: the reconstruction error of the text"),
        "is_anomaly": OutputSpec("whether the score reaches the threshold"),
    }
    best_metric = "roc_auc"
    losses = {"score": identity_loss}
    tunable_fields = {"threshold": ()}

    def __post_init__(self) -> None:
        check_positive("latent_dim", self.latent_dim)
        if not 0 < self.false_alarm_rate < 1:
            raise UserError(
                f"false_alarm_rate={self.false_alarm_rate}: expected a number > 0 and < 1"
            )

    def summary(self) -> str:
        """Return the normal labels for the log."""
        if not self.normal_labels:
            return "; no labels in --train: all rows are normal"
        return f"; normal labels {', '.join(self.normal_labels)}"

    @classmethod
    def from_data(cls, data: Source | FileRows, **options: Any) -> Self:
        """Create the task from a training file; `normal_labels` defaults to its only label.

        Raises:
            UserError: A normal label does not occur in the file, or the file has several labels
                and none is declared normal.
        """
        task, labels = cls._with_labels(data, **options)
        if len(labels) > 1 and not task.normal_labels:
            raise UserError(f"{data}: several labels: {_joined(labels)}. {_SET_NORMAL_LABELS}")
        for label in task.normal_labels:
            if labels and label not in labels:
                raise UserError(
                    f"--normal_labels: no row of {data} has label {label!r}. Found: "
                    f"{_joined(labels)}"
                )
        return dataclasses.replace(task, normal_labels=task.normal_labels or tuple(labels))

    @classmethod
    def for_reading(cls, data: Source | FileRows, **options: Any) -> Self:
        """Create a task that reads a file; `normal_labels` are required if it has labels."""
        task, labels = cls._with_labels(data, **options)
        if labels and not task.normal_labels:
            raise UserError(f"{data}: labels: {_joined(labels)}. {_SET_NORMAL_LABELS}")
        return task

    @classmethod
    def _with_labels(cls, data, normal_labels=(), **options) -> tuple[Self, list[str]]:
        """Return a task, and the labels of a file, sorted."""
        task = cls(normal_labels=tuple(map(as_label, normal_labels)), **options)
        rows = raise_bad_rows(task.iter_rows(data, labelled=True))
        return task, sorted({row.label for row in rows if row.label is not None})

    def label_of(self, label: str | None) -> int:
        """Return whether a label, None in a file without labels, is one of an anomaly."""
        if label is not None and not self.normal_labels:
            raise ValueError(
                f"label {label!r}, but the training rows had no labels; train with --normal_labels"
            )
        return int(label is not None and label not in self.normal_labels)

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> int:
        """Return 1 for an anomaly and 0 for a normal row, given as a bool, 0 or 1."""
        if is_missing(value) or value not in (0, 1):
            raise ValueError(f"label {value!r:.80}: expected True for an anomaly, or False")
        return int(value)

    def default_labels(self, x: Any, count: int) -> list:
        """Return 0 for each row: all are normal."""
        return [0] * count

    def iter_rows(self, data: Source | FileRows, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield the rows of a file, of which all or none have a label."""
        column = self.label_column or "label"
        has_labels = None
        for row in super().iter_rows(data, labelled):
            if not labelled or isinstance(row, BadRow):
                yield row
                continue
            label = row.label
            if has_labels is None:
                has_labels = label is not None
            if (label is not None) != has_labels:
                which = "no label, unlike the rows" if has_labels else "a label, unlike the rows"
                yield BadRow(row.location, f"{which} before it in column {column!r}")
            elif label is not None and not as_label(label):
                yield BadRow(row.location, f"column {column!r} is empty; expected a label")
            else:
                yield Example(row.texts, label if label is None else as_label(label), row.location)

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the normal examples."""
        return examples.filter(lambda number: not examples.labels[number])

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return labels, int32 `(N,)`, 1 for anomalies, and weights: the loss is of normal rows."""
        is_unusual_N = np.array(examples.labels, np.int32)
        return {"score": is_unusual_N}, {"score": (1 - is_unusual_N).astype(np.float32)}

    def build_model(self, config: BertConfig, dtype: str = "float32") -> AutoencoderModel:
        """Return encoder and autoencoder; raises UserError unless latent_dim < hidden_size."""
        if self.latent_dim >= config.hidden_size:
            raise UserError(
                f"--latent_dim={self.latent_dim}: expected less than {config.hidden_size}, the "
                "encoder's hidden size"
            )
        return AutoencoderModel(config, self.latent_dim, name=self.kind, dtype=dtype)

    def training_data(self, encoded: EncodedExamples, evaluator: Evaluator) -> "FeatureExamples":
        """Return the examples as features of the frozen encoder."""
        return FeatureExamples(encoded, evaluator)

    def is_anomaly(self, scores: np.ndarray | tf.Tensor) -> np.ndarray | tf.Tensor:
        """Compare scores, float32 `(B,)`, to the threshold; raises UserError before tuning."""
        if self.threshold is None:
            raise UserError(
                "threshold not tuned yet: call tune, or fit with validation_data; bert-tf finetune "
                "tunes it at the end of training, rerun the same command"
            )
        return scores >= self.threshold

    def check_dev(self, examples: Examples, name: str = "--dev: the first file") -> list[str]:
        """Return a warning if no dev row is an anomaly; raises UserError if all are."""
        if all(examples.labels):
            raise UserError(f"{name} has no normal row to tune the threshold on; choose other rows")
        if not any(examples.labels):
            return ["no anomalies among the rows: detection cannot be evaluated"]
        return []

    def tune(self, data: EncodedExamples, outputs: Arrays) -> "AnomalyTask":
        """Return the task with the threshold tuned on the normal dev rows."""
        is_normal_N = data.labels["score"] == 0
        threshold = threshold_for_false_alarms(outputs["score"][is_normal_N], self.false_alarm_rate)
        return dataclasses.replace(self, threshold=threshold)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return the score and the decision per text."""
        return {"score": outputs["score"], "is_anomaly": self.is_anomaly(outputs["score"])}

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the distance of each score to the threshold, relative to the threshold."""
        return tf.abs(predictions["score"] / self.threshold - 1.0)

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return areas under the curves, those of two baselines, and rates at the threshold."""
        is_unusual_N = data.labels["score"] == 1
        result = {
            "roc_auc": roc_auc(is_unusual_N, outputs["score"]),
            "pr_auc": pr_auc(is_unusual_N, outputs["score"]),
            "mean_distance_roc_auc": roc_auc(is_unusual_N, outputs["mean_distance"]),
            "pca_roc_auc": roc_auc(is_unusual_N, outputs["pca"]),
        }
        if self.threshold is not None:
            is_anomaly_N = self.is_anomaly(outputs["score"])
            rates = {"false_alarm_rate": ~is_unusual_N, "detection_rate": is_unusual_N}
            for name, which_N in rates.items():
                result[name] = float(np.sum(is_anomaly_N & which_N) / max(np.sum(which_N), 1))
        return result

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return the distribution of the scores of normal texts and of anomalies."""
        is_unusual_N = data.labels["score"] == 1
        scores = {
            "normal": outputs["score"][~is_unusual_N],
            "anomaly": outputs["score"][is_unusual_N],
        }
        return {
            "scores": lambda axes: draw_histogram(axes, scores, "anomaly score", self.threshold)
        }

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning if a baseline ranks as well as the autoencoder."""
        if metrics["pr_auc"] == 0:
            return "no anomalies in the dev rows: detection cannot be evaluated"
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
                f"{' and '.join(better)}; use the simpler method"
            )
        return None


def _joined(labels):
    return ", ".join(labels[:10]) + ", ..." * (len(labels) > 10)


@keras.saving.register_keras_serializable("bert_tf")
class AnomalyDetector(TaskModel):
    """Detector of texts unlike those of training, by an autoencoder on a frozen encoder.

        model = AnomalyDetector.from_pretrained(PATH, latent_dim=4)
        dev = (["My invoice is wrong.", "It rains."], [False, True])
        model.fit(texts, validation_data=dev, epochs=1)
        model.predict(["The sun is shining."])["is_anomaly"]  # bool (1,)

    Options of `from_pretrained`:
        latent_dim: Size of the autoencoder's code.
        false_alarm_rate: Largest fraction of normal validation texts that the threshold flags.

    Labels of `fit` are True for anomalies, which training ignores; without labels all texts are
    normal. The threshold is tuned on validation data, or by `tune`.
    """

    task_class = AnomalyTask
    options = ("latent_dim", "false_alarm_rate")

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Run one step of `fit` on features; raises UserError for token ids."""
        if "vector" not in keras.utils.unpack_x_y_sample_weight(data)[0]:
            raise UserError(
                "x: an autoencoder would learn the anomalies among token ids, too; expected "
                "strings in fit"
            )
        return super().train_step(data)
