"""Train step: one synchronized update over all replicas.

The only module that computes gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from bert_tf.custom_gradient import own_gradients
from bert_tf.layout import count_tokens
from bert_tf.train.optimizer import AdamBase

COUNTS = ("examples", "tokens", "asked_to_stop")


class TrainStep:
    """Run one synchronized update.

    The loss is a weighted mean over the global batch, sum(weight * loss) / sum(weight), added over
    the terms: one per output of the model, and `more_losses`. It does not depend on the number of
    replicas. If the loss or a gradient is not finite on any replica, no replica is updated: an
    InvalidArgumentError is raised, or, if XLA drops that check, the returned "gradient_norm" is not
    finite.

    A batch is a tuple (inputs, labels, weights). Labels and weights are dicts keyed like the
    terms; examples of weight 0 are padding that fills up a replica's batch.

    The dropout masks are a function of (seed, step, replica, batch, dropout_id); no random state is
    kept between steps.

    Args:
        model: Maps inputs to a dict of outputs; called with `training` and `seed`.
        losses: Maps an output name to a function (labels, output) that returns one loss per
            element.
        optimizer: Applies the gradients; sums and clips them over all replicas.
        strategy: Distribution strategy.
        seed: Seed of the dropout masks, below 2**32.
        metrics: Maps a metric name to (output name, function), averaged like the loss.
        accumulation_steps: Gradient accumulation: an element of the iterator is this number of
            batches, stacked on a new first axis by `Dataset.batch` or `ragged_batch`. They are
            processed one after the other, and their sums make one update.
        more_losses: Further terms of the loss: maps a name to (output name, function). An example
            counts as one if it has a weight in the first of them.

    Raises:
        ValueError: The model computes in float16, which needs loss scaling.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]],
        optimizer: AdamBase,
        strategy: tf.distribute.Strategy,
        seed: int,
        metrics: Mapping[str, tuple[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]]
        | None = None,
        accumulation_steps: int = 1,
        more_losses: Mapping[str, tuple[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]]
        | None = None,
    ) -> None:
        self.model, self.losses, self.optimizer, self.strategy = model, losses, optimizer, strategy
        self.more_losses = more_losses or {}
        self.seed, self.metrics = seed, metrics or {}
        self.accumulation_steps = accumulation_steps
        if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
            # Keras 3's LossScaleOptimizer checks the gradients of one replica only.
            raise ValueError("float16: not supported, because it needs loss scaling; use bfloat16")

    @tf.function(autograph=False)
    def __call__(
        self,
        iterator: Iterator[Any],
        is_asked_to_stop: tf.Tensor | bool = False,
        num_steps: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Run one update, or `num_steps` of them.

        Args:
            iterator: Distributed iterator over batches.
            is_asked_to_stop: Bool scalar, whether this process has received a signal to stop.
            num_steps: int32 scalar; the loop ends early after a gradient that is not finite.
                Defaults to one update.

        Returns:
            Dict of scalars. float32: "loss", the metrics, "gradient_norm" before clipping, and
            "learning_rate", of the last update. int32 sums over all updates and replicas:
            "examples" with a weight above 0, "tokens", and "asked_to_stop", the replicas that are
            asked to stop.
        """
        if num_steps is None:
            return self._update(iterator, is_asked_to_stop)
        # tf.while_loop requires initial values of the right dtypes.
        floats = ("loss", *self.metrics, "gradient_norm", "learning_rate")
        start = {**dict.fromkeys(floats, tf.constant(0.0)), **dict.fromkeys(COUNTS, tf.constant(0))}

        def update(number, before):
            now = self._update(iterator, is_asked_to_stop)
            return number + 1, {**now, **{name: before[name] + now[name] for name in COUNTS}}

        _, logs = tf.while_loop(
            lambda number, logs: (number < num_steps) & tf.math.is_finite(logs["gradient_norm"]),
            update,
            (0, start),
        )
        return logs

    @property
    def _terms(self):
        """The terms of the loss, (output name, function) by name."""
        return {**{name: (name, loss) for name, loss in self.losses.items()}, **self.more_losses}

    def _update(self, iterator, is_asked_to_stop):
        """Run one update on all replicas and reduce their results."""
        # Read before the update, which advances the step of the schedule.
        learning_rate = tf.cast(self.optimizer.learning_rate, tf.float32)
        asked = tf.cast(is_asked_to_stop, tf.int32)
        sums, norm = self.strategy.run(self._on_replica, args=(next(iterator), asked))
        # The gradient norm is equal on all replicas; MEAN only turns it into one scalar.
        total = tf.distribute.ReduceOp.SUM
        return {
            **{name: self.strategy.reduce(total, value, axis=None) for name, value in sums.items()},
            "gradient_norm": self.strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None),
            "learning_rate": learning_rate,
        }

    def _on_replica(self, batch, asked):
        """Compute gradients on this replica and apply their sum over all replicas."""
        replica = tf.distribute.get_replica_context()
        weights = batch[2]
        # Dividing by sums over all replicas makes the loss a mean over the global batch.
        weight_sums = replica.all_reduce(
            tf.distribute.ReduceOp.SUM, {name: _sum(weights[name]) for name in self._terms}
        )
        if self.accumulation_steps == 1:
            sums, gradients = self._gradients(batch, weight_sums, self._dropout_seed(replica))
        else:
            sums, gradients = self._accumulated(batch, weight_sums, replica)
        # A loss can be infinite while its gradient is finite; NaN makes apply reject that update.
        gradients[-1] += tf.where(tf.math.is_finite(sums["loss"]), 0.0, float("nan"))
        norm = self.optimizer.apply(gradients, self.model.trainable_variables)
        own_gradients()
        return {**sums, "asked_to_stop": tf.identity(asked)}, norm

    def _gradients(self, batch, weight_sums, seed):
        """Return this replica's summands of loss, counts and metrics, and of the gradients.

        `weight_sums` are taken over all replicas, so the summands add up to the weighted means.
        """
        inputs, labels, weights = batch

        def mean(output, values):
            return tf.math.divide_no_nan(
                tf.reduce_sum(weights[output] * values), weight_sums[output]
            )

        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=True, seed=seed)
            loss = tf.add_n(
                [
                    mean(name, loss(labels[name], outputs[output]))
                    for name, (output, loss) in self._terms.items()
                ]
            )
        gradients = tape.gradient(loss, self.model.trainable_variables)
        without = [
            variable.path
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True)
            if gradient is None
        ]
        if without:
            raise ValueError(
                f"no gradient reaches {', '.join(without)}; expected the loss to depend on all "
                "trainable variables; freeze the others"
            )
        # An example counts if any of its elements has a weight, such as one masked position.
        of_any = weights[next(iter(self.more_losses or weights))]
        of_any = tf.reduce_any(tf.reshape(of_any, [tf.shape(of_any)[0], -1]) > 0, axis=1)
        sums = {
            "loss": loss,
            "examples": tf.reduce_sum(tf.cast(of_any, tf.int32)),
            "tokens": count_tokens(inputs),
            **{
                name: mean(output, metric(labels[output], outputs[output]))
                for name, (output, metric) in self.metrics.items()
            },
        }
        return sums, gradients

    def _accumulated(self, batches, weight_sums, replica):
        """Return the sums and gradients over all stacked batches, one in memory at a time."""

        def add(number, sums, gradients):
            batch = tf.nest.map_structure(lambda stacked: stacked[number], batches)
            seed = self._dropout_seed(replica, number)
            more = self._gradients(batch, weight_sums, seed)
            sums, gradients = tf.nest.map_structure(
                lambda one, other: one + tf.convert_to_tensor(other), (sums, gradients), more
            )
            return number + 1, sums, gradients

        counts = dict.fromkeys(("examples", "tokens"), tf.zeros([], tf.int32))
        start = {**dict.fromkeys(("loss", *self.metrics), tf.zeros([])), **counts}
        zeros = [tf.zeros(variable.shape) for variable in self.model.trainable_variables]
        count = tf.shape(next(iter(batches[2].values())))[0]
        # Gradients are added up, not averaged: weight_sums already cover all stacked batches.
        _, sums, gradients = tf.while_loop(
            lambda number, *_: number < tf.cast(count, tf.int32), add, (0, start, zeros)
        )
        return sums, gradients

    def _dropout_seed(self, replica, batch=0):
        return dropout_seed(
            self.seed, self.optimizer.iterations, replica.replica_id_in_sync_group, batch
        )


def dropout_seed(
    seed: int, step: keras.Variable, replica_id: tf.Tensor | int, batch: tf.Tensor | int = 0
) -> tf.Tensor:
    """Return the dropout seed of a step, int64 `(2,)`.

    Layers add their dropout_id, which is below 2**16, to the second number.

    Args:
        seed: Seed of the training, below 2**32.
        step: Iterations of the optimizer.
        replica_id: Index of the replica.
        batch: Index of the batch within the step, with gradient accumulation.
    """
    # Each (batch, step, replica) has its own pair: the second number holds the dropout_id in bits 0
    # to 15, the replica in bits 16 to 31 and the step above.
    step = tf.cast(tf.convert_to_tensor(step), tf.int64)
    first = tf.cast(batch, tf.int64) * 2**32 + seed
    return tf.stack([first, step * 2**32 + tf.cast(replica_id, tf.int64) * 2**16])


def _sum(values):
    """Return the sum over a dense or ragged tensor."""
    return tf.reduce_sum(values.flat_values if isinstance(values, tf.RaggedTensor) else values)
