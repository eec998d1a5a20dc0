"""Defaults of `TaskModel.compile`: optimizer, schedule, losses and metrics of the task.

Shape suffixes: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.train.compilation import is_accelerated
from bert_tf.train.losses import WeightedMean
from bert_tf.train.optimizer import AdamW, FitSchedule
from tasks.base import keras_names

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

# All other metrics of tasks are the better the higher they are.
LOWER_IS_BETTER = ("loss", "mean_squared_error", "ece", "degenerate", "false_alarm_rate")
# Weights and outputs are always float32.
DTYPES = ("float32", "mixed_bfloat16", "mixed_float16")


def check_scope(created_in: tf.distribute.Strategy, method: str) -> None:
    """Raise UserError in the scope of a strategy in which the model was not created.

    Args:
        created_in: The strategy in whose scope it was created.
        method: Name of the method that is called.
    """
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy is not created_in:
        raise UserError(
            f"{method}: the model was created outside of the scope of this "
            f"{type(strategy).__name__}; create it inside"
        )


def dtype_policy(dtype: Any) -> keras.DTypePolicy:
    """Return a Keras dtype policy; raises UserError if models do not have it."""
    name = getattr(dtype, "name", dtype)
    if isinstance(dtype, Mapping):  # As in a Keras config.
        name = dtype.get("config", {}).get("name")
    if name not in DTYPES:
        raise UserError(f"dtype={name!r:.80}: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return keras.DTypePolicy(name)


def resolve(
    model: TaskModel,
    optimizer: Any = "auto",
    loss: Any = "auto",
    *,
    metrics: Any = None,
    weighted_metrics: Any = "auto",
    learning_rate: float | None = None,
    warmup_proportion: float = 0.1,
    schedule: str = "released",
    layer_decay: float = 1.0,
    jit_compile: bool | str = "auto",
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the arguments of keras.Model.compile.

    Args:
        model: The model.
        optimizer: "auto" is AdamW with weight decay 0.01, clipping at 1 and bias correction.
        loss: "auto" is the task's loss, a mean over all replicas. Names of Keras are those of
            losses of logits, such as "sparse_categorical_crossentropy".
        metrics: Keras metrics of training; with one output, of that output.
        weighted_metrics: "auto" is the accuracy, if the task has one.
        learning_rate: Peak learning rate; by default that of the task type (5e-5; anomaly 3e-3).
        warmup_proportion: Fraction of the steps of a `fit` used for warmup.
        schedule: Linear decay, "released" (google-research/bert) or "continuous" (Hugging Face).
        layer_decay: Factor on the learning rate from each layer to the one below.
        jit_compile: Compiles the step with XLA, on batches of few shapes. "auto" does so on one
            GPU.
        **kwargs: Other arguments of keras.Model.compile.
    """
    if schedule not in ("released", "continuous"):
        raise UserError(f"schedule={schedule!r}: expected released or continuous")
    if not 0 <= warmup_proportion < 1:
        raise UserError(f"warmup_proportion={warmup_proportion}: expected a number >= 0 and < 1")
    if jit_compile == "auto":
        strategy = model.distribute_strategy
        jit_compile = strategy.num_replicas_in_sync == 1 and is_accelerated(strategy)
    outputs = list(model.task.losses)
    if optimizer == "auto":
        peak = model.fit_defaults["learning_rate"] if learning_rate is None else learning_rate
        optimizer = AdamW(
            FitSchedule(peak, warmup_proportion, continuous=schedule == "continuous"),
            layer_decay=layer_decay,
        )
    elif learning_rate is not None:
        raise UserError(
            "learning_rate: expected with optimizer='auto' only; set it in the given optimizer"
        )
    if loss == "auto":
        loss = {name: WeightedMean(function) for name, function in model.task.losses.items()}
    else:
        if isinstance(loss, list | tuple):
            loss = dict(zip(outputs, loss, strict=False))
        elif not isinstance(loss, Mapping):
            loss = dict.fromkeys(outputs, loss)
        loss = {name: keras_names.loss_of(model.task, name, value) for name, value in loss.items()}
    metrics = _by_output(model.task, metrics)
    if weighted_metrics == "auto":
        # Of several outputs, Keras puts the output's name before the metric's.
        weighted_metrics = dict.fromkeys(model.task.accuracies, ("accuracy",))
    weighted_metrics = _by_output(model.task, weighted_metrics)
    for name, of_output in metrics.items():
        # Padding and tokens without a label have the weight 0, which other metrics do not see.
        names = [metric.name for metric in weighted_metrics.setdefault(name, [])]
        weighted_metrics[name] += [
            metric
            for metric in of_output
            if isinstance(metric, LabelAccuracy) and metric.name not in names
        ]
        metrics[name] = [entry for entry in of_output if not isinstance(entry, LabelAccuracy)]
    metrics, weighted_metrics = (
        {name: of_output for name, of_output in chosen.items() if of_output} or None
        for chosen in (metrics, weighted_metrics)
    )
    return {
        "optimizer": optimizer,
        "loss": loss,
        "metrics": metrics,
        "weighted_metrics": weighted_metrics,
        "jit_compile": jit_compile,
        **kwargs,
    }


def _by_output(task, metrics):
    """Return lists of Keras metrics by the name of the output."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        # Two outputs cannot share the state of a metric.
        if len(task.losses) > 1 and not all(isinstance(name, str) for name in _listed(metrics)):
            raise UserError(f"metrics: expected a dict by output: {', '.join(task.losses)}")
        metrics = dict.fromkeys(task.losses, metrics)
    return {
        output: [
            keras_names.metric_of(task, output, metric, LabelAccuracy)
            for metric in _listed(of_output)
        ]
        for output, of_output in metrics.items()
    }


def _listed(entries):
    return list(entries) if isinstance(entries, list | tuple) else [entries]


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that updates the weights, of a wrapper such as LossScaleOptimizer."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def batch_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the number of batches an optimizer has seen; `iterations` counts updates."""
    return innermost(optimizer)._iterations


def needs_padding(model: TaskModel) -> bool:
    """Return whether `fit` requires padded batches.

    XLA compiles per shape, and Keras splits a batch between replicas by the first axis, which must
    count sequences.
    """
    return bool(model.jit_compile) or model.distribute_strategy.num_replicas_in_sync > 1


def set_directions(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Set whether callbacks wait for lower or higher metrics of the task, which Keras cannot know.

    Args:
        callbacks: Those that monitor val_NAME with mode="auto" are changed.
    """
    for callback in callbacks:
        monitor = str(getattr(callback, "monitor", ""))
        if getattr(callback, "mode", None) == "auto" and monitor.startswith("val_"):
            is_lower = monitor.removeprefix("val_") in LOWER_IS_BETTER
            callback.mode = "min" if is_lower else "max"


def check_callbacks(model: TaskModel, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise UserError for callbacks that would fail in the middle of a `fit`."""
    schedules = keras.optimizers.schedules.LearningRateSchedule
    setters = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, setters) and isinstance(
            innermost(model.optimizer)._learning_rate, schedules
        ):
            raise UserError(
                f"callbacks: {name} requires a constant learning rate, but the optimizer has a "
                "schedule; call compile(AdamW(2e-5))"
            )
        if isinstance(callback, keras.callbacks.TensorBoard) and not find_spec("tensorboard"):
            raise UserError(
                f"callbacks: {name} requires tensorboard, which is not installed; run pip install "
                "'bert_tf[tensorboard]'"
            )


@keras.saving.register_keras_serializable("bert_tf")
class LabelAccuracy(keras.metrics.MeanMetricWrapper):
    """Weighted fraction of correct labels, from logits.

    One logit is the second of two labels; more are one label each. Multi-hot labels have one
    decision per logit.
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(_is_correct, name=name, dtype=dtype)
        self._direction = "up"  # Read by callbacks of Keras.

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config."""
        return {"name": self.name, "dtype": self.dtype}


def _is_correct(labels, logits):
    """Return 1.0 for correct labels, otherwise 0.0, shaped like the labels."""
    labels = tf.cast(labels, tf.int32)
    if len(logits.shape) == len(labels.shape):  # Multi-hot labels `(B, C)`.
        correct = tf.cast(logits > 0, tf.int32) == labels
        return tf.reduce_mean(tf.cast(correct, tf.float32), axis=-1)
    if logits.shape[-1] == 1:
        predictions = tf.cast(logits[..., 0] > 0, tf.int32)
    else:
        predictions = tf.argmax(logits, axis=-1, output_type=tf.int32)
    return tf.cast(predictions == labels, tf.float32)
