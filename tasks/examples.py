"""Examples: texts and labels of a file, then as token ids, then as batches.

Legend: N examples, W windows, S samples (what a batch counts: a window or an example), B samples of
a replica's batch, (L) tokens of a window, C windows of a sample.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from bert_tf.text.packing import Packed, to_dense_like
from tasks.windows import Windows, concat

EXAMPLES_PER_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Example:
    """One row: {input name: string}, its label as the task takes it, and where it stood.

    `id` is its name, where rows have one.
    """

    texts: dict
    label: object
    location: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Examples:
    """{input name: N strings, or lists of strings} and N labels as the task reads them.

    `labels` is empty where a file has none; `skipped_rows` are the BadRows that are known of its
    data set.
    """

    texts: dict[str, list]
    labels: list
    skipped_rows: tuple = ()

    def __len__(self):
        return len(next(iter(self.texts.values())))

    def skipped_rows_message(self):
        """How many rows are left out, and the first of them, as a line."""
        return f"{len(self.skipped_rows)} bad rows left out, the first {self.skipped_rows[0]}"

    def filter(self, is_kept):
        """The examples whose number `is_kept` is true of."""
        kept = [number for number in range(len(self)) if is_kept(number)]
        return Examples(
            {name: [texts[number] for number in kept] for name, texts in self.texts.items()},
            [self.labels[number] for number in kept] if self.labels else [],
            self.skipped_rows,
        )

    def slices(self, size=EXAMPLES_PER_BATCH):
        """The texts of `size` rows at a time, in order, as {input name: tensor}."""
        for start in range(0, len(self), size):
            yield {
                name: as_tensor(texts[start : start + size]) for name, texts in self.texts.items()
            }


def as_tensor(texts, rank=None):
    """Strings as [N]; lists of strings as [N, C], short ones filled up with "".

    By their `rank`, 1 or 2; if it is not given, by the first of them.
    """
    if rank == 2 or (rank is None and texts and isinstance(texts[0], list | tuple)):
        return tf.ragged.constant(texts, dtype=tf.string, ragged_rank=1).to_tensor("")
    return tf.constant(texts, tf.string)


class EncodedExamples:
    """Examples as packed token ids, kept ragged: a row takes the memory of its tokens.

    `labels` and `weights` are the task's targets, {output: S elements}; `sample_splits` [S + 1]
    says which windows are a sample's.
    """

    def __init__(self, task, examples, windows, vocabulary, layout, static_shape=False):
        """`layout` is bert_tf.text.packing's `flat` or `padded`; `fit` and XLA want the latter.

        With `static_shape` padded batches are as long as the task's max_seq_length and as many, the
        last one filled up with samples of weight 0: XLA compiles once.
        """
        self.task, self.examples, self.windows = task, examples, windows
        self.vocabulary, self.layout, self.static_shape = vocabulary, layout, static_shape
        self.labels, self.weights = task.targets(examples, windows) if examples.labels else ({}, {})
        if windows.choice_W is None:
            self.sample_splits = np.arange(len(windows.example_W) + 1)
        else:
            self.sample_splits = np.searchsorted(windows.example_W, np.arange(len(examples) + 1))

    @classmethod
    def encode(cls, examples, pipeline, layout, static_shape=False):
        """Tokenizes Examples with `pipeline`, the one that serves."""
        parts = [pipeline.encode(**texts) for texts in examples.slices()]
        size = EXAMPLES_PER_BATCH
        counts = [min(size, len(examples) - first) for first in range(0, len(examples), size)]
        windows = concat(parts, counts)
        return cls(pipeline.task, examples, windows, pipeline.vocabulary, layout, static_shape)

    def __len__(self):
        """The number of samples."""
        return len(self.sample_splits) - 1

    def training_batches(
        self, *, global_batch_size, num_epochs, seed, first_step=0, num_replicas=1
    ):
        """Batches (inputs, labels, weights): all samples once an epoch, ordered by (seed, epoch).

        With the task's `sampling_weights` an epoch draws as many, each with those odds. A step
        takes `num_replicas` elements, global_batch_size / num_replicas samples each. Where the last
        batch of an epoch does not fill a replica's share, the share is shorter; where it leaves
        none, it is one sample of weight 0.
        """
        sampling_weights_S = self.task.sampling_weights(self.examples, self.windows)
        order = [
            _batched(
                _order(np.random.default_rng([seed, epoch]), len(self), sampling_weights_S),
                global_batch_size,
            )
            for epoch in range(num_epochs)
        ]
        return self._batches(
            np.concatenate(order)[first_step:].reshape(-1, global_batch_size // num_replicas),
            self._with_targets(self.task.sample_weights(self.examples, self.windows)),
        )

    def validation_batches(self, global_batch_size):
        """The same without an order of chance: what `fit` takes to validate on."""
        numbers = _batched(np.arange(len(self)), global_batch_size)
        return self._batches(numbers, self._with_targets())

    def evaluation_batches(self, order, replica_batch_size, num_replicas=1):
        """(inputs, is_sample): the samples numbered `order`, once; `num_replicas`
        elements a step.
        """
        numbers = _batched(order, replica_batch_size * num_replicas)
        return self._batches(
            numbers.reshape(-1, replica_batch_size),
            # As numbers, since truth values are not gathered from replicas.
            lambda inputs, numbers_B, is_sample_B: (inputs, tf.cast(is_sample_B, tf.int32)),
        )

    def by_length(self):
        """The samples' numbers, the longest first: batches of equal length hold little padding."""
        lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
        longest_S = np.maximum.reduceat(lengths_W, self.sample_splits[:-1])
        return np.argsort(-longest_S, kind="stable")

    def _with_targets(self, weights_S=None):
        """-> function of (inputs, sample numbers, which are no filler) to what a step takes."""
        labels, weights = (
            {
                name: values if isinstance(values, tf.RaggedTensor) else tf.constant(values)
                for name, values in of_samples.items()
            }
            for of_samples in (self.labels, self.weights)
        )
        if weights_S is None:
            weights_S = np.ones(len(self))
        weights_S = tf.constant(weights_S, tf.float32)

        def batch(inputs, numbers_B, is_sample_B):
            def of_batch(values):
                values = to_dense_like(tf.gather(values, numbers_B), inputs)
                return tf.ensure_shape(values, [numbers_B.shape[0], *values.shape[1:]])

            times_B = tf.where(is_sample_B, tf.gather(weights_S, numbers_B), 0.0)

            def weighted(values):
                values = of_batch(values)
                return values * tf.reshape(times_B, [-1] + [1] * (values.shape.rank - 1))

            return (
                inputs,
                {name: of_batch(values) for name, values in labels.items()},
                {name: weighted(values) for name, values in weights.items()},
            )

        return batch

    def _batches(self, numbers, finish):
        """numbers [batches, B], -1 where there is none -> dataset of what `finish` makes."""
        inputs_of = self._inputs_of()

        def batch(numbers_B):
            count = tf.maximum(tf.reduce_sum(tf.cast(numbers_B >= 0, tf.int32)), 1)
            if self.static_shape:
                count = numbers_B.shape[0]
            is_sample_B = numbers_B[:count] >= 0
            numbers_B = tf.maximum(numbers_B[:count], 0)
            return finish(inputs_of(numbers_B, count), numbers_B, is_sample_B)

        dataset = tf.data.Dataset.from_tensor_slices(numbers.astype(np.int32))
        return dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )

    def _inputs_of(self):
        """-> function of (sample numbers [B], B) to what the model takes."""
        windows_of_samples = tf.RaggedTensor.from_row_splits(
            tf.range(self.sample_splits[-1]), self.sample_splits, validate=False
        )
        packed, choice_W = self.windows.packed, self.windows.choice_W
        max_choices = None if choice_W is None else int(np.max(choice_W)) + 1
        length = {"length": self.task.max_seq_length} if self.static_shape else {}

        def inputs_of(numbers_B, count):
            numbers_BC = tf.gather(windows_of_samples, numbers_B)
            parts = [tf.gather(part, numbers_BC.flat_values) for part in packed[:2]]
            inputs = self.layout(Packed(*parts), self.vocabulary, **length)
            if self.static_shape:
                inputs = _filled_up(inputs, count * (max_choices or 1))
            if choice_W is not None:
                chosen = Windows(
                    packed,
                    numbers_BC.value_rowids(),
                    choice_W=tf.gather(choice_W, numbers_BC.flat_values),
                )
                inputs["windows"] = chosen.choice_grid(count, max_choices)
            return inputs

        return inputs_of


class FeatureExamples(EncodedExamples):
    """EncodedExamples as the vectors that a frozen encoder makes of them: {"vector": [B, H]}.

    They are made once, when first asked for, since a run that goes on has its weights only then;
    S vectors of H float32 stay in memory.
    """

    def __init__(self, encoded, evaluator, log):
        """`evaluator` is of the model, one of whose outputs is "vector"."""
        super().__init__(
            encoded.task,
            encoded.examples,
            encoded.windows,
            encoded.vocabulary,
            encoded.layout,
            encoded.static_shape,
        )
        self.encoded, self.evaluator, self.log = encoded, evaluator, log

    @functools.cached_property
    def vectors_SH(self):
        self.log(f"the encoder's vectors of {len(self)} rows, made once")
        return tf.constant(self.evaluator.outputs(self.encoded)["vector"])

    def _inputs_of(self):
        vectors_SH = self.vectors_SH  # Here, before there is a graph.
        return lambda numbers_B, count: {"vector": tf.gather(vectors_SH, numbers_B)}


def _filled_up(inputs, count):
    """Padded inputs of `count` rows: behind those that there are, rows without a token."""

    def filled_up(values):
        values = tf.pad(values, [[0, count - tf.shape(values)[0]], [0, 0]])
        return tf.ensure_shape(values, [count, values.shape[1]])

    return {name: filled_up(values) for name, values in inputs.items()}


def _order(rng, count, sampling_weights_S):
    """An epoch's samples: each once, or as many drawn with these odds."""
    if sampling_weights_S is None:
        return rng.permutation(count)
    return rng.choice(count, count, p=np.asarray(sampling_weights_S) / np.sum(sampling_weights_S))


def _batched(numbers, size):
    """A list of numbers as rows of `size`, the last filled up with -1."""
    filled = np.full(-(-len(numbers) // size) * size, -1, np.int64)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, size)
