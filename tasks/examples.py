"""Examples of a file: as strings, as packed token ids, and as batches of a `tf.data.Dataset`.

A sample is the unit of a batch, as in Keras: one window, or one example with all its choices.

Shape suffixes: N examples, W windows, S samples, B samples of a replica's batch, (L) tokens of a
window (ragged), C windows of a sample, H hidden size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from bert_tf.layout import to_dense_like
from bert_tf.text.packing import Packed
from tasks.windows import Windows, concat

if TYPE_CHECKING:
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.evaluation import Evaluator
    from tasks.pipeline import Pipeline
    from tasks.task import Task

Tensors = Mapping[str, tf.Tensor]  # By the name of an input or output.
Arrays = Mapping[str, np.ndarray]
Layout = Callable[..., dict[str, tf.Tensor]]  # bert_tf.layout.to_flat or to_padded.

EXAMPLES_PER_BATCH = 1024  # Tokenized at a time; bounds the memory of the strings' tensors.


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of a file.

    Attributes:
        texts: String by input name; a list of strings for the choices of a question.
        label: Label in the representation of the task; None for unlabelled rows.
        location: Position for messages, such as "train.csv:17".
        id: Name of the row, if the file has a column of names.
    """

    texts: dict[str, str | list[str]]
    label: object
    location: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Examples:
    """All rows of a file, by column.

    Attributes:
        texts: N strings, or lists of strings, by input name.
        labels: N labels in the representation of the task; empty if unlabelled.
        skipped_rows: The `BadRow`s that the published dataset is known to contain.
    """

    texts: dict[str, list]
    labels: list
    skipped_rows: tuple = ()

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    def skipped_rows_message(self) -> str:
        """Return a log line with the number of skipped rows and the first of them."""
        return f"{len(self.skipped_rows)} bad rows skipped, first: {self.skipped_rows[0]}"

    def filter(self, is_kept: Callable[[int], bool]) -> "Examples":
        """Return the examples for whose index `is_kept` returns true."""
        kept = [number for number in range(len(self)) if is_kept(number)]
        return Examples(
            {name: [texts[number] for number in kept] for name, texts in self.texts.items()},
            [self.labels[number] for number in kept] if self.labels else [],
            self.skipped_rows,
        )

    def slices(self, size: int = EXAMPLES_PER_BATCH) -> Iterator[dict[str, tf.Tensor]]:
        """Yield the texts of `size` consecutive rows as string tensors, by input name."""
        for start in range(0, len(self), size):
            yield {
                name: as_tensor(texts[start : start + size]) for name, texts in self.texts.items()
            }


def as_tensor(texts: Sequence[str | Sequence[str]], rank: int | None = None) -> tf.Tensor:
    """Convert strings to a tensor `(N,)`, or lists of strings to `(N, C)` padded with "".

    Args:
        texts: Strings or lists of strings.
        rank: 1 or 2; by default that of the first entry. Required if `texts` may be empty.
    """
    if rank == 2 or (rank is None and texts and isinstance(texts[0], list | tuple)):
        return tf.ragged.constant(texts, dtype=tf.string, ragged_rank=1).to_tensor("")
    return tf.constant(texts, tf.string)


class EncodedExamples:
    """Examples as packed token ids, stored ragged: memory grows with tokens, not with padding.

    Attributes:
        labels: The task's targets, S elements by output name.
        weights: Loss weights of the same structure.
        sample_splits: int `(S + 1,)`, row splits of the windows by sample.
    """

    def __init__(
        self,
        task: "Task",
        examples: Examples,
        windows: Windows,
        vocabulary: "Vocabulary",
        layout: Layout,
        static_shape: bool = False,
    ):
        """Compute the task's targets.

        Args:
            task: The task that the examples belong to.
            examples: Texts and labels.
            windows: The examples' packed sequences.
            vocabulary: The vocabulary of the ids.
            layout: `to_flat` or `to_padded` of bert_tf.layout; `fit` and XLA require the latter.
            static_shape: Pad all batches to max_seq_length and to the same number of samples, with
                samples of weight 0, so that XLA compiles once.
        """
        self.task, self.examples, self.windows = task, examples, windows
        self.vocabulary, self.layout, self.static_shape = vocabulary, layout, static_shape
        self.labels, self.weights = task.targets(examples, windows) if examples.labels else ({}, {})
        if windows.choice_W is None:
            self.sample_splits = np.arange(len(windows.example_W) + 1)
        else:
            # Windows are ordered by example, so an example without choices gets an empty range.
            self.sample_splits = np.searchsorted(windows.example_W, np.arange(len(examples) + 1))

    @classmethod
    def encode(
        cls,
        examples: Examples,
        pipeline: "Pipeline",
        layout: Layout,
        static_shape: bool = False,
    ) -> "EncodedExamples":
        """Tokenize examples with the pipeline that is also exported for serving."""
        parts = [pipeline.encode(**texts) for texts in examples.slices()]
        size = EXAMPLES_PER_BATCH
        counts = [min(size, len(examples) - first) for first in range(0, len(examples), size)]
        windows = concat(parts, counts)
        return cls(pipeline.task, examples, windows, pipeline.vocabulary, layout, static_shape)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.sample_splits) - 1

    def training_batches(
        self,
        *,
        global_batch_size: int,
        num_epochs: int,
        seed: int,
        first_step: int = 0,
        num_replicas: int = 1,
    ) -> tf.data.Dataset:
        """Return batches (inputs, labels, weights), shuffled per epoch from `(seed, epoch)`.

        An epoch contains every sample once, or, if the task has `sampling_weights`, as many samples
        drawn with these weights. In the last batch of an epoch a replica may have fewer samples; if
        it has none, its batch is one sample of weight 0.

        Args:
            global_batch_size: Samples per step of all replicas; a multiple of `num_replicas`.
            num_epochs: Epochs.
            seed: Seed of the order.
            first_step: Steps to skip, when resuming.
            num_replicas: Consecutive elements of the dataset per step.
        """
        sampling_weights_S = self.task.sampling_weights(self.examples, self.windows)
        # Drawn for all epochs at once, so that resuming at a step is a slice.
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

    def validation_batches(self, global_batch_size: int) -> tf.data.Dataset:
        """Return batches (inputs, labels, weights) in file order, for `validation_data` of fit."""
        numbers = _batched(np.arange(len(self)), global_batch_size)
        return self._batches(numbers, self._with_targets())

    def evaluation_batches(
        self, order: np.ndarray, replica_batch_size: int, num_replicas: int = 1
    ) -> tf.data.Dataset:
        """Return batches (inputs, is_sample) of each sample once.

        Args:
            order: int `(S,)`, sample indices.
            replica_batch_size: Samples per element.
            num_replicas: Consecutive elements of the dataset per step.

        Returns:
            Dataset whose is_sample, int32 `(B,)`, is 0 for padding samples.
        """
        numbers = _batched(order, replica_batch_size * num_replicas)
        return self._batches(
            numbers.reshape(-1, replica_batch_size),
            # An integer, since booleans cannot be gathered from replicas.
            lambda inputs, numbers_B, is_sample_B: (inputs, tf.cast(is_sample_B, tf.int32)),
        )

    def by_length(self) -> np.ndarray:
        """Return sample indices `(S,)`, longest first, so that batches contain little padding."""
        lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
        longest_S = np.maximum.reduceat(lengths_W, self.sample_splits[:-1])
        return np.argsort(-longest_S, kind="stable")

    def _with_targets(self, weights_S=None):
        """Return a function from (inputs, sample indices, is_sample) to a training batch."""
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
                # Labels per token are ragged; they follow the layout of the inputs.
                values = to_dense_like(tf.gather(values, numbers_B), inputs)
                return tf.ensure_shape(values, [numbers_B.shape[0], *values.shape[1:]])

            factor_B = tf.where(is_sample_B, tf.gather(weights_S, numbers_B), 0.0)

            def weighted(values):
                values = of_batch(values)
                return values * tf.reshape(factor_B, [-1] + [1] * (values.shape.rank - 1))

            return (
                inputs,
                {name: of_batch(values) for name, values in labels.items()},
                {name: weighted(values) for name, values in weights.items()},
            )

        return batch

    def _batches(self, numbers, finish):
        """Return a dataset of `finish`'s results for sample indices (batches, B), -1 for none."""
        inputs_of = self._inputs_of()

        def batch(numbers_B):
            # Keep at least one sample, of weight 0, so that no replica's batch is empty.
            count = tf.maximum(tf.reduce_sum(tf.cast(numbers_B >= 0, tf.int32)), 1)
            if self.static_shape:
                count = numbers_B.shape[0]
            is_sample_B = numbers_B[:count] >= 0
            # Padding repeats sample 0; its weight is 0.
            numbers_B = tf.maximum(numbers_B[:count], 0)
            return finish(inputs_of(numbers_B, count), numbers_B, is_sample_B)

        dataset = tf.data.Dataset.from_tensor_slices(numbers.astype(np.int32))
        return dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )

    def _inputs_of(self):
        """Return a function from (sample indices (B,), B) to the model's inputs."""
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
    """Examples as features of a frozen encoder: batches of {"vector": float32 (B, H)}.

    The features are computed once, at first use, because a resumed run restores its weights only
    then. All S vectors stay in memory.
    """

    def __init__(
        self, encoded: EncodedExamples, evaluator: "Evaluator", log: Callable[[str], None]
    ):
        """Wrap encoded examples.

        Args:
            encoded: The token ids.
            evaluator: Evaluator of a model that has an output "vector".
            log: Callable that takes log lines.
        """
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
    def vectors_SH(self) -> tf.Tensor:
        """Features of all samples, float32 (S, H)."""
        self.log(f"extracting features of {len(self)} rows, once")
        return tf.constant(self.evaluator.outputs(self.encoded)["vector"])

    def _inputs_of(self):
        vectors_SH = self.vectors_SH  # Computed eagerly, outside of the dataset's graph.
        return lambda numbers_B, count: {"vector": tf.gather(vectors_SH, numbers_B)}


def _filled_up(inputs, count):
    """Append rows without tokens to padded inputs, up to `count` rows."""

    def filled_up(values):
        values = tf.pad(values, [[0, count - tf.shape(values)[0]], [0, 0]])
        return tf.ensure_shape(values, [count, values.shape[1]])

    return {name: filled_up(values) for name, values in inputs.items()}


def _order(rng, count, sampling_weights_S):
    """Return the sample indices of an epoch: a permutation, or a weighted random draw."""
    if sampling_weights_S is None:
        return rng.permutation(count)
    return rng.choice(count, count, p=np.asarray(sampling_weights_S) / np.sum(sampling_weights_S))


def _batched(numbers, size):
    """Reshape indices to rows of `size`, the last padded with -1."""
    filled = np.full(-(-len(numbers) // size) * size, -1, np.int64)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, size)
