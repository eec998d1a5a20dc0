"""Classification of a text, or of a pair, into labels (Devlin et al. 2019, 4.1).

Two labels: one sigmoid logit, which stands for the second, and binary cross-entropy. More: softmax.
With `multi_label` a row has any number of labels, none too: a sigmoid logit each.

Legend: B texts, N examples, C labels, K labels that have a threshold.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train.losses import (
    focal_multi_label_cross_entropy,
    focal_sigmoid_cross_entropy,
    focal_softmax_cross_entropy,
    multi_label_cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
)
from tasks import class_imbalance
from tasks.decisions import decide_each, decide_one
from tasks.heads import SequenceClassifier
from tasks.metrics import classification
from tasks.metrics.calibration import MIN_TEMPERATURE, bound_of_temperature, fit_temperature
from tasks.metrics.thresholds import best_threshold, parse_objective
from tasks.readers.glue import GLUE
from tasks.readers.records import as_label, raise_bad_rows
from tasks.text_task import TextTask, raw_rows

BETWEEN_LABELS = "|"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(TextTask):
    """One classification task: its columns, its labels in order, and all that follows from them.

    class_weights       a number a label: how much its examples count in training; () for all alike
    balanced_sampling   in training every class is drawn equally often
    focal_gamma         of the focal loss; 0 is cross-entropy
    prior_bias          training begins with the labels' shares as the answer
    rare_label          given where its probability >= its threshold, else the likeliest other one
    threshold_objective what thresholds are tuned for ("f1", "precision=P", "recall=R"), or None
    calibrate           whether a temperature is fitted

    Decided on dev, of the best checkpoint: the temperature that logits are divided by, and then
    `thresholds` on probabilities: one of the positive label (the second of two, the rare one) or
    with `multi_label` one a label. None means 1 and, as far as there are thresholds, 0.5; a rare
    label has none before it is decided, and the likeliest label is given. A threshold beyond 0 or 1
    gives always or never.
    """

    labels: tuple[str, ...]
    multi_label: bool = False
    class_weights: tuple[float, ...] = ()
    balanced_sampling: bool = False
    focal_gamma: float = 0.0
    prior_bias: bool = False
    rare_label: str | None = None
    threshold_objective: str | None = None
    calibrate: bool = False
    temperature: float | None = None
    thresholds: tuple[float, ...] | None = None

    kind = "classification"

    @classmethod
    def from_data(cls, path, *, labels=(), class_weights=(), **options):
        """The task that a training file shows: the labels as given, or those in the file in order.

        `class_weights` are as the flag has them: numbers as text, or ("balanced",). A rare label
        without an aim has the aim "f1".
        Raises UserError if the file holds fewer than two labels, or if an option does not fit them.
        """
        class_imbalance.check_options(class_weights=class_weights, **options)
        if options.get("rare_label") is not None:
            options["rare_label"] = as_label(options["rare_label"])
        task = cls(labels=tuple(map(as_label, labels)), **options)
        if task.multi_label and task.file_format in GLUE:
            raise UserError(f"--multi_label: rows of {task.file_format} have one label each")
        counts = {}
        for row in raise_bad_rows(raw_rows(task, path, labelled=True)):
            try:
                names = task._names_in(row.values[task.label_column])
            except ValueError as error:
                raise UserError(f"{row.location}: {error}") from None
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        if len(counts) < 2:
            only = f"the label {min(counts)!r}" if counts else "no label"
            only += ", or none" if counts and task.multi_label else ""
            raise UserError(f"{path}: every row has {only}; there is nothing to tell apart")
        published = GLUE[task.file_format].labels if task.file_format in GLUE else ()
        labels = task.labels or published or _in_order(counts)
        task = dataclasses.replace(
            task,
            labels=labels,
            class_weights=class_imbalance.class_weights_of(
                class_weights, labels, [counts.get(label, 0) for label in labels]
            ),
            threshold_objective=task.threshold_objective
            or ("f1" if task.rare_label is not None else None),
        )
        task._check_rare_label()
        return task

    def _check_rare_label(self):
        if self.rare_label is None:
            if self.threshold_objective is not None and not self.is_binary and not self.multi_label:
                raise UserError(
                    f"--threshold_objective={self.threshold_objective}: there are "
                    f"{len(self.labels)} labels and only --rare_label has a threshold; name one"
                )
        elif self.rare_label not in self.labels:
            raise UserError(
                f"--rare_label={self.rare_label}: none of the labels {', '.join(self.labels)}"
            )
        elif self.is_binary and self.rare_label != self.labels[1]:
            raise UserError(
                f"--rare_label={self.rare_label}: of two labels the second is the positive one; "
                f"give --labels={self.labels[1]},{self.labels[0]}"
            )

    @property
    def is_binary(self):
        return len(self.labels) == 2 and not self.multi_label

    @property
    def positive(self):
        """The id of the one label that has a threshold, or None."""
        if self.is_binary:
            return 1
        return None if self.rare_label is None else self.labels.index(self.rare_label)

    @property
    def list_columns(self):
        return (self.label_column,) if self.multi_label else ()

    @property
    def losses(self):
        if self.multi_label:
            plain, focal = multi_label_cross_entropy, focal_multi_label_cross_entropy
        elif self.is_binary:
            plain, focal = sigmoid_cross_entropy, focal_sigmoid_cross_entropy
        else:
            plain, focal = softmax_cross_entropy, focal_softmax_cross_entropy
        gamma = self.focal_gamma
        return {"label": functools.partial(focal, gamma=gamma) if gamma else plain}

    @property
    def best_metric(self):
        """What chooses the best checkpoint.

        Where thresholds are tuned on it, the PR-AUC, which none enters. Else micro F1 of several
        labels; macro F1 where weights, sampling or the loss favour rare classes, whose price is
        accuracy; GLUE's own for its data sets; and accuracy.
        """
        if self.threshold_objective:
            return "pr_auc" if self.multi_label else f"{self._prefix}pr_auc"
        if self.multi_label:
            return "micro_f1"
        favours_rare = self.class_weights or self.balanced_sampling or self.focal_gamma
        if favours_rare:
            return "macro_f1"
        return GLUE[self.file_format].metrics[0] if self.file_format in GLUE else "accuracy"

    @property
    def tunable_fields(self):
        enabled = {"temperature": self.calibrate, "thresholds": self.threshold_objective}
        return tuple(name for name, is_enabled in enabled.items() if is_enabled)

    def description(self):
        weights = ", ".join(f"{weight:.3g}" for weight in self.class_weights)
        return f"; labels {', '.join(self.labels)}" + (weights and f"; class weights {weights}")

    def label_of(self, value):
        names = self._names_in(value)
        known = [as_label(label) for label in self.labels]  # Earlier versions saved them as read.
        for name in names:
            if name not in known:
                labels = ", ".join(self.labels)
                raise ValueError(f"label {name!r:.80} is none of the task's: {labels}")
        numbers = tuple(known.index(name) for name in names)
        return numbers if self.multi_label else numbers[0]

    def _names_in(self, value):
        """The labels of a row, by name: one, or with `multi_label` any number."""
        if not self.multi_label:
            names = [value]
        elif isinstance(value, list):
            names = value
        else:
            names = value.split(BETWEEN_LABELS) if value.strip() else []
        names = [as_label(name) for name in names]
        if not all(names):
            several = f", or several with {BETWEEN_LABELS} between them" if self.multi_label else ""
            empty = "holds an empty label" if self.multi_label else "is empty"
            raise ValueError(f"column {self.label_column!r} {empty}, wanted a label{several}")
        return names

    def targets(self, examples, windows):
        count = len(examples.labels)
        if self.multi_label:
            labels = np.zeros((count, len(self.labels)), np.int32)
            for number, chosen in enumerate(examples.labels):
                labels[number, list(chosen)] = 1
        else:
            labels = np.array(examples.labels, np.int32)
        return {"label": labels}, {"label": np.ones(count, np.float32)}

    def sample_weights(self, examples, windows):
        return np.array(self.class_weights)[examples.labels] if self.class_weights else None

    def sampling_weights(self, examples, windows):
        return class_imbalance.sampling_weights(examples.labels) if self.balanced_sampling else None

    def build_model(self, config, dtype="float32"):
        units = 1 if self.is_binary else len(self.labels)
        model = SequenceClassifier(config, units, name=self.kind, dtype=dtype)
        model.build()
        return model

    def init_head(self, model, encoded):
        if not self.prior_bias:
            return
        labels, count = encoded.labels["label"], len(encoded)
        if self.multi_label:
            bias = class_imbalance.log_odds(labels.sum(0), count)
        elif self.is_binary:
            bias = class_imbalance.log_odds([labels.sum()], count)
        else:
            bias = class_imbalance.log_prior(np.bincount(labels, minlength=len(self.labels)), count)
        model.head.bias.assign(bias)

    def decision(self, outputs):
        """{"label": logits} -> Decision, in the graph."""
        temperature = self.temperature or 1.0
        if self.multi_label:
            return decide_each(outputs["label"], temperature, self.thresholds or 0.5)
        if self.thresholds:
            return decide_one(outputs["label"], temperature, self.positive, self.thresholds[0])
        return decide_one(outputs["label"], temperature, 1 if self.is_binary else None)

    def serving_outputs(self, texts, windows, outputs):
        decision = self.decision(outputs)
        names_C = tf.constant(self.labels)
        predictions = {
            "label": tf.gather(names_C, decision.label),
            "score": decision.score,
            "probabilities": decision.probabilities,
            "labels": tf.repeat(names_C[tf.newaxis], tf.shape(decision.label)[0], axis=0),
        }
        return {**predictions, "selected": decision.selected} if self.multi_label else predictions

    def margin(self, predictions, windows, outputs):
        return self.decision(outputs).margin

    def tune(self, data, outputs):
        labels, task = data.labels["label"], self
        if self.calibrate:
            temperature = fit_temperature(outputs["label"], labels, self._kind_of_logits)
            task = dataclasses.replace(task, temperature=temperature)
        if self.threshold_objective:
            probabilities_NC = task.decision(outputs).probabilities.numpy()
            if self.multi_label:
                is_positive_NK, scores_NK = labels > 0, probabilities_NC
            else:
                is_positive_NK = (labels == self.positive)[:, np.newaxis]
                scores_NK = probabilities_NC[:, [self.positive]]
            thresholds = tuple(
                best_threshold(is_positive_N, scores_N, self.threshold_objective)[0]
                for is_positive_N, scores_N in zip(is_positive_NK.T, scores_NK.T, strict=True)
            )
            task = dataclasses.replace(task, thresholds=thresholds)
        return task

    def check_dev(self, examples):
        if not self.threshold_objective:
            return []
        if not self.multi_label:
            if self.positive not in examples.labels:
                raise UserError(
                    f"--threshold_objective={self.threshold_objective}: no row of the first --dev "
                    f"file has the label {self.labels[self.positive]!r}, whose threshold is tuned "
                    "on it; name another"
                )
            return []
        found = {number for numbers in examples.labels for number in numbers}
        missing = [label for number, label in enumerate(self.labels) if number not in found]
        if not found:
            raise UserError(
                f"--threshold_objective={self.threshold_objective}: no row of the first --dev file "
                "has a label, whose thresholds are tuned on it; name another"
            )
        return [f"no row has the label {label!r}: it will never be given" for label in missing]

    def tuning_warnings(self, data, outputs):
        if not self.calibrate:
            return []
        labels = data.labels["label"]
        bound = bound_of_temperature(outputs["label"], labels, self._kind_of_logits)
        if bound is None:
            return []
        reason = (
            "has too few errors to fit a temperature"
            if bound == MIN_TEMPERATURE
            else "shows no relation of the logits to the labels"
        )
        return [
            f"--calibrate: this file {reason} (the optimum is beyond {bound:g}); "
            "temperature 1 is kept"
        ]

    def metrics(self, data, outputs):
        labels = data.labels["label"]
        decision = self.decision(outputs)
        probabilities_NC = decision.probabilities.numpy()
        if self.multi_label:
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

    def report(self, data, outputs):
        labels, decision = data.labels["label"], self.decision(outputs)
        if self.multi_label:
            return classification.multi_label_table(labels, decision.selected.numpy(), self.labels)
        return classification.single_label_table(
            labels, decision.label.numpy(), decision.probabilities.numpy(), self.labels
        )

    def warning(self, metrics):
        warnings = []
        if metrics["degenerate"]:
            kit = "--class_weights=balanced"
            if self.multi_label:
                kit = "--focal_gamma or --threshold_objective"
            warnings.append(
                f"every row was given the same label{'s' * self.multi_label}, whatever its text; "
                f"more --epochs, another --learning_rate or --seed, {kit} may help"
            )
        if self.threshold_objective and self.thresholds:
            _, expected = parse_objective(self.threshold_objective)
            missed = [
                f"{metric} is {metrics[metric]:.4f}"
                for metric in self._objective_metrics()
                if metrics[metric] < (expected or 0.0) or not metrics[metric]
            ]
            if missed:
                warnings.append(
                    f"--threshold_objective={self.threshold_objective} is not reached: "
                    f"{', '.join(missed)}"
                )
        return "; ".join(warnings) or None

    @property
    def _kind_of_logits(self):
        return "sigmoid" if self.is_binary or self.multi_label else "softmax"

    @property
    def _prefix(self):
        """Of the figures of the positive label."""
        return "" if self.is_binary else "rare_"

    def _objective_metrics(self):
        """The names of the figures that the aim is about, one a threshold."""
        name, _ = parse_objective(self.threshold_objective)
        if self.multi_label:
            return [f"{name}_{label}" for label in self.labels]
        return [f"{self._prefix}{name}"]


def _in_order(labels):
    """As numbers if all are integers, else as text."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels))
