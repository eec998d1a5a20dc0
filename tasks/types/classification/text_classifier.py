"""Classification of a text or pair (Devlin et al. 2019, 4.1).

Two labels: one sigmoid logit, of the second label. More: softmax. With `multi_label` a row has any
number of labels, or none: one sigmoid logit per label.

Shape suffixes: B texts, N examples, C labels, K labels with a threshold.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.train.losses import (
    multi_label_cross_entropy,
    sigmoid_cross_entropy,
    sigmoid_divergence,
    softmax_cross_entropy,
    softmax_divergence,
)
from tasks.base.plots import (
    MAX_LABELS,
    Plot,
    draw_confusion_matrix,
    draw_precision_recall,
    draw_reliability,
)
from tasks.base.task import (
    LOG,
    LabelledTextTask,
    Loss,
    OutputSpec,
    check_choice,
    described,
    top2_gap,
)
from tasks.base.task_types import MEAN_POOLING_RATE
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.labels import LabelSpace
from tasks.data.readers.glue import GLUE
from tasks.data.readers.memory import as_list, label_names
from tasks.data.readers.rows import FileRows, Source, as_label, hot_columns, raise_bad_rows
from tasks.data.windows import Windows
from tasks.graph.heads import TEXT_POOLING, SequenceClassifier
from tasks.metrics import classification
from tasks.metrics.calibration import MIN_TEMPERATURE, bound_of_temperature, fit_temperature
from tasks.metrics.thresholds import best_threshold, parse_objective
from tasks.model.task_model import TaskModel
from tasks.types.classification import class_imbalance

BETWEEN_LABELS = "|"
# By the function from logits to probabilities.
_LOSSES: dict[str, Loss] = {
    "multi_label": multi_label_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
    "softmax": softmax_cross_entropy,
}


class Decision(NamedTuple):
    """Predictions for B texts.

    Attributes:
        probabilities: float32 `(B, C)`, after temperature scaling.
        label: int32 `(B,)`, id of the predicted label.
        score: float32 `(B,)`, probability of the predicted label.
        margin: float32 `(B,)`, change of probability that would change the prediction.
        selected: bool `(B, C)`, the predicted labels of multi-label tasks, else None.
    """

    probabilities: tf.Tensor
    label: tf.Tensor
    score: tf.Tensor
    margin: tf.Tensor
    selected: tf.Tensor | None = None


def decide_one(
    logits: tf.Tensor,
    temperature: float = 1.0,
    positive: int | None = None,
    threshold: float = 0.5,
) -> Decision:
    """Predict one label per text; ties go to the first label.

    Args:
        logits: `(B, C)`, or `(B, 1)` for the second of two labels.
        temperature: Divisor of the logits (Guo et al. 2017).
        positive: Id of the label to predict if its probability >= `threshold`; otherwise the most
            probable other label is predicted. None predicts the most probable label.
        threshold: Probability from which on `positive` is predicted.
    """
    logits = tf.cast(logits, tf.float32) / temperature
    if logits.shape[1] == 1:
        probabilities_BC = tf.sigmoid(tf.concat([-logits, logits], axis=1))
    else:
        probabilities_BC = tf.nn.softmax(logits)
    if positive is None:
        label_B = tf.argmax(probabilities_BC, axis=-1, output_type=tf.int32)
        margin_B = top2_gap(probabilities_BC)
    else:
        is_positive_C = tf.range(probabilities_BC.shape[1]) == positive
        others_BC = tf.where(is_positive_C, -1.0, probabilities_BC)
        above_B = probabilities_BC[:, positive] - threshold
        label_B = tf.where(
            above_B >= 0, positive, tf.argmax(others_BC, axis=-1, output_type=tf.int32)
        )
        margin_B = tf.where(above_B >= 0, above_B, tf.minimum(-above_B, top2_gap(others_BC)))
    return Decision(probabilities_BC, label_B, _of_label(probabilities_BC, label_B), margin_B)


def decide_each(
    logits_BC: tf.Tensor, temperature: float = 1.0, thresholds_C: Sequence[float] | float = 0.5
) -> Decision:
    """Select each label whose probability, of its own sigmoid logit, reaches its threshold.

    The `label` of the decision is the most probable one, even if it is not selected.
    """
    probabilities_BC = tf.sigmoid(tf.cast(logits_BC, tf.float32) / temperature)
    label_B = tf.argmax(probabilities_BC, axis=-1, output_type=tf.int32)
    score_B = _of_label(probabilities_BC, label_B)
    above_BC = probabilities_BC - thresholds_C
    margin_B = tf.minimum(top2_gap(probabilities_BC), tf.reduce_min(tf.abs(above_BC), axis=-1))
    return Decision(probabilities_BC, label_B, score_B, margin_B, probabilities_BC >= thresholds_C)


def _of_label(probabilities_BC, label_B):
    return tf.gather(probabilities_BC, label_B, axis=1, batch_dims=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationTask(LabelledTextTask):
    """Classification into `labels`, whose order defines the label ids; see `TextClassifier`.

    `thresholds` are tuned on dev: for the rare label, which is the second of two labels, or for
    each label with `multi_label`. None means 0.5, or argmax for a rare label.
    """

    labels: tuple[str, ...]
    multi_label: bool = False
    class_weights: tuple[float, ...] = ()
    balanced_sampling: bool = False
    focal_gamma: float = 0.0
    rare_label: str | None = described("label that the threshold applies to", None)
    threshold_objective: str | None = None
    calibrate: bool = False
    temperature: float | None = described("divisor of the logits", None)
    thresholds: tuple[float, ...] | None = described(
        "minimum probability of a label to be returned", None
    )
    pooling: str = described("vector of a text that the head reads", "pooled")

    kind = "classification"
    description = "Predicts the labels of a text or of a pair of texts."
    outputs = {
        "label": OutputSpec("most probable label, or the rare label if it reaches its threshold"),
        "score": OutputSpec("probability of `label`"),
        "probabilities": OutputSpec(
            "probability of each label, in the order of `labels`", in_near_ties=True
        ),
        "labels": OutputSpec("all labels, the same in every row"),
        "selected": OutputSpec("whether each label reaches its own threshold"),
    }
    accuracies = ("label",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.focal_gamma >= 0:
            raise UserError(f"focal_gamma={self.focal_gamma}: expected a number >= 0")
        check_choice("pooling", self.pooling, TEXT_POOLING)

    @classmethod
    def options_from(
        cls,
        source: Mapping[str, Any],
        given: Mapping[str, Any],
        has_trained_pooler: bool = True,
        log: Callable[[str], None] = LOG,
    ) -> dict[str, Any]:
        """Return the pooling of a classifier; for other weights, their pooler decides."""
        if source.get("kind") == cls.kind:
            return {"pooling": source.get("pooling", "pooled")}
        pooling = "pooled" if has_trained_pooler else "mean"
        if "pooling" not in given:
            verb = "was" if has_trained_pooler else "was not"
            log(f"pooling: {pooling}, since the pooler of the weights {verb} trained")
        return {"pooling": pooling}

    @classmethod
    def from_data(
        cls,
        data: Source | FileRows,
        *,
        labels: Sequence[str] = (),
        class_weights: Sequence[str] = (),
        **options: Any,
    ) -> Self:
        """Create the task from options and a training file, by default with the file's labels.

        `class_weights` are strings of numbers, or ("balanced",). Raises UserError on unfit options.
        """
        class_imbalance.check_options(class_weights=class_weights, **options)
        if options.get("rare_label") is not None:
            options["rare_label"] = as_label(options["rare_label"])
        task = cls.for_reading(data, labels=labels, **options)
        counts = task._counts(data)
        if len(counts) < 2:
            only = repr(min(counts)) if counts else "none"
            only += " or none" if counts and task.multi_label else ""
            raise UserError(f"{data}: expected two or more labels. Received: {only}")
        objective = task.threshold_objective or (None if task.rare_label is None else "f1")
        weights = class_imbalance.class_weights_of(
            class_weights, task.labels, [counts[label] for label in task.labels]
        )
        task = dataclasses.replace(task, class_weights=weights, threshold_objective=objective)
        task._check_rare_label()
        return task

    @classmethod
    def for_reading(
        cls, data: Source | FileRows, *, labels: Sequence[str] = (), **options: Any
    ) -> Self:
        """Create a task that reads a file, by default with its labels, of which one is enough.

        Of two labels that are not given, the rare one is the second.
        """
        task = cls(labels=tuple(map(as_label, labels)), **options)
        if task.multi_label and task.file_format in GLUE:
            raise UserError(f"--multi_label: rows of {task.file_format} have exactly one label")
        counts = task._counts(data)
        published = GLUE[task.file_format].labels if task.file_format in GLUE else ()
        found = published or task._hot_columns or _in_order(counts)
        if len(found) == 2 and task.rare_label == found[0]:
            found = found[::-1]
        return dataclasses.replace(task, labels=task.labels or found)

    @property
    def _hot_columns(self):
        return hot_columns(self.label_column, self.multi_label)

    def _counts(self, data):
        """Return the number of rows of a file by label."""
        counts = collections.Counter(dict.fromkeys(self._hot_columns, 0))
        for row in raise_bad_rows(self.iter_rows(data, labelled=True)):
            try:
                counts.update(self.names_in(row.label))
            except ValueError as error:
                raise UserError(f"{row.location}: {error}") from None
        return counts

    @classmethod
    def from_options(
        cls,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        class_weights: Sequence[float] | Mapping[str, float] = (),
        **options: Any,
    ) -> Self:
        """Create the task from the options of `TextClassifier.from_pretrained`."""
        names = label_names(labels)
        if len(names) < 2:
            raise UserError(
                f"labels={labels!r:.80}: expected at least two different names, in a list"
            )
        if isinstance(class_weights, Mapping):
            class_weights = LabelSpace(names).factors(class_weights, "class_weights").tolist()
        if not isinstance(class_weights, str):
            class_weights = as_list(class_weights, "class_weights")
        if class_weights in ("balanced", ["balanced"]):  # The counts of labels are not known.
            raise UserError(
                f"class_weights={class_weights!r}: expected a number per label; use "
                "balanced_sampling=True, which needs none"
            )
        class_imbalance.check_options(class_weights=tuple(map(str, class_weights)), **options)
        if options.get("rare_label") is not None:
            options["rare_label"] = as_label(str(options["rare_label"]))
            options["threshold_objective"] = options.get("threshold_objective") or "f1"
        task = super().from_options(
            max_seq_length=max_seq_length,
            labels=names,
            class_weights=class_imbalance.class_weights_of(
                tuple(map(str, class_weights)), names, counts_C=()
            ),
            **options,
        )
        task._check_rare_label()
        return task

    def _check_rare_label(self):
        """Raise UserError if the rare label is none of the labels, or the first of two."""
        rare_label, labels = self.rare_label, self.labels
        if rare_label is None:
            return
        if rare_label not in labels:
            raise UserError(f"--rare_label={rare_label}: expected one of {', '.join(labels)}")
        if self.is_binary and rare_label != labels[1]:
            raise UserError(
                f"--rare_label={rare_label}: of two labels, the second is the positive label; "
                f"set --labels={labels[1]},{labels[0]}"
            )

    @property
    def has_classes(self) -> bool:
        """Whether each example has one of `labels`."""
        return not self.multi_label

    @property
    def is_binary(self) -> bool:
        """Whether there is one sigmoid logit."""
        return len(self.labels) == 2 and not self.multi_label

    @property
    def positive(self) -> int | None:
        """Id of the one label with a threshold, or None."""
        if self.is_binary:
            return 1
        return None if self.rare_label is None else self.labels.index(self.rare_label)

    @property
    def activation(self) -> str:
        """Function from logits to probabilities, "sigmoid" or "softmax"."""
        return "sigmoid" if self.is_binary or self.multi_label else "softmax"

    def summary(self) -> str:
        """Return labels and class weights for the log."""
        weights = ", ".join(f"{weight:.3g}" for weight in self.class_weights)
        return f"; labels {', '.join(self.labels)}" + (weights and f"; class weights {weights}")

    def label_of(self, label: str | list[str]) -> int | tuple[int, ...]:
        """Return the id of a row's label, or the ids with `multi_label`."""
        numbers = tuple(map(self.label_space.id_of, self.names_in(label)))
        return numbers if self.multi_label else numbers[0]

    @property
    def has_lists_of_labels(self) -> bool:
        """Whether a row has any number of labels."""
        return self.multi_label

    @functools.cached_property
    def label_space(self) -> LabelSpace:
        """The labels as `LabelSpace`."""
        return LabelSpace(self.labels)

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> int | tuple[int, ...]:
        """Return the id of a label or, with `multi_label`, the ids of a row of them."""
        space = self.label_space
        return space.ids_of(value) if self.multi_label else space.id_of(value)

    def batch_labels(self, y: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
        """Return ids, int32 `(B,)`, or 0 and 1 per label, `(B, C)`, with `multi_label`."""
        if self.balanced_sampling:
            raise UserError("x: balanced_sampling needs all rows; expected lists, not a dataset")
        space = self.label_space
        return space.multi_hot_batch(y) if self.multi_label else space.batch(y)

    def decode_label(self, label: Any) -> str | list[str]:
        """Return the name of an id, or the names of several."""
        if self.multi_label:
            return [self.labels[number] for number in label]
        return self.labels[label]

    def names_in(self, value: str | list[str]) -> list[str]:
        """Return the names in a label column; raises ValueError if one is empty or repeated."""
        if isinstance(value, list):
            names = value
        elif self.multi_label:
            names = value.split(BETWEEN_LABELS) if value.strip() else []
        else:
            names = [value]
        names = [as_label(name) for name in names]
        if not all(names):
            several = f", or several separated by {BETWEEN_LABELS}" if self.multi_label else ""
            empty = "contains an empty label" if self.multi_label else "is empty"
            raise ValueError(f"column {self.label_column!r} {empty}; expected a label{several}")
        # Multi-hot rows would otherwise have the two labels 0 and 1.
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"column {self.label_column!r} has {twice[0]!r:.80} twice; write the names of a "
                "row's labels, each once, instead of 0 and 1"
            )
        return names

    @property
    def losses(self) -> dict[str, Loss]:
        """Cross-entropy or focal loss (Lin et al. 2017)."""
        loss = _LOSSES["multi_label" if self.multi_label else self.activation]
        gamma = self.focal_gamma
        return {"label": functools.partial(loss, gamma=gamma) if gamma else loss}

    @property
    def soft_losses(self) -> dict[str, Loss]:
        """Divergence from the teacher's probabilities."""
        is_sigmoid = self.activation == "sigmoid"
        return {"label": sigmoid_divergence if is_sigmoid else softmax_divergence}

    @property
    def tunable_fields(self) -> dict[str, tuple[int, ...]]:
        """Fields fitted on dev after training."""
        fields: dict[str, tuple[int, ...]] = {}
        if self.calibrate:
            fields["temperature"] = ()
        if self.threshold_objective:
            fields["thresholds"] = (len(self.labels) if self.multi_label else 1,)
        return fields

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return labels, int32 `(N,)`, multi-hot `(N, C)` with `multi_label`, and weights of 1."""
        if not self.multi_label:
            return super().targets(examples, windows)
        count = len(examples.labels)
        labels = np.zeros((count, len(self.labels)), np.int32)
        for number, chosen in enumerate(examples.labels):
            labels[number, list(chosen)] = 1
        return {"label": labels}, {"label": np.ones(count, np.float32)}

    @property
    def num_ids(self) -> dict[str, int]:
        """Ids of the labels, or 0 and 1 with `multi_label`."""
        return {"label": 2 if self.multi_label else len(self.labels)}

    def sample_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the class weight of each example, `(N,)`, or None."""
        return np.array(self.class_weights)[examples.labels] if self.class_weights else None

    def epoch_order(self, data: EncodedExamples, rng: np.random.Generator) -> np.ndarray:
        """Return rows `(N,)`; with `balanced_sampling` of each class equally many on average."""
        if not self.balanced_sampling:
            return super().epoch_order(data, rng)
        labels, count = data.examples.labels, len(data)
        _, class_N, counts = np.unique(labels, return_inverse=True, return_counts=True)
        weights_N = 1.0 / counts[class_N]
        return rng.choice(count, count, p=weights_N / np.sum(weights_N))

    def build_model(self, config: BertConfig, dtype: str = "float32") -> SequenceClassifier:
        """Return the encoder with one logit for two labels, otherwise one per label."""
        units = 1 if self.is_binary else len(self.labels)
        options: dict[str, Any] = {"name": self.kind, "dtype": dtype}
        return SequenceClassifier(config, units, pooling=self.pooling, **options)

    @property
    def best_metric(self) -> str:
        """Metric that selects the best checkpoint, PR-AUC if thresholds are tuned on that file."""
        if self.threshold_objective:
            return "pr_auc" if self.multi_label else f"{self._prefix}pr_auc"
        if self.multi_label:
            return "micro_f1"
        # These options trade accuracy for recall of the rare classes.
        if self.class_weights or self.balanced_sampling or self.focal_gamma:
            return "macro_f1"
        return GLUE[self.file_format].metrics[0] if self.file_format in GLUE else "accuracy"

    def decision(self, outputs: Tensors) -> Decision:
        """Apply temperature and thresholds to the logits `outputs["label"]`."""
        temperature = self.temperature or 1.0
        if self.multi_label:
            return decide_each(outputs["label"], temperature, self.thresholds or 0.5)
        positive = self.positive if self.is_binary or self.thresholds else None
        threshold = self.thresholds[0] if self.thresholds else 0.5
        return decide_one(outputs["label"], temperature, positive, threshold)

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return label, score and probabilities per text."""
        decision = self.decision(outputs)
        names_C = tf.constant(self.labels)
        predictions = {
            "label": tf.gather(names_C, decision.label),
            "score": decision.score,
            "probabilities": decision.probabilities,
            "labels": tf.repeat(names_C[tf.newaxis], tf.shape(decision.label)[0], axis=0),
        }
        return {**predictions, "selected": decision.selected} if self.multi_label else predictions

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the probability margin of each decision, `(B,)`."""
        return self.decision(outputs).margin

    def tune(self, data: EncodedExamples, outputs: Arrays) -> "ClassificationTask":
        """Return the task with temperature and thresholds fitted on dev data."""
        labels, task = data.labels["label"], self
        if self.calibrate:
            temperature = fit_temperature(outputs["label"], labels, self.activation)
            task = dataclasses.replace(task, temperature=temperature)
        if self.threshold_objective:
            probabilities_NC = task.decision(outputs).probabilities.numpy()
            if self.multi_label:
                pairs = list(zip(labels.T > 0, probabilities_NC.T, strict=True))
            else:
                pairs = [(labels == self.positive, probabilities_NC[:, self.positive])]
            thresholds = tuple(
                best_threshold(is_positive_N, scores_N, self.threshold_objective)[0]
                for is_positive_N, scores_N in pairs
            )
            task = dataclasses.replace(task, thresholds=thresholds)
        return task

    def check_dev(self, examples: Examples, name: str = "--dev: the first file") -> list[str]:
        """Return one warning per label without a dev row to tune its threshold on."""
        labels, positive = self.labels, self.positive
        if not self.threshold_objective:
            return []
        if not self.multi_label:
            if positive is not None and positive not in examples.labels:
                raise UserError(
                    f"{name} has no row with label {labels[positive]!r} to tune "
                    "--threshold_objective on; choose other rows"
                )
            return []
        found = {number for numbers in examples.labels for number in numbers}
        missing = [label for number, label in enumerate(labels) if number not in found]
        if not found:
            raise UserError(f"{name} has no labels to tune on; choose other rows")
        return [f"no row has label {label!r}: it will never be predicted" for label in missing]

    def tuned_summary(self) -> str:
        """Return the temperature and each threshold with its label for the log."""
        labels = self.labels if self.multi_label else (self.rare_label,)
        parts = [f"temperature {self.temperature:.4g}"] if self.calibrate else []
        parts += [
            f"threshold {threshold:.4g} of label {label!r}"
            for label, threshold in zip(labels, self.thresholds or (), strict=False)
        ]
        return ", ".join(parts)

    def tuning_warnings(self, data: EncodedExamples, outputs: Arrays) -> list[str]:
        """Return a warning if dev data cannot determine the temperature."""
        if not self.calibrate:
            return []
        labels = data.labels["label"]
        bound = bound_of_temperature(outputs["label"], labels, self.activation)
        if bound is None:
            return []
        reason = "too few errors" if bound == MIN_TEMPERATURE else "labels unrelated to the logits"
        return [f"--calibrate: file with {reason} (optimum beyond {bound:g}); using temperature 1"]

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the metrics of tasks.metrics.classification, by name."""
        labels, decision = data.labels["label"], self.decision(outputs)
        probabilities_NC = decision.probabilities.numpy()
        if decision.selected is not None:
            selected_NC = decision.selected.numpy()
            metrics = classification.multi_label_metrics(
                labels, selected_NC, probabilities_NC, self.labels
            )
            if self.threshold_objective:
                name, _ = parse_objective(self.threshold_objective)
                table = classification.multi_label_table(labels, selected_NC, self.labels)
                of_objective = table["per_label"][name]
                metrics |= dict(zip(self._objective_metrics(), of_objective, strict=True))
            return metrics
        predictions_N = decision.label.numpy()
        metrics = classification.single_label_metrics(
            labels, predictions_N, probabilities_NC, self.labels
        )
        if self.positive is not None:
            of_positive = classification.positive_class_metrics(
                labels == self.positive,
                predictions_N == self.positive,
                probabilities_NC[:, self.positive],
            )
            metrics |= {f"{self._prefix}{name}": value for name, value in of_positive.items()}
        return metrics

    def report(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Any]:
        """Return per-label metrics and the confusion matrix."""
        labels, decision = data.labels["label"], self.decision(outputs)
        if decision.selected is not None:
            return classification.multi_label_table(labels, decision.selected.numpy(), self.labels)
        return classification.single_label_table(
            labels, decision.label.numpy(), decision.probabilities.numpy(), self.labels
        )

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return confusion matrix, reliability diagram, and precision and recall."""
        labels, decision = data.labels["label"], self.decision(outputs)
        probabilities_NC = decision.probabilities.numpy()
        if decision.selected is not None:
            confidence_N = np.maximum(probabilities_NC, 1 - probabilities_NC).ravel()
            is_correct_N = ((probabilities_NC >= 0.5) == labels).ravel()
        else:
            confidence_N = probabilities_NC.max(1)
            is_correct_N = probabilities_NC.argmax(1) == labels
        plots: dict[str, Plot] = {
            "reliability": lambda axes: draw_reliability(axes, confidence_N, is_correct_N)
        }
        if decision.selected is not None:
            return plots
        if len(self.labels) <= MAX_LABELS:
            counts_CC = np.array(self.report(data, outputs)["confusion_matrix"])
            plots["confusion_matrix"] = lambda axes: draw_confusion_matrix(
                axes, self.labels, counts_CC
            )
        positive = self.positive
        if positive is not None:
            plots["precision_recall"] = lambda axes: draw_precision_recall(
                axes,
                self.labels[positive],
                labels == positive,
                probabilities_NC[:, positive],
                self.thresholds[0] if self.thresholds else None,
            )
        return plots

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning if all predictions are equal or the objective is missed."""
        warnings = []
        if metrics["degenerate"]:
            remedy = "--class_weights=balanced"
            if self.multi_label:
                remedy = "--focal_gamma or --threshold_objective"
            warnings.append(
                f"every row has the same predicted label{'s' * self.multi_label}; "
                f"more --epochs, another --learning_rate or --seed, or {remedy} may help"
            )
        if self.threshold_objective and self.thresholds:
            _, expected = parse_objective(self.threshold_objective)
            missed = [
                f"{metric} is {metrics[metric]:.4f}"
                for metric in self._objective_metrics()
                if metrics[metric] < (expected or 0.0) or not metrics[metric]
            ]
            if missed:
                names = ", ".join(missed)
                warnings.append(f"--threshold_objective={self.threshold_objective} missed: {names}")
        return "; ".join(warnings) or None

    @property
    def _prefix(self):
        return "" if self.is_binary else "rare_"

    def _objective_metrics(self):
        """Return the name of the objective's metric for each threshold."""
        name, _ = parse_objective(self.threshold_objective)
        if self.multi_label:
            return [f"{name}_{label}" for label in self.labels]
        return [f"{self._prefix}{name}"]


def _in_order(labels):
    """Sort labels as numbers if all are integers, else as strings."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels))


@keras.saving.register_keras_serializable("bert_tf")
class TextClassifier(TaskModel):
    """Classifier of texts or pairs: sigmoid for two labels, softmax for more, or multi-label.

        model = TextClassifier.from_pretrained(PATH, labels=["billing", "hardware", "software"])
        model.fit(texts, labels, epochs=1)
        model.predict_rows(["My invoice is wrong."])[0]["label"]

    Options of `from_pretrained`:
        labels: Names of the labels in the order of their ids.
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
        multi_label: Any number of labels per row.
        class_weights: Loss weight per label.
        balanced_sampling: Draws all classes equally often.
        focal_gamma: Exponent of the focal loss; 0 is cross-entropy.
        rare_label: Label that is predicted from a threshold on, by default tuned for f1. Of two
            labels, it is the second.
        threshold_objective: "f1", "precision=P" or "recall=R": tunes the threshold of `rare_label`,
            or those of all labels with `multi_label`, on validation rows.
        calibrate: Temperature scaling, fitted on validation rows.
        pooling: "pooled", [CLS] through the pooler, or "mean", of the vectors of all tokens. By
            default the weights choose it: that of a classifier is kept, and others have "mean" if
            their pooler was not trained, such as those of sentence-transformers.
    """

    task_class = ClassificationTask
    options = (
        *("labels", "pairs", "truncation", "multi_label", "class_weights", "balanced_sampling"),
        *("focal_gamma", "rare_label", "threshold_objective", "calibrate", "pooling"),
    )

    @property
    def fit_defaults(self) -> dict[str, Any]:
        """See `TaskModel.fit_defaults`; a head on the mean of the tokens has a higher rate."""
        has_mean = self.preprocessor.task.pooling == "mean"
        rate = {"learning_rate": MEAN_POOLING_RATE} if has_mean else {}
        return {**super().fit_defaults, **rate}
