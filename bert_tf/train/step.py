"""The train step: one update over all replicas. The only place where gradients are taken."""

import tensorflow as tf


class TrainStep:
    """Takes a batch from an iterator and updates the model once.

    A batch is (inputs, labels, weights): inputs for the model, labels and weights dicts keyed like
    the model's outputs; a weight of 0 marks filler that makes replicas' shares equal. `losses` maps
    an output to a function (labels, output) -> one loss an element. The loss is the sum over
    outputs of sum(weight * loss) / sum(weight), both sums taken over all replicas, so that the
    number of replicas changes nothing.

    Dropout's noise is a function of (seed, step, replica, place): nothing random is kept between
    steps.
    """

    def __init__(self, model, losses, optimizer, strategy, seed):
        self.model, self.losses, self.optimizer, self.strategy = model, losses, optimizer, strategy
        self.seed = seed

    @tf.function(autograph=False)
    def __call__(self, iterator):
        """One update -> {"loss", "gradient_norm", "learning_rate", "examples"} scalars."""
        learning_rate = tf.cast(self.optimizer.learning_rate, tf.float32)
        loss, norm, examples = self.strategy.run(self._on_replica, args=(next(iterator),))
        total = tf.distribute.ReduceOp.SUM
        return {
            "loss": self.strategy.reduce(total, loss, axis=None),
            "gradient_norm": self.strategy.reduce(tf.distribute.ReduceOp.MEAN, norm, axis=None),
            "learning_rate": learning_rate,
            "examples": self.strategy.reduce(total, examples, axis=None),
        }

    def _on_replica(self, batch):
        inputs, labels, weights = batch
        replica = tf.distribute.get_replica_context()
        weight_sums = replica.all_reduce(
            tf.distribute.ReduceOp.SUM, {name: tf.reduce_sum(weights[name]) for name in self.losses}
        )
        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=True, seed=self._dropout_seed(replica))
            loss = tf.add_n(
                [
                    tf.math.divide_no_nan(
                        tf.reduce_sum(weights[name] * loss(labels[name], outputs[name])),
                        weight_sums[name],
                    )
                    for name, loss in self.losses.items()
                ]
            )  # This replica's share of the loss.
        gradients = tape.gradient(loss, self.model.trainable_variables)
        without = [
            variable.path
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True)
            if gradient is None
        ]
        if without:
            raise ValueError(f"no gradient reaches {', '.join(without)}: does the loss need it?")
        norm = self.optimizer.apply(gradients, self.model.trainable_variables)
        examples = tf.reduce_sum(tf.cast(next(iter(weights.values())) > 0, tf.int32))
        return loss, norm, examples

    def _dropout_seed(self, replica):
        """An int64 pair; layers add their place, at most 2**16, to the second."""
        step = tf.cast(tf.convert_to_tensor(self.optimizer.iterations), tf.int64)
        replica_id = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        return tf.stack([tf.constant(self.seed, tf.int64), step * 2**32 + replica_id * 2**16])
