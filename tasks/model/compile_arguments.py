"""Optimizer, losses and metrics of `TaskModel.compile`: those of the task, or objects of Keras.

The outputs of a task are logits. A loss or metric of Keras that expects probabilities would train
or measure in silence what nobody means, so that two of its settings are checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.system.scalars import to_python
from bert_tf.train.losses import FunctionLoss, WeightedMean, compares_examples, is_correct
from bert_tf.train.optimizer import AdamW, FitSchedule
from bert_tf.train.step import OWN_LOSSES, batch_counter, innermost
from tasks.base.task import Task
from tasks.training.settings import TrainingSettings


def optimizer_of(model: keras.Model, optimizer: Any, **given: Any) -> Any:
    """Return the optimizer of a `TaskModel`, in the scope of its strategy.

    Args:
        model: The model.
        optimizer: "auto", or an optimizer of Keras or its name.
        **given: learning_rate, warmup_proportion, schedule and layer_decay of "auto".

    Raises:
        UserError: If a value is wrong, or the optimizer cannot train the model.
    """
    settings, defaults = TrainingSettings(**to_python(given)), TrainingSettings()
    if isinstance(optimizer, str) and optimizer == "auto":
        peak = settings.learning_rate or model.fit_defaults["learning_rate"]
        is_continuous = settings.schedule == "continuous"
        return AdamW(
            FitSchedule(peak, settings.warmup_proportion, is_continuous),
            layer_decay=settings.layer_decay,
            scales_loss=model.dtype_policy.name == "mixed_float16",
        )
    for name in given:
        if getattr(settings, name) != getattr(defaults, name):
            raise UserError(
                f"{name}: expected with optimizer='auto' only; set it in the given optimizer"
            )
    optimizer = keras.optimizers.get(optimizer)
    extended = model.distribute_strategy.extended
    if not extended.variable_created_in_scope(batch_counter(optimizer).value):
        raise UserError(
            "optimizer: was created outside of the scope of the replicas; create it inside"
        )
    is_accumulated = (optimizer.gradient_accumulation_steps or 1) > 1
    if is_accumulated and compares_examples(model.task.losses.values()):
        raise UserError(
            "gradient_accumulation_steps: expected none, since the loss compares the rows of a "
            "batch, of which each part has few; call train, whose parts share the loss"
        )
    return optimizer


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return a new optimizer with the settings of another one."""
    copy = type(optimizer).from_config(optimizer.get_config())
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(innermost(optimizer), name):  # Keras stores it in no config.
            setattr(innermost(copy), name, getattr(innermost(optimizer), name))
    return copy


def factors_by_output(outputs: Collection[str], loss_weights: Any) -> dict[str, float]:
    """Return `loss_weights` of Keras, a number, a list or a dict, as a dict by output."""
    if isinstance(loss_weights, Mapping):
        return {name: loss_weights.get(name, 1.0) for name in outputs}
    several = isinstance(loss_weights, list | tuple)
    values = loss_weights if several else [loss_weights or 1.0] * len(outputs)
    return dict(zip(outputs, values, strict=True))


def losses_by_output(task: Task, loss: Any) -> dict[str, Any]:
    """Return the loss of each output that has one.

    Args:
        task: The task.
        loss: "auto", a loss of Keras or a function of (labels, output); or a dict of these by
            output, or a list in the order of the outputs.

    Raises:
        UserError: If it is a string, or expects probabilities, or an output is unknown.
    """
    names = list(task.losses)
    if isinstance(loss, list | tuple):
        loss = dict(zip(names, loss, strict=False))
    elif not isinstance(loss, Mapping):
        loss = dict.fromkeys(names, loss)
    check_outputs(task, names, "loss", loss)
    return {name: _loss(task, name, loss[name]) for name in names if loss.get(name) is not None}


def metrics_by_output(
    task: Task, outputs: Collection[str], metrics: Any, weighted_metrics: Any
) -> tuple[dict[str, list], dict[str, list]]:
    """Return metrics and weighted metrics of Keras in lists by output.

    Args:
        task: The task.
        outputs: Outputs with a loss.
        metrics: Metrics; with one output, of that output. "accuracy" is that of the task, which
            has weights: padding and tokens without a label have the weight 0.
        weighted_metrics: The same. If both are `None`, the accuracy of each output that has one.

    Raises:
        UserError: If one is another string, or compares logits with a probability.
    """
    if metrics is None and weighted_metrics is None:
        weighted_metrics = {name: ["accuracy"] for name in outputs if name in task.accuracies}
    unweighted, weighted = (
        _by_output(task, outputs, argument, given)
        for argument, given in (("metrics", metrics), ("weighted_metrics", weighted_metrics))
    )
    for name, entries in unweighted.items():
        accuracies = [entry for entry in entries if isinstance(entry, LabelAccuracy)]
        unweighted[name] = [entry for entry in entries if entry not in accuracies]
        weighted.setdefault(name, []).extend(accuracies)
    return unweighted, weighted


def check_outputs(task: Task, outputs: Collection[str], argument: str, given: Any) -> None:
    """Raise UserError if an argument of compile is a dict with a name that is no output."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in outputs:
            raise UserError(
                f"{argument}: {name!r:.80} is no output of {task.kind} with a loss; expected "
                f"{', '.join(outputs)}"
            )


def _loss(task, output, loss):
    if isinstance(loss, str):
        if loss == "auto":
            return WeightedMean(task.losses[output])
        example = _example("losses", loss)
        raise UserError(f"loss={loss!r:.80}: expected 'auto' or an object{example}")
    _check_logits("loss", loss)
    return loss


def _by_output(task, outputs, argument, given):
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        entries = list(given) if isinstance(given, list | tuple) else [given]
        # Two outputs cannot share the state of a metric.
        if len(outputs) > 1 and not all(isinstance(entry, str) for entry in entries):
            raise UserError(f"{argument}: expected a dict by output: {', '.join(outputs)}")
        given = dict.fromkeys(outputs, entries)
    check_outputs(task, outputs, argument, given)
    return {
        name: [
            _metric(task, name, argument, entry)
            for entry in (entries if isinstance(entries, list | tuple) else [entries])
        ]
        for name, entries in given.items()
    }


def _metric(task, output, argument, metric):
    if isinstance(metric, str):
        if metric in ("accuracy", "acc") and output in task.accuracies:
            return LabelAccuracy(has_classes=task.has_classes)
        known = "'accuracy' or " if output in task.accuracies else ""
        raise UserError(
            f"{argument}={metric!r:.80}: expected {known}an object{_example('metrics', metric)}; "
            "the task's metrics on validation rows are in the logs as val_NAME"
        )
    _check_logits(argument, metric)
    _check_thresholds(argument, metric)
    return metric


def _example(module, name):
    """Return the object to pass instead of a name of Keras, for a message."""
    try:
        found = getattr(keras, module).get(name)
    except ValueError:
        return ""
    found = found if isinstance(found, type | type(_example)) else type(found)
    class_name = "".join(part[:1].upper() + part[1:] for part in found.__name__.split("_"))
    of_logits = "from_logits" in inspect.signature(found).parameters
    return f", such as keras.{module}.{class_name}({'from_logits=True' * of_logits})"


def _check_logits(argument, given):
    """Raise UserError if a loss or metric takes the output for probabilities."""
    from_logits = getattr(given, "from_logits", getattr(given, "_from_logits", None))
    if inspect.isfunction(given) and "from_logits" in inspect.signature(given).parameters:
        from_logits = inspect.signature(given).parameters["from_logits"].default
    if from_logits is False:
        name = getattr(given, "__name__", type(given).__name__)
        raise UserError(
            f"{argument}: {name} expects probabilities, but the output is logits; pass an object "
            "with from_logits=True"
        )


def _check_thresholds(argument, metric):
    """Raise UserError if a metric compares the output with a probability."""
    if isinstance(metric, keras.metrics.AUC):  # Which maps logits to probabilities.
        return
    for name in ("threshold", "thresholds"):
        value = getattr(metric, name, None)
        if value is not None and np.max(value) > 0:
            raise UserError(
                f"{argument}: {type(metric).__name__} compares logits with {np.max(value)}; "
                f"pass {name}=0"
            )


class LossMeans(keras.metrics.Metric):
    """Weighted means of the terms of a loss, over all elements of all batches of an epoch.

    A mean of the losses of batches would count elements of small batches and weights more. The
    model's own losses are added to the loss, as means over the rows of the batches.

    Args:
        names: Names of the terms.

    Attributes:
        loss_weights: Factor of each term that has a loss, by its name.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(name="loss_means")
        self.names, self.loss_weights = list(names), dict.fromkeys(names, 1.0)
        shape = (len(self.names) + 1,)
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
        none = (tf.zeros([]), tf.zeros([]))
        in_order = [terms.get(name, none) for name in (*self.names, OWN_LOSSES)]
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
        by_name = dict(zip(self.names, means, strict=True))
        terms = {name: by_name[name] for name in self.loss_weights}
        loss = tf.add_n([mean * self.loss_weights[name] for name, mean in terms.items()]) + own
        if len(terms) == 1:
            return {"loss": loss}
        return {"loss": loss, **{f"{name}_loss": mean for name, mean in terms.items()}}


class LossOfIds(keras.losses.Loss):
    """Loss of one-hot labels, such as `CategoricalCrossentropy(label_smoothing=0.1)`, of ids too.

    Args:
        loss: The loss.
    """

    def __init__(self, loss: keras.losses.Loss) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction)
        self.loss = loss

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each row; ids `(B,)` become one-hot rows `(B, C)`."""
        if y_true.shape.rank < y_pred.shape.rank:
            y_true = tf.one_hot(tf.cast(y_true, tf.int32), y_pred.shape[-1])
        return self.loss.call(y_true, y_pred)


def for_step(loss: Any) -> keras.losses.Loss:
    """Return a loss of `compile` as the train step calls it, with ids of labels."""
    if isinstance(
        loss, keras.losses.CategoricalCrossentropy | keras.losses.CategoricalFocalCrossentropy
    ):
        return LossOfIds(loss)
    return loss if isinstance(loss, keras.losses.Loss) else FunctionLoss(loss)


@keras.saving.register_keras_serializable("bert_tf")
class LabelAccuracy(keras.metrics.MeanMetricWrapper):
    """Weighted fraction of correct labels, from logits.

    One logit is the second of two labels; more are one label each.

    Args:
        name: Name of the metric.
        dtype: As in Keras.
        has_classes: Whether labels `(B, C)` are one-hot; otherwise they are multi-hot, with one
            decision per logit.
    """

    def __init__(
        self, name: str = "accuracy", dtype: Any = None, has_classes: bool = False
    ) -> None:
        super().__init__(is_correct, name=name, dtype=dtype)
        self.has_classes = has_classes
        self._direction = "up"  # Read by callbacks of Keras.

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch of labels, logits and weights."""
        y_true = tf.convert_to_tensor(y_true)
        if self.has_classes and y_true.shape.rank == 2 and y_true.shape[1] != 1:
            y_true = tf.argmax(y_true, axis=1)
        super().update_state(y_true, y_pred, sample_weight)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config."""
        return {"name": self.name, "dtype": self.dtype, "has_classes": self.has_classes}
