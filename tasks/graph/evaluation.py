"""Evaluation of a model on all examples of a dataset.

Shape suffixes: S samples, B samples of a replica's batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bert_tf.model.bucketing import EVALUATION_BATCH_SIZE
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.system.progress import Progress
from bert_tf.train.compilation import compile_with_weights, is_accelerated
from bert_tf.train.distribution import distribute, gather
from bert_tf.train.losses import weighted_sum
from tasks.base.task import Loss, Task
from tasks.data.examples import Arrays, EncodedExamples

OnBatch = Callable[[np.ndarray, Arrays], None]
OnLabels = Callable[[np.ndarray, Arrays, Arrays, Arrays], None]


class Evaluator:
    """Evaluates a model on encoded examples, on all replicas; its graph is built once.

    XLA compiles the model for examples of static shapes.
    """

    def __init__(
        self,
        task: Task,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        replica_batch_size: int = EVALUATION_BATCH_SIZE,
        log: Callable[[str], None] = lambda line: None,
    ):
        """Evaluate the task's model, which was created in the scope of `strategy`."""
        self.task, self.model, self.strategy = task, model, strategy
        self.replica_batch_size, self.log = replica_batch_size, log
        # Losses of Keras and their weights, if the model is compiled with others than the task's.
        self.losses: Mapping[str, Loss] | None = None
        self.loss_weights: Mapping[str, float] = {}
        # Receives the sample indices of each batch, with labels, weights and outputs by name.
        self.on_labels: OnLabels | None = None
        self.on_samples: Callable[[int], None] | None = None  # Receives the samples done so far.
        self._compiled = compile_with_weights(model, self._outputs_of_replica, strategy)

    def metrics(self, encoded: EncodedExamples) -> dict[str, float]:
        """Return the task's metrics and the loss over all examples, by name."""
        return self._measured(encoded)[0]

    def report(self, encoded: EncodedExamples) -> dict[str, Any]:
        """Return the metrics and the task's tables, by name."""
        metrics, outputs = self._measured(encoded)
        return {**metrics, **self.task.report(encoded, outputs)}

    def _measured(self, encoded):
        """Return (metrics and loss, outputs); the loss is without dropout and sample weights."""
        losses = self.task.losses if self.losses is None else self.losses
        sums = {name: np.zeros(2) for name in losses}

        def add_losses(numbers, outputs):
            labels, weights = (
                {
                    name: _of_samples(values[name], numbers, outputs[name].shape[1:2])
                    for name in losses
                }
                for values in (encoded.labels, encoded.weights)
            )
            outputs = {name: outputs[name] for name in losses}
            for name, loss in losses.items():
                with tf.device("CPU:0"):  # Where the outputs are, while a GPU computes the next.
                    sums[name] += weighted_sum(loss, labels[name], outputs[name], weights[name])
            if self.on_labels:
                self.on_labels(numbers, labels, weights, outputs)

        outputs = self.outputs(encoded, on_batch=add_losses)
        means = {name: float(total / max(weight, 1e-12)) for name, (total, weight) in sums.items()}
        loss = sum(mean * self.loss_weights.get(name, 1.0) for name, mean in means.items())
        # As in training; those of `add_loss` are part of the calls in a graph.
        of_weights = [
            float(tf.reduce_sum(variable.regularizer(variable)))
            for variable in self.model.trainable_variables
            if variable.regularizer is not None
        ]
        of_task = self.task.metrics(encoded, outputs) | self.task.metrics_of_losses(means)
        return {**of_task, "loss": loss + sum(of_weights)}, outputs

    def outputs(
        self,
        encoded: EncodedExamples,
        reduced: bool = True,
        on_batch: OnBatch = lambda numbers, outputs: None,
    ) -> dict[str, np.ndarray]:
        """Return the outputs of all samples, `(S, ...)` by name.

        Outputs per token are padded to the task's max_seq_length with MASKED_SCORE.

        Args:
            encoded: The examples.
            reduced: Whether `Task.metric_inputs` reduces the outputs.
            on_batch: Receives the sample indices of each batch, and its outputs before they are
                reduced.
        """
        if encoded.windows.choice_W is not None:
            return self._outputs_on_grid(encoded, reduced, on_batch)
        order = encoded.by_length()
        # Arrays are allocated after the first batch, whose outputs show shapes and dtypes.
        result: dict[str, np.ndarray] = {}
        first, not_finite = 0, []
        with Progress(self.log, "samples", len(encoded)) as progress:
            for outputs, is_sample in self._forwarded(encoded, order):
                outputs = gather(self.strategy, outputs)
                # The last batch of a replica may end with padding samples, which are dropped here.
                kept = gather(self.strategy, {"kept": is_sample})["kept"] > 0
                parts: Arrays = {name: values[kept] for name, values in outputs.items()}
                numbers = order[first : first + int(kept.sum())]
                not_finite += _not_finite(numbers, parts)
                on_batch(numbers, parts)
                if reduced:
                    parts = self.task.metric_inputs(parts)
                if not result:
                    result = {
                        name: np.empty((len(encoded), *values.shape[1:]), values.dtype)
                        for name, values in parts.items()
                    }
                for name, values in parts.items():
                    result[name][numbers] = values
                first += len(numbers)
                progress.update(first)
                if self.on_samples:
                    self.on_samples(first)
        if not_finite:
            self.log(
                f"warning: outputs that are not finite for {len(not_finite)} of {len(encoded)} "
                f"samples, the first of them of row {encoded.example_of_sample()[min(not_finite)]} "
                "from 0; did training diverge?"
            )
        return result

    def _outputs_on_grid(self, encoded, reduced, on_batch):
        """Return `outputs` of lists of texts.

        Texts are evaluated one by one, since a single list may not fit into memory.
        """
        of_texts = self.outputs(encoded.by_window(), reduced=False)
        place_W = (np.asarray(encoded.windows.example_W), np.asarray(encoded.windows.choice_W))
        shape, outputs = (len(encoded), 1 + int(np.max(place_W[1]))), {}
        for name in list(of_texts):
            values = of_texts.pop(name)
            outputs[name] = np.full((*shape, *values.shape[1:]), self.model.missing, values.dtype)
            outputs[name][place_W] = values
        size = self.replica_batch_size * self.strategy.num_replicas_in_sync
        # A loss that compares the rows of a batch gets batches as in training.
        order = self.task.epoch_order(encoded, np.random.default_rng(0))
        for numbers in np.split(order, range(size, len(encoded), size)):
            on_batch(numbers, {name: values[numbers] for name, values in outputs.items()})
        return self.task.metric_inputs(outputs) if reduced else outputs

    def _forwarded(self, encoded, order):
        """Yield the outputs of each batch, and which of its samples are no padding.

        A GPU has the next batch by then, so that it never waits for Python.
        """
        size = self.replica_batch_size
        batches = distribute(
            lambda local: encoded.evaluation_batches(order, size, local.total, local.select),
            self.strategy,
            encoded.static_shape,
        )
        launched, num_ahead = [], int(is_accelerated(self.strategy))
        for batch in batches:
            launched.append(self._forward(batch, encoded.static_shape))
            if len(launched) > num_ahead:
                yield launched.pop(0)
        yield from launched

    @tf.function(reduce_retracing=True, autograph=False)
    def _forward(self, batch, is_compiled):
        function = self._compiled if is_compiled else self._outputs_of_replica
        return self.strategy.run(function, args=(batch,))

    def _outputs_of_replica(self, batch):
        inputs, is_sample_B = batch
        outputs = self.model(inputs)
        return {name: self._filled(values) for name, values in outputs.items()}, is_sample_B

    def _filled(self, values):
        """Pad outputs per token to max_seq_length, so that batches and replicas can be joined."""
        if not self.task.has_windows:
            return values
        missing = self.task.max_seq_length - tf.shape(values)[1]
        paddings = [[0, 0], [0, missing], *[[0, 0]] * (values.shape.rank - 2)]
        return tf.pad(values, paddings, constant_values=MASKED_SCORE)


def _not_finite(numbers, outputs):
    """Return the numbers of the samples that have an output that is not finite."""
    rows = [values.reshape(len(numbers), -1) for values in outputs.values()]
    return numbers[~np.all([np.isfinite(row).all(axis=1) for row in rows], axis=0)].tolist()


def _of_samples(values, numbers, length):
    """Return labels or weights of some samples; ragged ones are padded with 0 to `length`."""
    if isinstance(values, tf.RaggedTensor):
        return tf.gather(values, numbers).to_tensor(0, shape=[None, *length])
    return values[numbers]
