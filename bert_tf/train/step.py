"""The train step: one update over all replicas. The only place where gradients are taken."""

import tensorflow as tf

COUNTS = ("examples", "tokens", "asked_to_stop")


class TrainStep:
    """Takes batches from an iterator and updates the model once.

    A batch is (inputs, labels, weights): inputs for the model, labels and weights dicts keyed like
    the model's outputs; a weight of 0 marks filler that makes replicas' shares equal. `losses` maps
    an output to a function (labels, output) -> one loss an element. The loss is the sum over
    outputs of sum(weight * loss) / sum(weight), both sums taken over all replicas, so that the
    number of replicas changes nothing. `metrics` maps a name to (output, function) of a figure
    that is told beside the loss, averaged alike.

    With `accumulation_steps` K an element of the iterator is K batches, stacked on a new first axis
    (Dataset.batch, or ragged_batch), one behind the other in memory: the sums go over all of them,
    which makes the update that of one batch K times as large.

    Dropout's noise is a function of (seed, step, replica, batch, dropout_id): nothing random is
    kept between steps.

    Where a loss or gradient is not finite on any replica, none of them updates anything: it is an
    InvalidArgumentError, or, where XLA leaves checks out, a "gradient_norm" that is not finite.
    """

    def __init__(
        self, model, losses, optimizer, strategy, seed, metrics=None, accumulation_steps=1
    ):
        self.model, self.losses, self.optimizer, self.strategy = model, losses, optimizer, strategy
        self.seed, self.metrics = seed, metrics or {}
        self.accumulation_steps = accumulation_steps
        if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
            # Keras 3's LossScaleOptimizer looks at one replica's gradients only.
            raise ValueError("float16 wants its loss scaled, which is not done here: use bfloat16")

    @tf.function(autograph=False)
    def __call__(self, iterator, is_asked_to_stop=False, num_steps=None):
        """One update -> scalars: "loss", metrics, "gradient_norm", "learning_rate", and counts.

        Counted are "examples", those of any weight; "tokens"; and "asked_to_stop", the replicas
        whose process is. With an int32 scalar `num_steps` it makes so many updates and returns the
        last one's scalars and the counts of all; it ends early after one that is not finite.
        """
        if num_steps is None:
            return self._update(iterator, is_asked_to_stop)
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

    def _update(self, iterator, is_asked_to_stop):
        learning_rate = tf.cast(self.optimizer.learning_rate, tf.float32)
        asked = tf.cast(is_asked_to_stop, tf.int32)
        sums, norm = self.strategy.run(self._on_replica, args=(next(iterator), asked))
        total = tf.distribute.ReduceOp.SUM
        return {
            **{name: self.strategy.reduce(total, value, axis=None) for name, value in sums.items()},
            "gradient_norm": self.strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None),
            "learning_rate": learning_rate,
        }

    def _on_replica(self, batch, asked):
        replica = tf.distribute.get_replica_context()
        weights = batch[2]
        weight_sums = replica.all_reduce(
            tf.distribute.ReduceOp.SUM, {name: _sum(weights[name]) for name in self.losses}
        )
        if self.accumulation_steps == 1:
            sums, gradients = self._gradients(batch, weight_sums, self._dropout_seed(replica))
        else:
            sums, gradients = self._accumulated(batch, weight_sums, replica)
        # A loss can be infinite where its gradient is not: the update has to know of it.
        gradients[-1] += tf.where(tf.math.is_finite(sums["loss"]), 0.0, float("nan"))
        norm = self.optimizer.apply(gradients, self.model.trainable_variables)
        return {**sums, "asked_to_stop": tf.identity(asked)}, norm

    def _gradients(self, batch, weight_sums, seed):
        """This replica's share of {"loss", "examples", metrics}, and of the loss' gradients."""
        inputs, labels, weights = batch

        def mean(output, values):
            return tf.math.divide_no_nan(
                tf.reduce_sum(weights[output] * values), weight_sums[output]
            )

        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=True, seed=seed)
            loss = tf.add_n(
                [
                    mean(name, loss(labels[name], outputs[name]))
                    for name, loss in self.losses.items()
                ]
            )
        gradients = tape.gradient(loss, self.model.trainable_variables)
        without = [
            variable.path
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True)
            if gradient is None
        ]
        if without:
            raise ValueError(f"no gradient reaches {', '.join(without)}: does the loss need it?")
        of_any = next(iter(weights.values()))
        of_any = tf.reduce_any(tf.reshape(of_any, [tf.shape(of_any)[0], -1]) > 0, axis=1)
        # What is trained on vectors has no tokens.
        tokens = inputs["row_splits"][-1] if "row_splits" in inputs else inputs.get("input_mask", 0)
        sums = {
            "loss": loss,
            "examples": tf.reduce_sum(tf.cast(of_any, tf.int32)),
            "tokens": tf.reduce_sum(tf.cast(tokens, tf.int32)),
            **{
                name: mean(output, metric(labels[output], outputs[output]))
                for name, (output, metric) in self.metrics.items()
            },
        }
        return sums, gradients

    def _accumulated(self, batches, weight_sums, replica):
        """The sums and gradients of all stacked batches, one worked on at a time."""

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
        _, sums, gradients = tf.while_loop(
            lambda number, *_: number < tf.cast(count, tf.int32), add, (0, start, zeros)
        )
        return sums, gradients

    def _dropout_seed(self, replica, batch=0):
        """An int64 pair; layers add their dropout_id, at most 2**16, to the second."""
        step = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.int64)
        replica_id = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        first = tf.cast(batch, tf.int64) * 2**32 + self.seed
        return tf.stack([first, step * 2**32 + replica_id * 2**16])


def _sum(values):
    """Of a tensor, dense or ragged."""
    return tf.reduce_sum(values.flat_values if isinstance(values, tf.RaggedTensor) else values)
