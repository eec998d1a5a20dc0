"""Examples of a file: as strings, as packed token ids, and as batches of a `tf.data.Dataset`.

Shape suffixes: N examples, C choices, W windows, S samples (tasks/data/batches.py), B samples of a
replica's batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import tensorflow as tf

from bert_tf.model.layout import PackedShape, to_packed
from bert_tf.text.vocabulary import Vocabulary
from tasks.data.batches import BatchBuilder, Inputs, Layout, WindowInputs
from tasks.data.windows import Windows, concat

Tensors = Mapping[str, tf.Tensor]  # By the name of an input or output.
Arrays = Mapping[str, np.ndarray]

EXAMPLES_PER_BATCH = 1024  # Tokenized at a time; bounds the memory of the strings' tensors.


@dataclasses.dataclass(frozen=True)
class Examples:
    """All rows of a file, by column.

    Attributes:
        texts: N strings, or lists of strings, by input name.
        labels: N labels in the representation of the task; empty if unlabelled.
        skipped_rows: The `BadRow`s that the published dataset is known to contain.
        weights: Loss weight per row; empty if all are 1.
    """

    texts: dict[str, list]
    labels: list
    skipped_rows: tuple = ()
    weights: tuple[float, ...] = ()

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
            tuple(self.weights[number] for number in kept) if self.weights else (),
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


class TargetSource(Protocol):
    """The part of a `Task` that encoded examples use."""

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens per window."""

    def targets(
        self, examples: Examples, windows: Windows
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return (labels, weights), each with one entry per sample by output name."""

    def sample_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the loss weight per sample, or `None` if all are 1."""

    def sampling_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the sampling weight per sample, or `None` to draw each once per epoch."""


class WindowEncoder(Protocol):
    """The part of a `Pipeline` that encoded examples use."""

    vocabulary: Vocabulary

    @property
    def task(self) -> TargetSource:
        """The task of the pipeline."""

    def encode(self, **texts: tf.Tensor) -> Windows:
        """Tokenize strings `(B,)` per input name into windows."""


class EncodedExamples:
    """Examples as packed token ids, stored ragged: memory grows with tokens, not with padding.

    Attributes:
        labels: The task's targets, S elements by output name.
        weights: Loss weights of the same structure.
        sample_splits: int `(S + 1,)`, row splits of the windows by sample.
    """

    def __init__(
        self,
        task: TargetSource,
        examples: Examples,
        windows: Windows,
        vocabulary: Vocabulary,
        layout: Layout,
        static_shape: bool = False,
    ):
        """Compute the task's targets.

        Args:
            task: The task that the examples belong to.
            examples: Texts and labels.
            windows: The examples' packed sequences.
            vocabulary: The vocabulary of the ids.
            layout: `to_flat`, `to_padded` or `to_packed`; XLA requires one of the last two.
            static_shape: Give all batches the same number of samples, with samples of weight 0, and
                pad windows to max_seq_length or pack them, so that XLA compiles few programs.
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
        pipeline: WindowEncoder,
        layout: Layout,
        static_shape: bool = False,
    ) -> Self:
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
        return _dataset(
            np.concatenate(order)[first_step:].reshape(-1, global_batch_size // num_replicas),
            self._with_targets(self._weights_of_samples(), global_batch_size // num_replicas),
        )

    def fit_batches(
        self,
        batch_size: int,
        *,
        num_epochs: int,
        steps_per_epoch: int,
        seed: int,
        shuffle: bool,
        first_step: tf.Variable,
        multiple_of: int,
    ) -> tf.data.Dataset:
        """Return batches (inputs, labels, weights) of all epochs of a Keras `fit`.

        Args:
            batch_size: Samples per step of all replicas.
            num_epochs: Epochs.
            steps_per_epoch: Steps per epoch of Keras, which may be fewer or more than all samples
                once; the order continues across them.
            seed: Seed of the order.
            shuffle: Draws the order anew for each pass over the samples.
            first_step: Step to begin with, read when the dataset is iterated.
            multiple_of: Number of replicas; batches are filled up with samples of weight 0.
        """
        num_steps = num_epochs * steps_per_epoch
        sampling_weights_S = self.task.sampling_weights(self.examples, self.windows)
        passes = -(-num_steps // -(-len(self) // batch_size))
        orders = (
            _order(np.random.default_rng([seed, number]), len(self), sampling_weights_S)
            if shuffle
            else np.arange(len(self))
            for number in range(passes)
        )
        numbers = np.concatenate([_batched(order, batch_size) for order in orders])[:num_steps]
        numbers, last = tf.constant(numbers, tf.int32), num_steps - 1
        # Prefetching may ask for steps after the last one.
        rows = tf.data.Dataset.range(num_steps).map(
            lambda step: numbers[tf.minimum(step + first_step, last)]
        )
        return _mapped(
            rows, self._with_targets(self._weights_of_samples(), batch_size, multiple_of)
        )

    def _weights_of_samples(self):
        """Return the loss weight per sample, of task and rows, or `None` if all are 1."""
        weights_S = self.task.sample_weights(self.examples, self.windows)
        if not self.examples.weights:
            return weights_S
        of_rows = np.array(self.examples.weights)[self.example_of_sample()]
        return of_rows if weights_S is None else of_rows * weights_S

    def example_of_sample(self) -> np.ndarray:
        """Return the index of each sample's example, `(S,)`."""
        if self.windows.choice_W is not None:
            return np.arange(len(self))
        return np.asarray(self.windows.example_W)

    def validation_batches(self, global_batch_size: int) -> tf.data.Dataset:
        """Return batches (inputs, labels, weights) in file order, for `validation_data` of fit."""
        numbers = _batched(np.arange(len(self)), global_batch_size)
        return _dataset(numbers, self._with_targets(None, global_batch_size))

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
        builder = BatchBuilder(self._inputs(replica_batch_size), self.static_shape)
        return _dataset(numbers.reshape(-1, replica_batch_size), builder.evaluation_batch)

    def by_length(self) -> np.ndarray:
        """Return sample indices `(S,)`, longest first, so that batches contain little padding.

        The order of packed batches is random, so that they have few shapes.
        """
        if self.layout is to_packed:
            return np.random.default_rng(0).permutation(len(self))
        lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
        # An example without choices has no window; its splits may be those of the end.
        longest_S = np.maximum.reduceat(np.append(lengths_W, 0), self.sample_splits[:-1])
        return np.argsort(-longest_S, kind="stable")

    def _with_targets(self, weights_S, batch_size, multiple_of=1):
        """Return the function from sample indices to a training batch."""
        if weights_S is None:
            weights_S = np.ones(len(self))
        builder = BatchBuilder(
            self._inputs(batch_size, multiple_of),
            self.static_shape,
            self.labels,
            self.weights,
            weights_S,
            multiple_of,
        )
        return builder.training_batch

    def _inputs(self, batch_size: int, num_parts: int = 1) -> Inputs:
        """Return the function from sample indices to inputs that Keras splits into parts."""
        shape, splits = None, self.sample_splits
        if self.layout is to_packed:
            lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
            num_sequences = batch_size * int(np.max(splits[1:] - splits[:-1]))
            shape = PackedShape.of_lengths(lengths_W, num_sequences, self.task.max_seq_length)
        return WindowInputs(
            self.windows,
            self.sample_splits,
            self.vocabulary,
            self.layout,
            self.task.max_seq_length if self.static_shape else None,
            num_parts,
            shape,
        )


def _dataset(numbers, batch_of):
    """Return a dataset of `batch_of`'s results for rows of sample indices, int `(batches, B)`."""
    return _mapped(tf.data.Dataset.from_tensor_slices(numbers.astype(np.int32)), batch_of)


def _mapped(rows, batch_of):
    batch_of = tf.autograph.experimental.do_not_convert(batch_of)  # The conversion is slow.
    batches = rows.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return batches.prefetch(tf.data.AUTOTUNE)


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
