"""Train step: one synchronized update over all replicas.

The only module that computes gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.model.custom_gradient import own_gradients
from bert_tf.model.layout import MASKED_SCORE, count_tokens
from bert_tf.train.compilation import GPU, compile_with_weights, is_accelerated, is_default
from bert_tf.train.losses import compares_examples, has_own_divisor, weighted_sum
from bert_tf.train.optimizer import NOT_FINITE, AdamBase

COUNTS = ("examples", "tokens", "asked_to_stop")
OWN_LOSSES = "losses of the model"  # Among the terms that Keras averages; no output has this name.


class TrainStep:
    """Run one synchronized update: of the training loop, or of Keras `fit`.

    The training loop calls the step, with an iterator. Keras has its own loop, which calls
    `on_batch` on each replica. Both run the same backward pass and update.

    The loss is a weighted mean over the global batch, sum(weight * loss) / sum(weight), added over
    the terms: one per output of the model, and `more_losses`. It does not depend on the number of
    replicas. `model.losses`, those of regularizers and of `add_loss`, are added as Keras does: as
    means over replicas, and over stacked batches. If the loss or a gradient is not finite on any
    replica, no replica is updated: an InvalidArgumentError is raised, or, if XLA drops that check,
    the returned "gradient_norm" is not finite.

    A batch is a tuple (inputs, labels, weights). Labels and weights are dicts keyed like the
    terms; examples of weight 0 are padding that fills up a replica's batch.

    The dropout masks are a function of (seed, step, replica, batch, dropout_id); no random state is
    kept between steps.

    Args:
        model: Maps inputs to a dict of outputs; called with `training` and `seed`.
        losses: Maps an output name to a function (labels, output) that returns one loss per
            element.
        optimizer: Applies the gradients; ours sum and clip them over all replicas.
        strategy: Distribution strategy.
        seed: Seed of the dropout masks, below 2**32.
        metrics: Maps a metric name to (output name, function), averaged like the loss.
        accumulation_steps: Gradient accumulation: an element of the iterator is this number of
            batches, stacked on a new first axis by `Dataset.batch` or `ragged_batch`. They are
            processed one after the other, and their sums make one update. A `BatchLoss` is that of
            all of them: its outputs are computed first, without gradients (GradCache, Gao et al.
            2021).
        more_losses: Further terms of the loss: maps a name to (output name, function). An example
            counts as one if it has a weight in the first of them.
        loss_weights: Factors of the terms by name; by default 1.
        is_compiled: Compiles the step with XLA, which requires batches of static shapes: on one
            device as one program; on several as one for the gradients and one for the update, with
            the sum over all replicas in between.

    Raises:
        ValueError: The model computes in float16, and the optimizer does not scale the loss.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]],
        optimizer: keras.optimizers.Optimizer,
        strategy: tf.distribute.Strategy,
        seed: int,
        metrics: Mapping[str, tuple[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]]
        | None = None,
        accumulation_steps: int = 1,
        more_losses: Mapping[str, tuple[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]]
        | None = None,
        is_compiled: bool = False,
        loss_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.model, self.losses, self.optimizer, self.strategy = model, losses, optimizer, strategy
        self.more_losses, self.loss_weights = more_losses or {}, loss_weights or {}
        self.seed, self.metrics = seed, metrics or {}
        self.accumulation_steps, self.is_compiled = accumulation_steps, is_compiled
        self._replica_step, self._wrap = self._on_replica, None
        # With a condition on the CPU, the GPU would wait for the host after each update.
        is_on_gpu = is_compiled and is_default(strategy) and is_accelerated(strategy)
        self._loop_device = GPU if is_on_gpu else None
        self._sums_and_gradients = self._all_gradients
        self._compiled_backward = None
        if is_compiled and is_default(strategy):
            self._replica_step = _compile(self._on_replica)
        elif is_compiled:
            self._sums_and_gradients = compile_with_weights(model, self._all_gradients, strategy)
            self._compiled_backward = compile_with_weights(model, self._dense_backward, strategy)
            if not isinstance(strategy, tf.distribute.TPUStrategy):
                self._wrap = _compile
        # Keras 3's LossScaleOptimizer checks the gradients of one replica only.
        is_float16 = any(layer.compute_dtype == "float16" for layer in model._flatten_layers())
        if is_float16 and isinstance(optimizer, AdamBase) and not optimizer.scales_loss:
            raise ValueError("float16: expected an optimizer with scales_loss=True")

    @tf.function(autograph=False)
    def __call__(
        self,
        iterator: Iterator[Any],
        is_asked_to_stop: tf.Tensor | bool = False,
        num_steps: tf.Tensor | None = None,
        gradient_norm: tf.Tensor | float = 0.0,
    ) -> dict[str, tf.Tensor]:
        """Run one update, or `num_steps` of them.

        Args:
            iterator: Distributed iterator over batches.
            is_asked_to_stop: Bool scalar, whether this process has received a signal to stop.
            num_steps: int32 scalar, the number of updates. Defaults to one.
            gradient_norm: That of the call before, for a compiled step: if it is not finite, this
                call changes nothing and returns it. The caller need not wait for it in between.

        Returns:
            Dict of scalars. float32: "loss", the metrics, "gradient_norm" before clipping, and
            "learning_rate", of the last update. int64 sums over all updates and replicas:
            "examples" with a weight above 0, "tokens", and "asked_to_stop", the replicas that are
            asked to stop.
        """
        with tf.device(self._loop_device):
            # Copies on the device of the loop: a value on another would make it wait for the host
            # after each update. The flag has 64 bits, since shorter integers stay on the host.
            gradient_norm = tf.identity(gradient_norm)
            is_asked_to_stop = tf.identity(tf.cast(is_asked_to_stop, tf.int64))
            if num_steps is None:
                return self._update(iterator, is_asked_to_stop, gradient_norm)
            return self._loop(iterator, is_asked_to_stop, tf.identity(num_steps), gradient_norm)

    def _loop(self, iterator, is_asked_to_stop, num_steps, gradient_norm):
        """Run `num_steps` updates."""
        # tf.while_loop requires initial values of the right dtypes.
        floats = ("loss", *self.metrics, "gradient_norm", "learning_rate")
        zero = tf.zeros([], tf.int64)
        start = {**dict.fromkeys(floats, tf.constant(0.0)), **dict.fromkeys(COUNTS, zero)}
        start["gradient_norm"] = gradient_norm

        def update(number, before):
            now = self._update(iterator, is_asked_to_stop, before["gradient_norm"])
            return number + 1, {**now, **{name: before[name] + now[name] for name in COUNTS}}

        # The condition reads no result of a step, for which the host would wait.
        _, logs = tf.while_loop(lambda number, logs: number < num_steps, update, (0, start))
        return logs

    @property
    def _terms(self):
        """The terms of the loss, (output name, function) by name."""
        return {**{name: (name, loss) for name, loss in self.losses.items()}, **self.more_losses}

    def _update(self, iterator, is_asked_to_stop, norm_before):
        """Run one update on all replicas and reduce their results."""
        # Read before the update, which advances the step of the schedule.
        learning_rate = tf.cast(self.optimizer.learning_rate, tf.float32)
        is_running = tf.math.is_finite(norm_before)
        floats, counts, norm = self.strategy.run(
            self._replica_step, args=(next(iterator), is_running)
        )
        total = tf.distribute.ReduceOp.SUM
        asked = self.strategy.run(tf.identity, args=(is_asked_to_stop,))
        floats, counts = (self.strategy.reduce(total, of, axis=None) for of in (floats, counts))
        logs = {
            **dict(zip(("loss", *self.metrics), tf.unstack(floats), strict=True)),
            # tf.unstack would keep integers on the host.
            "examples": counts[0],
            "tokens": counts[1],
            "asked_to_stop": self.strategy.reduce(total, asked, axis=None),
            # The gradient norm is equal on all replicas; MEAN only turns it into one scalar.
            "gradient_norm": self.strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None),
            "learning_rate": learning_rate,
        }
        logs["gradient_norm"] = tf.where(is_running, logs["gradient_norm"], norm_before)
        return logs

    def _on_replica(self, batch, is_running):
        """Compute this replica's summand of the gradient, and apply the sum over all replicas."""
        weight_sums = self._weight_sums(batch[2])
        sums, gradients = self._sums_and_gradients(batch, weight_sums, *self._seed_and_scale())
        norm = self._apply(gradients, sums["loss"], is_running)
        own_gradients()
        return (
            tf.stack([sums[name] for name in ("loss", *self.metrics)]),
            tf.cast(tf.stack([sums["examples"], sums["tokens"]]), tf.int64),
            norm,
        )

    def on_batch(
        self, batch: tuple[Any, Mapping[str, Any], Mapping[str, Any]], is_running: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tuple[tf.Tensor, tf.Tensor]], tf.Tensor]:
        """Run one update on this replica, called by Keras.

        With a compiled step, on one device the caller compiles this method; on several, gradients
        and update are compiled here, unless a loss alone knows what it is divided by.

        Args:
            batch: Inputs, labels and weights; weights of `None` are 1. With accumulation, batches
                stacked as for `__call__`, all with weights.
            is_running: Bool scalar, for a step that XLA compiles: `False` changes nothing.

        Returns:
            The outputs of the model; by term the results of `weighted_sum`, and the weighted sum of
            OWN_LOSSES; and a float32 scalar that is not finite if the update was rejected, see
            `AdamBase.apply`.
        """
        backward, weight_sums = self._any_backward, None
        if self._compiled_backward and self._divides_by_weights(batch[2]):
            backward, weight_sums = self._compiled_backward, self._weight_sums(batch[2])
        outputs, loss, terms, gradients = backward(batch, weight_sums, *self._seed_and_scale())
        norm = self._apply(gradients, loss, is_running)
        own_gradients()
        return outputs, terms, norm

    def _divides_by_weights(self, weights):
        """Return True if each term of the loss is divided by the sum of its weights."""
        losses = [loss for _, loss in self._terms.values()]
        return None not in weights.values() and not any(map(has_own_divisor, losses))

    def _weight_sums(self, weights):
        """Return the sums of weights by term, over all replicas.

        Dividing by them makes the loss a mean over the global batch.
        """
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, {name: tf.reduce_sum(weights[name]) for name in self._terms}
        )

    def _seed_and_scale(self):
        """Return the dropout seed of this replica's batch, and the factor of its loss."""
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = dropout_seed(self.seed, batch_counter(self.optimizer), replica_id)
        return seed, tf.convert_to_tensor(self.optimizer.scale_loss(tf.constant(1.0)))

    def sums_of(
        self, labels: Mapping[str, Any], weights: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
        """Return the results of `weighted_sum` by term, of this replica's batch."""
        return {
            name: weighted_sum(loss, labels[name], outputs[output], weights[name])
            for name, (output, loss) in self._terms.items()
        }

    def own_losses(
        self, labels: Mapping[str, Any], losses: tf.Tensor | None = None
    ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
        """Return OWN_LOSSES as a term, which Keras weights by the rows of this replica's batch.

        By default, `losses` are those of the last call of the model.
        """
        if not self.model.losses:  # Most models; the step has no operation for them.
            return {OWN_LOSSES: (tf.zeros([]), tf.zeros([]))}
        losses = self._model_losses() if losses is None else losses
        rows = tf.cast(tf.shape(next(iter(labels.values())))[0], tf.float32)
        return {OWN_LOSSES: (losses * rows, rows)}

    def _model_losses(self):
        """Return the sum of `model.losses`, read right after a call, which they belong to."""
        losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in self.model.losses]
        return tf.add_n(losses) if losses else tf.zeros([])

    def _apply(self, gradients, loss, is_running):
        """Apply the gradients unless they or the loss are not finite; return their norm."""
        variables = self.model.trainable_variables
        # A loss can be infinite while its gradient is finite; NaN makes apply reject that update.
        _poison(gradients, loss)
        if not isinstance(self.optimizer, AdamBase):
            return self._apply_with_keras(gradients, variables, is_running)
        options = {"is_running": is_running, "wrap": self._wrap} if self.is_compiled else {}
        return self.optimizer.apply(gradients, variables, **options)

    def _apply_with_keras(self, gradients, variables, is_running):
        """Do what `_apply` does with an optimizer of Keras, which sums over the replicas itself."""
        norm = tf.linalg.global_norm([grad for grad in gradients if grad is not None])
        replica = tf.distribute.get_replica_context()
        if replica.num_replicas_in_sync > 1:
            # One that stops or skips the update alone would leave the others in their reduction.
            norm = replica.all_reduce(tf.distribute.ReduceOp.SUM, norm)
            _poison(gradients, norm)
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            # It skips the update and halves the scale, until a smaller one cannot help.
            scale = tf.convert_to_tensor(self.optimizer.dynamic_scale)
            norm = tf.where(tf.math.is_finite(norm) | (scale <= 1.0), norm, 0.0)
        if self.is_compiled and is_default(self.strategy):  # XLA drops the check below.

            def update():
                self.optimizer.apply(gradients, variables)
                return tf.no_op()

            tf.cond(is_running & tf.math.is_finite(norm), update, tf.no_op)
            return norm
        with tf.control_dependencies([tf.debugging.check_numerics(norm, NOT_FINITE)]):
            gradients = [grad if grad is None else tf.identity(grad) for grad in gradients]
            self.optimizer.apply(gradients, variables)
        return norm

    def _all_gradients(self, batch, weight_sums, seed, scale):
        """Return this replica's sums and gradients, over all stacked batches if there are any."""
        if self.accumulation_steps == 1:
            sums, gradients = self._gradients(self._backward, batch, weight_sums, seed, scale)
            return sums, _dense(gradients) if self.is_compiled else gradients
        if compares_examples(loss for _, loss in self._terms.values()):
            return self._gradients(self._cached_backward, batch, weight_sums, seed, scale)
        return self._accumulated(batch, weight_sums, seed, scale)

    def _dense_backward(self, batch, weight_sums, seed, scale):
        """Return what `_any_backward` does, with gradients that XLA can return."""
        *results, gradients = self._any_backward(batch, weight_sums, seed, scale)
        return *results, _dense(gradients)

    def _any_backward(self, batch, weight_sums, seed, scale):
        """Return outputs, loss, terms and gradients, over all stacked batches if there are any."""
        backward = self._cached_backward if self.accumulation_steps > 1 else self._backward
        return backward(batch, weight_sums, seed, scale)

    def _backward(self, batch, weight_sums, seed, scale):
        """Return outputs, loss, terms and gradients of this replica's batch.

        Loss and gradients are summands of those of the global batch, by which the terms are divided
        here, unless `weight_sums` are given.
        """
        inputs, labels, weights = batch
        # The values that stand for the variables in a compiled function, or the variables.
        trained = [variable.value for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            if self.is_compiled:
                tape.watch(trained)
            outputs = self.model(inputs, training=True, seed=seed)
            own = self._model_losses()
            terms = self.sums_of(labels, weights, outputs)
            loss = self._loss(terms, weight_sums) + own * self._own_factor
            scaled = loss * scale
        terms |= self.own_losses(labels, own)
        return outputs, loss, terms, tape.gradient(scaled, trained)

    @property
    def _own_factor(self):
        """The factor that makes the model's own losses summands of their mean."""
        return 1 / (self.strategy.num_replicas_in_sync * self.accumulation_steps)

    def _loss(self, terms, weight_sums):
        """Return this replica's summand of the loss.

        By default, `weight_sums` are those of the terms.
        """
        if weight_sums is None:
            weight_sums = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM,
                {name: weight_sum for name, (_, weight_sum) in terms.items()},
            )
        return tf.add_n(
            [
                tf.math.divide_no_nan(total, weight_sums[name]) * self.loss_weights.get(name, 1.0)
                for name, (total, _) in terms.items()
            ]
        )

    def _gradients(self, backward, batch, weight_sums, seed, scale):
        """Return this replica's summands of loss, counts and metrics, and of the gradients.

        `backward` is a method such as `_dense_backward`. `weight_sums` are taken over all replicas,
        so the summands add up to the weighted means.
        """
        inputs, labels, weights = batch
        outputs, loss, _, gradients = backward(batch, weight_sums, seed, scale)
        self._check_reached(gradients)
        if backward == self._cached_backward:
            labels, weights = unstacked((labels, weights))
        sums = {
            "loss": loss,
            **self._counts(inputs, weights),
            **self._metric_sums(labels, weights, outputs, weight_sums),
        }
        return sums, gradients

    def _check_reached(self, gradients):
        """Raise ValueError if a variable has no gradient."""
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

    def _counts(self, inputs, weights):
        """Return the numbers of examples and tokens of a batch; inputs may be stacked batches."""
        # An example counts if any of its elements has a weight, such as one masked position.
        of_any = weights[next(iter(self.more_losses or weights))]
        of_any = tf.reduce_any(tf.reshape(of_any, [tf.shape(of_any)[0], -1]) > 0, axis=1)
        return {
            "examples": tf.reduce_sum(tf.cast(of_any, tf.int32)),
            "tokens": count_tokens(inputs),
        }

    def _metric_sums(self, labels, weights, outputs, weight_sums):
        """Return this replica's summands of the metrics."""
        return {
            name: tf.math.divide_no_nan(
                weighted_sum(metric, labels[output], outputs[output], weights[output])[0],
                weight_sums[output],
            )
            for name, (output, metric) in self.metrics.items()
        }

    def _accumulated(self, batches, weight_sums, seed, scale):
        """Return the sums and gradients over all stacked batches, one in memory at a time."""

        def add(number, sums, gradients):
            batch = _batch_at(batches, number)
            seed_of_batch = batch_seed(seed, number)
            more = self._gradients(self._backward, batch, weight_sums, seed_of_batch, scale)
            sums, gradients = _sum_of((sums, gradients), more)
            return number + 1, sums, gradients

        start = {
            **dict.fromkeys(("loss", *self.metrics), tf.zeros([])),
            **dict.fromkeys(("examples", "tokens"), tf.zeros([], tf.int32)),
        }
        # Gradients are added up, not averaged: weight_sums already cover all stacked batches.
        count = _num_stacked(batches)
        _, sums, gradients = _one_by_one(count, add, (0, start, self._zeros()))
        return sums, gradients

    def _joined(self, array, lengths, shape):
        """Return the outputs of all batches as one, filled up to the longest sequence of all."""
        if self.is_compiled:
            return _unstacked_batches(array.stack())
        if shape.rank == 0:
            return array.concat()
        rows = tf.RaggedTensor.from_row_lengths(array.concat(), lengths.concat(), validate=False)
        return rows.to_tensor(MASKED_SCORE)

    def _zeros(self):
        return [tf.zeros(variable.shape) for variable in self.model.trainable_variables]

    def _cached_backward(self, batches, weight_sums, seed, scale):
        """Do what `_backward` does, for losses of all stacked batches together.

        The outputs of all batches come first. The gradient of the loss by them is then that of the
        sum of outputs * gradient, one batch at a time, with the same dropout.
        """
        count = _num_stacked(batches)

        def outputs_of(inputs, number):
            return self.model(inputs, training=True, seed=batch_seed(seed, number))

        def append(number, arrays, lengths):
            inputs, _, _ = _batch_at(batches, number)
            outputs = outputs_of(inputs, number)
            arrays, lengths = dict(arrays), dict(lengths)
            for name, array in arrays.items():
                values = outputs[name]
                shape = values.shape[1:]
                shapes[name] = shapes.get(name, shape).most_specific_compatible_shape(shape)
                # The sequences of another batch may be longer.
                if lengths and shape.rank > 0:
                    sizes = tf.shape(values)
                    lengths[name] = lengths[name].write(number, tf.fill(sizes[:1], sizes[1]))
                    values = tf.reshape(values, tf.concat([[-1], sizes[2:]], axis=0))
                arrays[name] = array.write(number, values)
            return number + 1, arrays, lengths

        def array_per_output(dtype):
            return {
                output: tf.TensorArray(dtype, count, infer_shape=False)
                for output, _ in self._terms.values()
            }

        shapes: dict[str, tf.TensorShape] = {}  # Of an example's outputs, known once traced.
        lengths = {} if self.is_compiled else array_per_output(tf.int32)
        start = (0, array_per_output(tf.float32), lengths)
        if self.is_compiled:  # XLA has to know the shape of the outputs before the loop.
            start = append(*start)
        _, arrays, lengths = _one_by_one(count, append, start)
        labels, weights = unstacked(batches[1:])
        outputs = {
            name: tf.ensure_shape(
                self._joined(array, lengths.get(name), shapes[name]), [None, *shapes[name]]
            )
            for name, array in arrays.items()
        }
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            terms = self.sums_of(labels, weights, outputs)
            loss = self._loss(terms, weight_sums)
            scaled = loss * scale
        rows = next(iter(batches[2].values()))
        by_outputs = {
            name: _stacked_as(rows, values)
            for name, values in tape.gradient(scaled, outputs).items()
        }

        def add(number, own, gradients):
            inputs, _, _ = _batch_at(batches, number)
            trained = [variable.value for variable in self.model.trainable_variables]
            with tf.GradientTape() as tape:
                if self.is_compiled:
                    tape.watch(trained)
                outputs = outputs_of(inputs, number)
                more_own = self._model_losses()
                products = [
                    tf.reduce_sum(outputs[name] * _cut(of_all[number], outputs[name]))
                    for name, of_all in by_outputs.items()
                ]
                total = tf.add_n(products) + more_own * self._own_factor * scale
            more = tape.gradient(total, trained)
            self._check_reached(more)
            return number + 1, own + more_own, _sum_of(gradients, more)

        _, own, gradients = _one_by_one(count, add, (0, tf.zeros([]), self._zeros()))
        terms |= self.own_losses(labels, own / self.accumulation_steps)
        return outputs, loss + own * self._own_factor, terms, gradients


def dropout_seed(seed: int, step: keras.Variable, replica_id: tf.Tensor | int) -> tf.Tensor:
    """Return the dropout seed of a step, int64 `(2,)`.

    Layers add their dropout_id, which is below 2**16, to the second number, and `batch_seed` adds
    the batch to the first.

    Args:
        seed: Seed of the training, below 2**32.
        step: Iterations of the optimizer.
        replica_id: Index of the replica.
    """
    # Each (batch, step, replica) has its own pair: the second number holds the dropout_id in bits 0
    # to 15, the replica in bits 16 to 31 and the step above.
    step = tf.cast(tf.convert_to_tensor(step), tf.int64)
    second = step * 2**32 + tf.cast(replica_id, tf.int64) * 2**16
    return tf.stack([tf.constant(seed, tf.int64), second])


def batch_seed(seed: tf.Tensor, number: tf.Tensor | int) -> tf.Tensor:
    """Return the dropout seed of a batch within the step, with gradient accumulation."""
    return seed + tf.stack([tf.cast(number, tf.int64) * 2**32, 0])


def batch_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the number of batches an optimizer has seen.

    With gradient accumulation of Keras, `iterations` counts updates, and Keras has no other name
    for the number of batches.
    """
    return innermost(optimizer)._iterations


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that updates the weights, of a wrapper such as LossScaleOptimizer."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _num_stacked(batches):
    """Return the number of stacked batches."""
    weights = next(iter(batches[2].values()))
    return weights.shape[0] or tf.cast(tf.shape(weights)[0], tf.int32)


def _one_by_one(count, function, values):
    """Return the values after calls of a function of them until the first one is `count`."""
    # By default TensorFlow starts up to ten calls before the first one has ended, and needs the
    # memory of all of them.
    return tf.while_loop(lambda number, *_: number < count, function, values, parallel_iterations=1)


def _batch_at(batches, number):
    """Return one of the stacked batches. Values per token end with its longest sequence."""

    def dense(stacked):
        values = stacked[number]
        return values.to_tensor() if isinstance(values, tf.RaggedTensor) else values

    return tf.nest.map_structure(dense, batches)


def unstacked(batches: Any) -> Any:
    """Return a structure of stacked batches as one of a single batch."""
    return tf.nest.map_structure(_unstacked_batches, batches)


def _unstacked_batches(stacked):
    """Return stacked batches as one, of a dense or ragged tensor."""
    if isinstance(stacked, tf.RaggedTensor):
        values = stacked.values
        return values.to_tensor() if isinstance(values, tf.RaggedTensor) else values
    return tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], axis=0))


def _stacked_as(stacked, values):
    """Do the reverse of `_unstacked_batches`, with the numbers of rows of `stacked`."""
    if isinstance(stacked, tf.RaggedTensor):
        return stacked.with_values(values)
    return tf.reshape(values, tf.concat([tf.shape(stacked)[:2], tf.shape(values)[1:]], axis=0))


def _cut(values, outputs):
    """Return values of all stacked batches without those that a batch is too short for."""
    return values if outputs.shape.rank < 2 else values[:, : tf.shape(outputs)[1]]


def _sum_of(one, other):
    return tf.nest.map_structure(lambda x, y: x + tf.convert_to_tensor(y), one, other)


def _poison(gradients, loss):
    """Add NaN to a gradient if the loss is not finite."""
    reached = [number for number, grad in enumerate(gradients) if grad is not None]
    if not reached:
        raise UserError("the loss depends on no weight that is trained; freeze fewer layers")
    gradients[reached[-1]] += tf.where(tf.math.is_finite(loss), 0.0, float("nan"))


def _dense(gradients):
    """Return gradients, of which some may be sparse, as tensors."""
    return [None if of is None else tf.convert_to_tensor(of) for of in gradients]


def _compile(function):
    return tf.function(function, jit_compile=True, autograph=False)
