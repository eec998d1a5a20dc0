"""Private interfaces of Keras and TensorFlow that a `TaskModel` cannot do without.

Each function says what is lost without it.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bert_tf.train.compilation import is_default
from bert_tf.train.optimizer import FitSchedule
from bert_tf.train.step import innermost


def fit_schedule(optimizer: keras.optimizers.Optimizer) -> FitSchedule | None:
    """Return the `FitSchedule` of an optimizer, which `fit` tells the number of steps.

    `learning_rate` of Keras is the rate of the current step. Without this, the default optimizer
    could not decay to 0 at the end of `fit`.
    """
    rate = innermost(optimizer)._learning_rate
    return rate if isinstance(rate, FitSchedule) else None


def forget_resumed_epoch(model: keras.Model) -> None:
    """Let the next `fit` begin at its own first epoch.

    Without this, each `fit` after one that `BackupAndRestore` resumed begins at that epoch, too.
    """
    model._initial_epoch = None


def with_num_steps(dataset: Any, steps: int) -> Any:
    """Return a dataset of batches of replicas, whose number Keras takes for that of its steps.

    Without this, Keras warns after each epoch on several replicas that the data has ended early.
    """
    if not isinstance(dataset, tf.data.Dataset):
        dataset._cardinality = steps
    elif int(dataset.cardinality()) != steps:  # One that was prefetched to a GPU.
        dataset.cardinality = lambda: tf.constant(steps, tf.int64)
    return dataset


class ReplicaMetrics(keras.Model):
    """Keras model whose metrics are built from the names of its outputs."""

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the metrics of `compile`; called by Keras before the first step.

        On several replicas Keras averages their first batches to learn the shapes, which fails
        where the batches differ in their number of tokens. Without this, no metric of `compile`
        works there.
        """
        if is_default(self.distribute_strategy) or not self._compile_metrics:
            super()._maybe_symbolic_build(iterator, data_batch)
        elif not self._compile_metrics.built:
            outputs = {name: keras.KerasTensor((None,)) for name in self.loss}
            with self.distribute_strategy.scope():
                self._compile_metrics.build(outputs, outputs)
