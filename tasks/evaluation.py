"""Runs a model over a whole data set and measures it."""

import numpy as np
import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.train.distribution import distribute, gather


class Evaluator:
    """Evaluates a model on encoded examples, over all replicas; its graph is built once."""

    def __init__(self, task, model, strategy, replica_batch_size=64):
        self.task, self.model, self.strategy = task, model, strategy
        self.replica_batch_size = replica_batch_size

    def metrics(self, encoded):
        """{name: figure} of the task's metrics, and the loss, over all examples of a data set."""
        return self._figures(encoded, self.outputs(encoded))

    def report(self, encoded):
        """The metrics, and beside them the task's tables."""
        outputs = self.outputs(encoded)
        return {**self._figures(encoded, outputs), **self.task.report(encoded, outputs)}

    def outputs(self, encoded):
        """{output name: array [U, ...]} in the order of the units.

        What has an entry a token is filled up to the task's max_seq_length, as the heads do.
        """
        order, replicas = encoded.by_length(), self.strategy.num_replicas_in_sync
        batches = distribute(
            lambda: encoded.evaluation_batches(order, self.replica_batch_size, replicas),
            self.strategy,
        )
        result, first = None, 0
        for batch in batches:
            outputs, is_unit = self._forward(batch)
            kept = gather(self.strategy, {"kept": is_unit})["kept"] > 0
            parts = {name: values[kept] for name, values in gather(self.strategy, outputs).items()}
            if result is None:
                result = {
                    name: np.empty((len(encoded), *values.shape[1:]), values.dtype)
                    for name, values in parts.items()
                }
            numbers = order[first : first + int(kept.sum())]
            for name, values in parts.items():
                result[name][numbers] = values
            first += len(numbers)
        return result

    def _figures(self, encoded, outputs):
        return {**self.task.metrics(encoded, outputs), "loss": self._loss(encoded, outputs)}

    @tf.function(reduce_retracing=True, autograph=False)
    def _forward(self, batch):
        def on_replica(batch):
            inputs, is_unit_B = batch
            outputs = self.model(inputs)
            return {name: self._filled(values) for name, values in outputs.items()}, is_unit_B

        return self.strategy.run(on_replica, args=(batch,))

    def _filled(self, values):
        """So that batches, and replicas, of different lengths can be joined."""
        if not self.task.has_windows:
            return values
        missing = self.task.max_seq_length - tf.shape(values)[1]
        paddings = [[0, 0], [0, missing], *[[0, 0]] * (values.shape.rank - 2)]
        return tf.pad(values, paddings, constant_values=MASKED_SCORE)

    def _loss(self, encoded, outputs):
        """As in training, but for dropout and the weights of rare classes."""
        total = 0.0
        for name, loss in self.task.losses.items():
            sums = np.zeros(2)
            for first in range(0, len(encoded), 1024):
                part = slice(first, first + 1024)
                labels, weights = (
                    values[name][part] for values in (encoded.labels, encoded.weights)
                )
                predicted = outputs[name][part]
                if isinstance(labels, tf.RaggedTensor):
                    shape = [None, predicted.shape[1]]
                    labels, weights = (
                        values.to_tensor(0, shape=shape) for values in (labels, weights)
                    )
                values = loss(labels, predicted).numpy()
                sums += (
                    np.sum(values * weights, dtype=np.float64),
                    np.sum(weights, dtype=np.float64),
                )
            total += sums[0] / max(sums[1], 1e-12)
        return float(total)
