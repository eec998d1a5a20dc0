"""Classification of a text or pair (Devlin et al. 2019, 4.1).

Two labels: one sigmoid logit, of the second label. More: softmax. With `multi_label` a row has any
number of labels, or none: one sigmoid logit per label.

Shape suffixes: B texts, N examples, C labels, K labels with a threshold.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.train.losses import (
    focal_multi_label_cross_entropy,
    focal_sigmoid_cross_entropy,
    focal_softmax_cross_entropy,
    multi_label_cross_entropy,
    sigmoid_cross_entropy,
    sigmoid_divergence,
    softmax_cross_entropy,
    softmax_divergence,
)
from tasks.base.decisions import Decision, decide_each, decide_one
from tasks.base.plots import MAX_LABELS, ConfusionMatrix, Plot, PrecisionRecall, Reliability
from tasks.base.task import OutputSpec, Postprocessor
from tasks.base.text_task import warnings_of_equal_labels
from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
from tasks.data.readers.glue import GLUE
from tasks.data.windows import Windows
from tasks.graph.heads import SequenceClassifier
from tasks.metrics import classification
from tasks.metrics.calibration import MIN_TEMPERATURE, bound_of_temperature, fit_temperature
from tasks.metrics.thresholds import best_threshold, parse_objective
from tasks.model.task_model import TaskModel
from tasks.types.classification import class_imbalance
from tasks.types.classification.class_labels import ClassLabels

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class ClassificationPostprocessor(Postprocessor["ClassificationTask"]):
    """Postprocessor of one logit per label, or of one logit for two labels."""

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

    @property
    def best_metric(self) -> str:
        """Metric that selects the best checkpoint, PR-AUC if thresholds are tuned on that file."""
        if self.task.threshold_objective:
            return "pr_auc" if self.task.multi_label else f"{self._prefix}pr_auc"
        if self.task.multi_label:
            return "micro_f1"
        # These options trade accuracy for recall of the rare classes.
        if self.task.class_weights or self.task.balanced_sampling or self.task.focal_gamma:
            return "macro_f1"
        return (
            GLUE[self.task.file_format].metrics[0] if self.task.file_format in GLUE else "accuracy"
        )

    def decision(self, outputs: Tensors) -> Decision:
        """Apply temperature and thresholds to the logits `outputs["label"]`."""
        temperature = self.task.temperature or 1.0
        if self.task.multi_label:
            return decide_each(outputs["label"], temperature, self.task.thresholds or 0.5)
        positive = self.task.positive if self.task.is_binary or self.task.thresholds else None
        threshold = self.task.thresholds[0] if self.task.thresholds else 0.5
        return decide_one(outputs["label"], temperature, positive, threshold)

    def predictions(
        self, texts: Tensors, windows: Windows, outputs: Tensors
    ) -> dict[str, tf.Tensor]:
        """Return label, score and probabilities per text."""
        decision = self.decision(outputs)
        names_C = tf.constant(self.task.labels)
        predictions = {
            "label": tf.gather(names_C, decision.label),
            "score": decision.score,
            "probabilities": decision.probabilities,
            "labels": tf.repeat(names_C[tf.newaxis], tf.shape(decision.label)[0], axis=0),
        }
        return (
            {**predictions, "selected": decision.selected} if self.task.multi_label else predictions
        )

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the probability margin of each decision, `(B,)`."""
        return self.decision(outputs).margin

    def tune(self, data: EncodedExamples, outputs: Arrays) -> "ClassificationTask":
        """Return the task with temperature and thresholds fitted on dev data."""
        labels, task = data.labels["label"], self.task
        if self.task.calibrate:
            temperature = fit_temperature(outputs["label"], labels, self.task.activation)
            task = dataclasses.replace(task, temperature=temperature)
        if self.task.threshold_objective:
            probabilities_NC = type(self)(task).decision(outputs).probabilities.numpy()
            if self.task.multi_label:
                pairs = list(zip(labels.T > 0, probabilities_NC.T, strict=True))
            else:
                pairs = [(labels == self.task.positive, probabilities_NC[:, self.task.positive])]
            thresholds = tuple(
                best_threshold(is_positive_N, scores_N, self.task.threshold_objective)[0]
                for is_positive_N, scores_N in pairs
            )
            task = dataclasses.replace(task, thresholds=thresholds)
        return task

    def check_dev(self, examples: Examples) -> list[str]:
        """Return one warning per label without a dev row to tune its threshold on."""
        labels, positive = self.task.labels, self.task.positive
        if not self.task.threshold_objective:
            return []
        if not self.task.multi_label:
            if positive is not None and positive not in examples.labels:
                raise UserError(
                    f"--dev: the first file has no row with label {labels[positive]!r} to tune "
                    "--threshold_objective on; choose another"
                )
            return []
        found = {number for numbers in examples.labels for number in numbers}
        missing = [label for number, label in enumerate(labels) if number not in found]
        if not found:
            raise UserError("--dev: no labels in the first file to tune on; choose another")
        return [f"no row has label {label!r}: it will never be predicted" for label in missing]

    def tuning_warnings(self, data: EncodedExamples, outputs: Arrays) -> list[str]:
        """Return a warning if dev data cannot determine the temperature."""
        if not self.task.calibrate:
            return []
        labels = data.labels["label"]
        bound = bound_of_temperature(outputs["label"], labels, self.task.activation)
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
                labels, selected_NC, probabilities_NC, self.task.labels
            )
            if self.task.threshold_objective:
                name, _ = parse_objective(self.task.threshold_objective)
                table = classification.multi_label_table(labels, selected_NC, self.task.labels)
                of_objective = table["per_label"][name]
                metrics |= dict(zip(self._objective_metrics(), of_objective, strict=True))
            return metrics
        predictions_N = decision.label.numpy()
        metrics = classification.single_label_metrics(
            labels, predictions_N, probabilities_NC, self.task.labels
        )
        if self.task.positive is not None:
            of_positive = classification.positive_class_metrics(
                labels == self.task.positive,
                predictions_N == self.task.positive,
                probabilities_NC[:, self.task.positive],
            )
            metrics |= {f"{self._prefix}{name}": value for name, value in of_positive.items()}
        return metrics

    def report(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Any]:
        """Return per-label metrics and the confusion matrix."""
        labels, decision = data.labels["label"], self.decision(outputs)
        if decision.selected is not None:
            return classification.multi_label_table(
                labels, decision.selected.numpy(), self.task.labels
            )
        return classification.single_label_table(
            labels, decision.label.numpy(), decision.probabilities.numpy(), self.task.labels
        )

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return confusion matrix, reliability diagram, and precision and recall."""
        labels, decision = data.labels["label"], self.decision(outputs)
        probabilities_NC = decision.probabilities.numpy()
        if decision.selected is not None:
            confidence = np.maximum(probabilities_NC, 1 - probabilities_NC).ravel()
            return {
                "reliability": Reliability(
                    confidence, ((probabilities_NC >= 0.5) == labels).ravel()
                )
            }
        is_correct_N = probabilities_NC.argmax(1) == labels
        plots: dict[str, Plot] = {"reliability": Reliability(probabilities_NC.max(1), is_correct_N)}
        if len(self.task.labels) <= MAX_LABELS:
            table = self.report(data, outputs)
            counts_CC = np.array(table["confusion_matrix"])
            plots["confusion_matrix"] = ConfusionMatrix(self.task.labels, counts_CC)
        positive = self.task.positive
        if positive is not None and (self.task.is_binary or self.task.rare_label):
            plots["precision_recall"] = PrecisionRecall(
                self.task.labels[positive],
                labels == positive,
                probabilities_NC[:, positive],
                self.task.thresholds[0] if self.task.thresholds else None,
            )
        return plots

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning if all predictions are equal or the objective is missed."""
        warnings = []
        if metrics["degenerate"]:
            remedy = "--class_weights=balanced"
            if self.task.multi_label:
                remedy = "--focal_gamma or --threshold_objective"
            warnings.append(
                f"every row has the same predicted label{'s' * self.task.multi_label}; "
                f"more --epochs, another --learning_rate or --seed, or {remedy} may help"
            )
        if self.task.threshold_objective and self.task.thresholds:
            _, expected = parse_objective(self.task.threshold_objective)
            missed = [
                f"{metric} is {metrics[metric]:.4f}"
                for metric in self._objective_metrics()
                if metrics[metric] < (expected or 0.0) or not metrics[metric]
            ]
            if missed:
                names = ", ".join(missed)
                warnings.append(
                    f"--threshold_objective={self.task.threshold_objective} missed: {names}"
                )
        return "; ".join(warnings) or None

    @property
    def _prefix(self):
        return "" if self.task.is_binary else "rare_"

    def _objective_metrics(self):
        """Return the name of the objective's metric for each threshold."""
        name, _ = parse_objective(self.task.threshold_objective)
        if self.task.multi_label:
            return [f"{name}_{label}" for label in self.task.labels]
        return [f"{self._prefix}{name}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationTask(ClassLabels):
    """Classification into labels; the fields are those of `ClassLabels`."""

    kind = "classification"
    postprocessor_class = ClassificationPostprocessor
    accuracies = ("label",)

    @property
    def losses(self) -> dict[str, Loss]:
        """Cross-entropy or focal loss (Lin et al. 2017)."""
        plain: Loss
        focal: Callable[..., tf.Tensor]
        if self.multi_label:
            plain, focal = multi_label_cross_entropy, focal_multi_label_cross_entropy
        elif self.is_binary:
            plain, focal = sigmoid_cross_entropy, focal_sigmoid_cross_entropy
        else:
            plain, focal = softmax_cross_entropy, focal_softmax_cross_entropy
        gamma = self.focal_gamma
        return {"label": functools.partial(focal, gamma=gamma) if gamma else plain}

    @property
    def soft_losses(self) -> dict[str, Callable[..., tf.Tensor]]:
        """Divergence from the teacher's probabilities."""
        is_sigmoid = self.activation == "sigmoid"
        return {"label": sigmoid_divergence if is_sigmoid else softmax_divergence}

    @property
    def tunable_fields(self) -> tuple[str, ...]:
        """Fields fitted on dev after training."""
        enabled = {"temperature": self.calibrate, "thresholds": self.threshold_objective}
        return tuple(name for name, is_enabled in enabled.items() if is_enabled)

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return labels, int32 `(N,)`, multi-hot `(N, C)` with `multi_label`, and weights of 1."""
        count = len(examples.labels)
        if self.multi_label:
            labels = np.zeros((count, len(self.labels)), np.int32)
            for number, chosen in enumerate(examples.labels):
                labels[number, list(chosen)] = 1
        else:
            labels = np.array(examples.labels, np.int32)
        return {"label": labels}, {"label": np.ones(count, np.float32)}

    @property
    def can_stream(self) -> bool:
        """Whether a batch suffices: these options need the labels of all rows."""
        return not (self.balanced_sampling or self.prior_bias)

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning if all rows have the same label."""
        return warnings_of_equal_labels(data.examples.labels)

    def sample_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the class weight of each example, `(N,)`, or None."""
        return np.array(self.class_weights)[examples.labels] if self.class_weights else None

    def sampling_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return sampling weights `(N,)`, equal in sum per class, or None."""
        return class_imbalance.sampling_weights(examples.labels) if self.balanced_sampling else None

    def build_model(self, config: BertConfig, dtype: str = "float32") -> SequenceClassifier:
        """Return a built model."""
        units = 1 if self.is_binary else len(self.labels)
        model = SequenceClassifier(config, units, name=self.kind, dtype=dtype)
        model.build()
        return model

    def init_head(self, model: SequenceClassifier, encoded: EncodedExamples) -> None:
        """Set the bias to the label frequencies if `prior_bias`."""
        if not self.prior_bias:
            return
        labels, count = encoded.labels["label"], len(encoded)
        if self.activation == "sigmoid":
            bias = class_imbalance.log_odds(np.atleast_1d(labels.sum(0)), count)
        else:
            bias = class_imbalance.log_prior(np.bincount(labels, minlength=len(self.labels)), count)
        model.head.bias.assign(bias)

    @property
    def activation(self) -> str:
        """Function from logits to probabilities, "sigmoid" or "softmax"."""
        return "sigmoid" if self.is_binary or self.multi_label else "softmax"


@keras.saving.register_keras_serializable("bert_tf")
class TextClassifier(TaskModel):
    """Classifier of texts or pairs: sigmoid for two labels, softmax for more, or multi-label.

    Options of `from_pretrained`:
        labels: Names of the labels in the order of their ids.
        pairs: Whether a row is a pair of texts.
        truncation: Part of a longer text that is kept: "head", "tail" or "head_tail".
        multi_label: Any number of labels per row.
        class_weights: Loss weight per label.
        balanced_sampling: Draws all classes equally often.
        focal_gamma: Exponent of the focal loss; 0 is cross-entropy.
        prior_bias: Initializes the output biases from class frequencies.
        rare_label: Label that is predicted from a threshold on.
        threshold_objective: "f1", "precision=P" or "recall=R": tunes thresholds on validation rows.
        calibrate: Temperature scaling, fitted on validation rows.
    """

    task_class = ClassificationTask
    options = (
        *("labels", "pairs", "truncation", "multi_label", "class_weights", "balanced_sampling"),
        *("focal_gamma", "prior_bias", "rare_label", "threshold_objective", "calibrate"),
    )
