"""Runs a model over a whole data set and measures it."""

import numpy as np
import tensorflow as tf

from bert_tf.train.distribution import distribute, gather


class Evaluator:
    """Evaluates a model on encoded examples, over all replicas; its graph is built once."""

    def __init__(self, task, model, strategy, replica_batch_size=64):
        self.task, self.model, self.strategy = task, model, strategy
        self.replica_batch_size = replica_batch_size

    def metrics(self, encoded):
        """{name: figure} of the task's metrics over all examples, each counted once."""
        return self.task.metrics(encoded.labels, self.outputs(encoded))

    def outputs(self, encoded):
        """{output name: array [N, ...]} in the order of the examples."""
        order, replicas = encoded.by_length(), self.strategy.num_replicas_in_sync
        batches = distribute(
            lambda: encoded.evaluation_batches(order, self.replica_batch_size, replicas),
            self.strategy,
        )
        parts = []
        for batch in batches:
            outputs, weights = self._forward(batch)
            kept = gather(self.strategy, {"weights": weights})["weights"] > 0
            parts.append(
                {name: values[kept] for name, values in gather(self.strategy, outputs).items()}
            )
        result = {}
        for name in parts[0]:
            joined = np.concatenate([part[name] for part in parts])
            result[name] = np.empty_like(joined)
            result[name][order] = joined
        return result

    @tf.function(reduce_retracing=True, autograph=False)
    def _forward(self, batch):
        def on_replica(batch):
            inputs, _, weights = batch
            return self.model(inputs), next(iter(weights.values()))

        return self.strategy.run(on_replica, args=(batch,))
