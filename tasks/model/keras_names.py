"""Losses and metrics of Keras, for outputs that are logits and labels that are ids.

Keras resolves names such as "accuracy" for probabilities, or by shapes that ours do not have. Here
a name means what it says for the outputs of the task; what cannot fit them is refused.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train import losses
from bert_tf.train.losses import BatchLoss, WeightedMean
from bert_tf.train.step import OWN_LOSSES
from tasks.base.task import Task

_SPARSE, _BINARY = "sparse_categorical_crossentropy", "binary_crossentropy"
_FOCAL = "binary_focal_crossentropy"


class _Fitting(NamedTuple):
    """Names of Keras that fit an output."""

    same: tuple[str, ...] = ()  # Of the loss of the task.
    others: tuple[str, ...] = ()  # Of other losses.
    accuracies: tuple[str, ...] = ()  # Of the accuracy of labels.
    metrics: tuple[str, ...] = ()  # Of other metrics.
    suffix: str = ""  # What a message adds to the name of the task.
    objects: bool = True  # Whether losses of Keras compute what the task does.


_OF_SOFTMAX = _Fitting(
    same=(_SPARSE,),
    accuracies=("accuracy", "sparse_categorical_accuracy"),
    metrics=("sparse_top_k_categorical_accuracy",),
)
_OF_SIGMOID = _Fitting(
    same=(_BINARY, _SPARSE),
    others=(_FOCAL,),
    accuracies=("accuracy", "sparse_categorical_accuracy", "binary_accuracy"),
    suffix=" with two labels, which is one logit",
)
_OF_LABELS = _Fitting(
    same=(_BINARY,),
    others=(_FOCAL,),
    accuracies=("accuracy", "binary_accuracy"),
    suffix=" with multi_label",
)
_OF_NUMBERS = (
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
)
_OF_VALUES = _Fitting(
    same=("mean_squared_error",),
    others=(*_OF_NUMBERS, "huber", "log_cosh"),
    metrics=("mean_squared_error", "root_mean_squared_error", *_OF_NUMBERS),
)
_OF_NONE = _Fitting()
# By the loss of an output.
_FITTING: dict[Any, _Fitting] = {
    losses.softmax_cross_entropy: _OF_SOFTMAX,
    losses.vocab_cross_entropy: _OF_SOFTMAX,
    losses.half_softmax_cross_entropy: _OF_SOFTMAX,
    losses.sigmoid_cross_entropy: _OF_SIGMOID,
    losses.multi_label_cross_entropy: _OF_LABELS,
    losses.squared_error: _OF_VALUES,
    losses.listwise_binary_cross_entropy: _Fitting(same=(_BINARY,), objects=False),
    losses.listwise_softmax_cross_entropy: _Fitting(
        same=("categorical_crossentropy",), objects=False
    ),
    losses.identity_loss: _OF_NONE,
}
_OF_USER = _Fitting()  # Of a loss of the user's own task type.
# All other metrics of the tasks of this project are the better the higher they are.
LOWER_IS_BETTER = ("loss", "mean_squared_error", "ece", "degenerate", "false_alarm_rate")
# Metrics of Keras for labels that are one-hot, or for probabilities.
_OF_PROBABILITIES = (
    "accuracy",
    "categorical_accuracy",
    "categorical_crossentropy",
    "top_k_categorical_accuracy",
    "f1score",
    "fbeta_score",
    "precision_at_recall",
    "recall_at_precision",
    "sensitivity_at_specificity",
    "specificity_at_sensitivity",
)


def compile_arguments(
    task: Task, loss: Any = "auto", metrics: Any = None, weighted_metrics: Any = "auto"
) -> dict[str, Any]:
    """Return "loss", "metrics" and "weighted_metrics" of keras.Model.compile, by output.

    Args:
        task: The task.
        loss: Losses of Keras; "auto" for those of the task.
        metrics: Metrics of Keras; with one output, of that output.
        weighted_metrics: Metrics of Keras; "auto" for the accuracy, if the task has one.

    Raises:
        UserError: If one does not fit an output.
    """
    outputs = list(task.losses)
    if isinstance(loss, list | tuple):
        loss = dict(zip(outputs, loss, strict=False))
    elif not isinstance(loss, Mapping):
        loss = dict.fromkeys(outputs, loss)
    check_outputs(task, loss=loss)
    outputs = [name for name in outputs if loss.get(name) is not None]
    check_outputs(task, outputs, metrics=metrics, weighted_metrics=weighted_metrics)
    metrics = _by_output(task, outputs, metrics)
    if weighted_metrics == "auto":
        # Of several outputs, Keras puts the output's name before the metric's.
        weighted_metrics = {name: ("accuracy",) for name in outputs if name in task.accuracies}
    weighted_metrics = _by_output(task, outputs, weighted_metrics)
    for name, of_output in metrics.items():
        # Padding and tokens without a label have the weight 0, which other metrics do not see.
        accuracies = [entry for entry in of_output if isinstance(entry, LabelAccuracy)]
        metrics[name] = [entry for entry in of_output if entry not in accuracies]
        weighted = weighted_metrics.setdefault(name, [])
        names = [getattr(entry, "name", entry) for entry in weighted]
        weighted += [entry for entry in accuracies if entry.name not in names]
    return {
        "loss": {name: _loss_of(task, name, value) for name, value in loss.items()},
        "metrics": {name: entries for name, entries in metrics.items() if entries} or None,
        "weighted_metrics": (
            {name: entries for name, entries in weighted_metrics.items() if entries} or None
        ),
    }


def check_outputs(task: Task, outputs: Collection[str] | None = None, **arguments: Any) -> None:
    """Raise UserError if an argument of compile is a dict with a name that is no output.

    Outputs are those of the task, or those that have a loss.
    """
    expected = task.losses if outputs is None else outputs
    for argument, value in arguments.items():
        for name in value if isinstance(value, Mapping) else ():
            if name not in expected:
                kind = "output with a loss" if name in task.losses else "output"
                raise UserError(
                    f"{argument}: {name!r:.80} is no {kind} of {task.kind}; expected "
                    f"{', '.join(expected)}"
                )


def _by_output(task, outputs, metrics):
    """Return lists of Keras metrics by the name of the output."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        # Two outputs cannot share the state of a metric.
        if len(outputs) > 1 and not all(isinstance(name, str) for name in _listed(metrics)):
            raise UserError(f"metrics: expected a dict by output: {', '.join(outputs)}")
        metrics = dict.fromkeys(outputs, metrics)
    return {
        output: [_metric_of(task, output, metric) for metric in _listed(of_output)]
        for output, of_output in metrics.items()
    }


def _listed(entries):
    return list(entries) if isinstance(entries, list | tuple) else [entries]


def _loss_of(task, output, loss):
    """Return a loss for an output, if it fits; losses that are not of Keras are left unchanged."""
    if isinstance(loss, str) and loss == "auto":
        return WeightedMean(task.losses[output])
    fitting, name = _fitting_of(task, output), _name_of(loss, keras.losses)
    if name is None or fitting is _OF_USER:
        return loss
    names = (*fitting.same, *fitting.others)
    if isinstance(loss, keras.losses.Loss):
        names = tuple(
            entry for entry in names if fitting.objects and not _is_argmax(entry, fitting)
        )
        if name in names:
            _check_logits("loss", loss)
            return loss
        names = tuple(f"{_class_name(entry)}(...)" for entry in names)
    elif isinstance(task.losses[output], functools.partial):
        names = ()  # Keras has no focal loss of the task's gamma.
    elif name in fitting.same:
        return WeightedMean(task.losses[output])
    elif name in fitting.others:
        has_logits = "from_logits" in inspect.signature(keras.losses.get(name)).parameters
        return getattr(keras.losses, _class_name(name))(from_logits=True) if has_logits else name
    raise _refusal("loss", name, task, output, ("auto", *names))


def _metric_of(task, output, metric):
    """Return a metric for an output, if it fits; metrics that are not of Keras are left as is."""
    fitting, name = _fitting_of(task, output), _name_of(metric, keras.metrics)
    if name is None:
        return metric
    accuracies = fitting.accuracies if output in task.accuracies else ()
    if isinstance(metric, keras.metrics.Metric):
        if not _is_argmax(name, fitting) and name not in _OF_PROBABILITIES:
            _check_logits("metrics", metric)
            if fitting is not _OF_VALUES:
                _check_thresholds(metric)
            return metric
    elif name in accuracies:
        return LabelAccuracy(name)
    elif name in fitting.metrics:
        return metric
    raise _refusal("metrics", name, task, output, (*accuracies, *fitting.metrics))


def _refusal(argument, name, task, output, expected):
    """Return the error of a loss or metric of Keras that does not fit an output."""
    return UserError(
        f"{argument}={name!r}: does not fit the output {output!r} of {task.kind}"
        f"{_fitting_of(task, output).suffix}; expected {', '.join(expected) or 'none'}"
    )


def _fitting_of(task, output):
    function = task.losses.get(output)
    if isinstance(function, BatchLoss):  # Which compares rows, as no loss of Keras does.
        return _OF_NONE
    return _FITTING.get(getattr(function, "func", function), _OF_USER)


def _name_of(given, module):
    """Return the name in Keras of a loss or metric, or None for one that is not of Keras."""
    if isinstance(given, str):
        if given.lower() in ("acc", "accuracy"):
            return "accuracy"
        try:
            given = module.get(given)
        except ValueError:
            return given
    if not (getattr(given, "__module__", None) or type(given).__module__).startswith("keras."):
        return None
    name = getattr(given, "__name__", type(given).__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _class_name(name):
    return "".join(part.capitalize() for part in name.split("_"))


def _is_argmax(name, fitting):
    """Return whether a loss or metric of Keras compares several logits, of which there is one."""
    return name.startswith("sparse_") and fitting is not _OF_SOFTMAX


def _check_logits(argument, given):
    """Raise UserError if a loss or metric takes the output for probabilities."""
    if False in (getattr(given, name, None) for name in ("from_logits", "_from_logits")):
        raise UserError(
            f"{argument}: {type(given).__name__} expects probabilities, but the output is logits; "
            "pass from_logits=True"
        )


def _check_thresholds(metric):
    """Raise UserError if a metric compares the output with a probability."""
    if isinstance(metric, keras.metrics.AUC):  # Which maps logits to probabilities.
        return
    for argument in ("threshold", "thresholds"):
        value = getattr(metric, argument, None)
        if value is not None and np.max(value) > 0:
            raise UserError(
                f"metrics: {type(metric).__name__} compares logits with {np.max(value)}; "
                f"pass {argument}=0"
            )


def set_directions(task: Task, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Set whether callbacks wait for lower or higher metrics of the task, which Keras cannot know.

    Args:
        task: The task. Of metrics that are not of this project, the best one is known; for others
            Keras asks the user for a mode.
        callbacks: Those that monitor val_NAME with mode="auto" are changed.
    """
    for callback in callbacks:
        monitor = str(getattr(callback, "monitor", ""))
        if getattr(callback, "mode", None) == "auto" and monitor.startswith("val_"):
            name = monitor.removeprefix("val_")
            if name in LOWER_IS_BETTER:
                callback.mode = "min"
            elif task.metrics.__module__.startswith("tasks.") or name == task.best_metric:
                callback.mode = "max"


class LossMeans(keras.metrics.Metric):
    """Weighted means of the terms of a loss, over all elements of all batches of an epoch.

    A mean of the losses of batches would count elements of small batches and weights more. The
    model's own losses are added to the loss, as means over the rows of the batches.

    Args:
        loss_weights: Factor of each term, by the name of its output.
    """

    def __init__(self, loss_weights: Mapping[str, float]) -> None:
        super().__init__(name="loss_means")
        self.loss_weights = dict(loss_weights)
        shape = (len(loss_weights) + 1,)
        self.totals = self.add_variable(shape, "zeros", name="totals")
        self.divisors = self.add_variable(shape, "zeros", name="divisors")

    def update_state(
        self, terms: Mapping[str, tuple[tf.Tensor, tf.Tensor]], norm: tf.Tensor | float = 0.0
    ) -> None:
        """Add a batch.

        Args:
            terms: Results of `bert_tf.train.losses.weighted_sum` by term, and of OWN_LOSSES.
            norm: Norm of the gradient. If it is not finite, so is the result.
        """
        in_order = [terms[name] for name in (*self.loss_weights, OWN_LOSSES)]
        totals, divisors = (tf.stack(part) for part in zip(*in_order, strict=True))
        if isinstance(norm, tf.Tensor):
            # With a scaled loss, the norm of an update that was skipped for good reason is finite.
            is_kept = tf.math.is_finite(totals)
            totals, divisors = (tf.where(is_kept, part, 0.0) for part in (totals, divisors))
            totals += tf.where(tf.math.is_finite(norm), 0.0, float("nan"))
        self.totals.assign_add(totals)
        self.divisors.assign_add(divisors)

    def is_finite(self) -> tf.Tensor:
        """Return whether all batches were finite, a bool scalar."""
        return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(self.totals)))

    def result(self) -> dict[str, tf.Tensor]:
        """Return the "loss", and that of each term if there are several."""
        totals, divisors = (tf.convert_to_tensor(part) for part in (self.totals, self.divisors))
        means = tf.math.divide_no_nan(totals, divisors)
        # Without a finite batch, the divisor is 0.
        *means, own = tf.unstack(tf.where(tf.math.is_finite(totals), means, totals))
        of_terms = dict(zip(self.loss_weights, means, strict=True))
        loss = tf.add_n([mean * self.loss_weights[name] for name, mean in of_terms.items()]) + own
        if len(of_terms) == 1:
            return {"loss": loss}
        return {"loss": loss, **{f"{name}_loss": mean for name, mean in of_terms.items()}}


@keras.saving.register_keras_serializable("bert_tf")
class LabelAccuracy(keras.metrics.MeanMetricWrapper):
    """Weighted fraction of correct labels, from logits.

    One logit is the second of two labels; more are one label each. Multi-hot labels have one
    decision per logit.
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(losses.is_correct, name=name, dtype=dtype)
        self._direction = "up"  # Read by callbacks of Keras.

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config."""
        return {"name": self.name, "dtype": self.dtype}
