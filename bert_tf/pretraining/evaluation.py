"""Evaluation of a pretraining model on held-out shards."""

import math
from collections.abc import Callable

import tensorflow as tf

from bert_tf.data.batches import (
    PretrainingDataset,
    flatten_examples,
    names_bad_record,
    pack_examples,
)
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.train.compilation import compile_with_weights, packed_shape
from bert_tf.train.distribution import LocalReplicas, distribute
from bert_tf.train.losses import weighted_sum

BATCH_EXAMPLES = 64
# Output and function of each metric.
_TERMS = {**{f"{name}_loss": (name, loss) for name, loss in LOSSES.items()}, **METRICS}


class PretrainingEvaluator:
    """Sum losses and correct predictions over held-out examples and all replicas.

    Each example is counted once. If `is_compiled`, XLA compiles the evaluation, on packed batches
    instead of flat ones. `num_batches` batches of 64 examples are taken from the start, by default
    all.
    """

    def __init__(
        self,
        model: PretrainingModel,
        strategy: tf.distribute.Strategy,
        data: PretrainingDataset,
        is_compiled: bool = False,
        num_batches: int | None = None,
    ) -> None:
        self.model, self.strategy, self.data = model, strategy, data
        self.is_compiled = is_compiled
        self.layout: Callable[..., dict[str, tf.Tensor]] = flatten_examples
        self._sums_on_replica = self._on_replica
        if is_compiled:
            lengths, size = data.sequence_lengths(), data.max_seq_length
            shape = packed_shape(lengths, BATCH_EXAMPLES, size, strategy)
            self.layout = lambda examples: pack_examples(_filled_up(examples), shape)
            self._sums_on_replica = compile_with_weights(model, self._on_replica, strategy)
        self._terms = {
            name: term
            for name, term in _TERMS.items()
            if data.manifest.has_next_sentence or term[0] == "masked_lm"
        }
        # Ceiling division, as the last batch may be smaller.
        everything = -(-len(data) // BATCH_EXAMPLES)
        self.num_batches = min(num_batches or everything, everything)

    @names_bad_record()
    def metrics(self) -> dict[str, float]:
        """Evaluate the model; "perplexity" is exp of the masked_lm_loss.

        The others are "masked_lm_loss", "masked_lm_accuracy" and, of pairs of segments,
        "next_sentence_loss" and "next_sentence_accuracy".
        """
        sums = tf.zeros([len(self._terms), 2], tf.float64)
        for batch in distribute(self._batches, self.strategy, self.is_compiled):
            sums += self._sums(batch)  # On the device, which never waits for Python.
        # The lower bound avoids a division by zero if no position is masked.
        metrics = {
            name: total / max(weight, 1e-12)
            for name, (total, weight) in zip(self._terms, sums.numpy().tolist(), strict=True)
        }
        # exp overflows float64 above 709.
        return {**metrics, "perplexity": math.exp(min(metrics["masked_lm_loss"], 700))}

    def _batches(self, local: LocalReplicas) -> tf.data.Dataset:
        """Return the batches of some replicas, completed by batches of weight 0."""

        def batches(select):
            examples = self.data.evaluation_batches(BATCH_EXAMPLES, self.layout, select)
            return examples.map(to_batch)

        # Every replica takes part in each step, so batches of weight 0 complete the last step.
        filler = batches(lambda all_batches: all_batches.take(1)).map(
            lambda inputs, labels, weights: (
                inputs,
                labels,
                {name: tf.zeros_like(weight) for name, weight in weights.items()},
            )
        )
        own = batches(lambda all_batches: local.select(all_batches.take(self.num_batches)))
        num_steps = -(-self.num_batches // local.total)
        return own.concatenate(filler.repeat()).take(num_steps * local.count)

    @tf.function(reduce_retracing=True, autograph=False)
    def _sums(self, batch):
        """Return the results of `weighted_sum` of a step, by term."""
        sums = self.strategy.run(self._sums_on_replica, args=(batch,))
        sums = self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        return tf.cast(sums, tf.float64)

    def _on_replica(self, batch):
        inputs, labels, weights = batch
        outputs = self.model(inputs)
        return tf.stack(
            [
                weighted_sum(function, labels[name], outputs[name], weights[name])
                for name, function in self._terms.values()
            ]
        )


def _filled_up(examples):
    """Append examples without tokens, up to BATCH_EXAMPLES: a static shape for XLA."""

    def fill(tensor):
        missing = BATCH_EXAMPLES - tf.shape(tensor)[0]
        filled = tf.pad(tensor, [[0, missing], *[[0, 0]] * (tensor.shape.rank - 1)])
        return tf.ensure_shape(filled, [BATCH_EXAMPLES, *tensor.shape[1:]])

    return tf.nest.map_structure(fill, examples)
