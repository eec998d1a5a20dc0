"""How a pretraining model does on held-out shards.

Legend: B examples.
"""

import math

import tensorflow as tf

from bert_tf.data.batches import pad_examples
from bert_tf.pretraining.model import LOSSES, METRICS, to_batch
from bert_tf.train.distribution import distribute

BATCH_EXAMPLES = 64


class PretrainingEvaluator:
    """Sums losses and right answers over all examples, each counted once, over all replicas."""

    def __init__(self, model, strategy, data, layout, num_batches=None):
        """`num_batches` of BATCH_EXAMPLES each are taken from the start; by default all."""
        self.model, self.strategy, self.data, self.layout = model, strategy, data, layout
        everything = -(-len(data) // BATCH_EXAMPLES)
        self.num_batches = min(num_batches or everything, everything)

    def metrics(self):
        """-> {"masked_lm_loss", "perplexity", "masked_lm_accuracy", "next_sentence_loss", ...}."""
        totals = {}
        for batch in distribute(self._batches, self.strategy):
            for name, value in self._sums(batch).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        means = {
            name: total / max(totals[f"{name.split('/')[0]}/weight"], 1e-12)
            for name, total in totals.items()
            if not name.endswith("/weight")
        }
        metrics = {name.replace("/", "_"): value for name, value in means.items()}
        return {**metrics, "perplexity": math.exp(min(metrics["masked_lm_loss"], 700))}

    def _batches(self):
        """Batches for every replica; the last may be filled up with examples of weight 0."""
        batches = self.data.evaluation_batches(BATCH_EXAMPLES, self.layout)
        batches = batches.take(self.num_batches).map(to_batch)
        if self.layout is pad_examples:
            batches = batches.map(_filled_up)
        missing = -self.num_batches % self.strategy.num_replicas_in_sync
        filler = batches.take(1).repeat(missing)
        return batches.concatenate(
            filler.map(
                lambda inputs, labels, weights: (
                    inputs,
                    labels,
                    {name: tf.zeros_like(weight) for name, weight in weights.items()},
                )
            )
        )

    @tf.function(reduce_retracing=True, autograph=False)
    def _sums(self, batch):
        def on_replica(batch):
            inputs, labels, weights = batch
            outputs, sums = self.model(inputs), {}
            for name, loss in LOSSES.items():
                sums[f"{name}/loss"] = weights[name] * loss(labels[name], outputs[name])
                sums[f"{name}/weight"] = weights[name]
            for name, metric in METRICS.values():
                sums[f"{name}/accuracy"] = weights[name] * metric(labels[name], outputs[name])
            return {name: tf.reduce_sum(values) for name, values in sums.items()}

        sums = self.strategy.run(on_replica, args=(batch,))
        return {
            name: self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
            for name, value in sums.items()
        }


def _filled_up(*batch):
    """The batch with BATCH_EXAMPLES rows: XLA wants one shape. The added ones have weight 0."""

    def fill(tensor):
        missing = BATCH_EXAMPLES - tf.shape(tensor)[0]
        filled = tf.pad(tensor, [[0, missing], *[[0, 0]] * (tensor.shape.rank - 1)])
        return tf.ensure_shape(filled, [BATCH_EXAMPLES, *tensor.shape[1:]])

    return tf.nest.map_structure(fill, batch)
