"""Examples of a file: as strings, as packed token ids, and as batches of a `tf.data.Dataset`.

A sample is the unit of a batch, as in Keras: one window, or one example with all its choices.

Shape suffixes: N examples, C choices, W windows, S samples, B samples of a replica's batch, b those
of it that are no padding, (L) tokens of a window (ragged).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from bert_tf.data import masking
from bert_tf.model.layout import to_dense_like
from bert_tf.text.encoder_inputs import Packed, PackedShape, to_packed, to_padded
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.vocabulary import Vocabulary
from tasks.data.windows import TokenCounter, Windows, concat

Tensors = Mapping[str, tf.Tensor]  # By the name of an input or output.
Arrays = Mapping[str, np.ndarray]
Layout = Callable[..., dict[str, tf.Tensor]]  # to_flat, to_padded or to_packed.
Select = Callable[[tf.data.Dataset], tf.data.Dataset]
# Maps indices of samples, int32 `(b,)`, to the model's inputs.
Inputs = Callable[[tf.Tensor], dict[str, tf.Tensor]]
# Maps the model's inputs for samples, and their keys (bert_tf.data.masking.keys), to inputs, labels
# and weights.
Draw = Callable[[Mapping[str, tf.Tensor], tf.Tensor], tuple[dict[str, tf.Tensor], ...]]

HOST = "CPU:0"  # Makes all batches; by default, constants take memory of a GPU.
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


class EncodedExamples:
    """Examples as packed token ids, stored ragged: memory grows with tokens, not with padding.

    Batches are built in the graph of a `tf.data.Dataset`, from rows of sample indices.

    Attributes:
        labels: The task's targets, S elements by output name; those of an evaluation, if the task
            draws them.
        weights: Loss weights of the same structure.
        draw: Result of `Task.draw`.
        sample_splits: int `(S + 1,)`, row splits of the windows by sample.
        token_counts: Counts of the tokens, if the examples were tokenized by `encode`.
    """

    token_counts = TokenCounts()

    def __init__(
        self,
        task: Any,
        examples: Examples,
        windows: Windows,
        vocabulary: Vocabulary,
        layout: Layout,
        static_shape: bool = False,
    ):
        """Wrap the sequences of examples.

        Args:
            task: The `Task` that the examples belong to, which itself knows these classes.
            examples: Texts and labels.
            windows: The examples' packed sequences.
            vocabulary: The vocabulary of the ids.
            layout: `to_flat`, `to_padded` or `to_packed`; XLA requires one of the last two.
            static_shape: Give all batches the same number of samples, with samples of weight 0, and
                pad windows to max_seq_length or pack them, so that XLA compiles few programs.
        """
        self.task, self.examples, self.windows = task, examples, windows
        self.vocabulary, self.layout, self.static_shape = vocabulary, layout, static_shape
        lengths_W = windows.packed.input_ids.row_lengths().numpy()
        self.draw: Draw | None = task.draw(vocabulary, int(lengths_W.max(initial=1)))
        if windows.choice_W is None:
            self.sample_splits = np.arange(len(windows.example_W) + 1)
        else:
            # Windows are ordered by example, so an example without choices gets an empty range.
            self.sample_splits = np.searchsorted(windows.example_W, np.arange(len(examples) + 1))

    @classmethod
    def encode(
        cls, examples: Examples, pipeline: Any, layout: Layout, static_shape: bool = False
    ) -> Self:
        """Tokenize examples with the `Pipeline` of their task; others as of the constructor."""
        parts = [pipeline.encode(**texts) for texts in examples.slices()]
        size = EXAMPLES_PER_BATCH
        counts = [min(size, len(examples) - first) for first in range(0, len(examples), size)]
        windows, counter = concat(parts, counts), TokenCounter(pipeline.vocabulary)
        counter.add(windows)
        encoded = cls(pipeline.task, examples, windows, pipeline.vocabulary, layout, static_shape)
        encoded.token_counts = counter.take()
        return encoded

    @functools.cached_property
    def labels(self) -> Arrays:
        """See the docstring of the class."""
        return self._targets[0]

    @functools.cached_property
    def weights(self) -> Arrays:
        """See the docstring of the class."""
        return self._targets[1]

    @functools.cached_property
    def _targets(self):
        """Labels and weights."""
        if self.draw is None:
            has_labels = bool(self.examples.labels)
            return self.task.targets(self.examples, self.windows) if has_labels else ({}, {})
        parts = []
        for first in range(0, len(self), EXAMPLES_PER_BATCH):
            rows = slice(first, first + EXAMPLES_PER_BATCH)
            packed = Packed(*(part[rows] for part in self.windows.packed[:2]))
            numbers = np.arange(len(self))[rows]
            with tf.device(HOST):
                _, *drawn = self._drawn(to_padded(packed, self.vocabulary), numbers)
            parts.append(drawn)
        return tuple(
            {name: np.concatenate([part[name] for part in of_parts]) for name in of_parts[0]}
            for of_parts in zip(*parts, strict=True)
        )

    def _drawn(self, inputs, numbers_b, seed=0, epoch=0):
        """Return inputs, labels and weights of samples; by default those of an evaluation."""
        assert self.draw
        return self.draw(inputs, masking.keys(seed, epoch, numbers_b))

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
        select: Select = lambda rows: rows,
    ) -> tf.data.Dataset:
        """Return batches (inputs, labels, weights), shuffled per epoch from `(seed, epoch)`.

        An epoch has as many samples as there are, which `Task.epoch_order` draws; by default each
        of them once. What the task draws anew for a sample depends on (seed, epoch) and its number.
        In the last batch of an epoch a replica may have fewer samples; if it has none, its batch is
        one sample of weight 0.

        Args:
            global_batch_size: Samples per step of all replicas; a multiple of `num_replicas`.
            num_epochs: Epochs.
            seed: Seed of the order.
            first_step: Steps to skip, when resuming.
            num_replicas: Consecutive elements of the dataset per step, of all replicas, or of all
                parts of a batch that are computed one after the other.
            select: Returns the elements to make of a dataset of all.
        """
        # Drawn for all epochs at once, so that resuming at a step is a slice.
        orders = [self._order(epoch, global_batch_size, seed) for epoch in range(num_epochs)]
        numbers, size = np.concatenate(orders), global_batch_size // num_replicas
        epochs = np.repeat(np.arange(num_epochs), len(orders[0]))
        rows = _rows(numbers[first_step:], epochs[first_step:], size)
        return self._labelled_batches(select(tf.data.Dataset.from_tensor_slices(rows)), size, seed)

    def epoch_batches(
        self,
        *,
        global_batch_size: int,
        seed: int,
        epoch: tf.Variable,
        steps_per_epoch: int | None = None,
        num_replicas: int = 1,
        shuffle: bool = True,
        select: Select = lambda rows: rows,
    ) -> tf.data.Dataset:
        """Return the batches of one epoch, those of `training_batches`.

        Args:
            global_batch_size: As of `training_batches`, like the arguments that are not listed.
            seed: Seed of the order.
            epoch: Its number, int64, read whenever the dataset is iterated.
            steps_per_epoch: Steps of an epoch; by default all samples once. Epochs of other numbers
                of steps follow each other in the order of the samples.
            num_replicas: Consecutive elements per step.
            shuffle: Whether the order is drawn anew for each epoch, or is that of the samples.
            select: Returns the elements to make of a dataset of all.
        """
        steps_of_all = -(-len(self) // global_batch_size)
        num_steps, size = steps_per_epoch or steps_of_all, global_batch_size // num_replicas

        def numbers_of(epoch):
            first = int(epoch) * num_steps
            order, skipped = first // steps_of_all, first % steps_of_all
            orders = range(order, order - (-(skipped + num_steps) // steps_of_all))
            numbers = np.concatenate(
                [self._order(one, global_batch_size, seed, shuffle) for one in orders]
            )
            steps = slice(skipped, skipped + num_steps)
            return _rows(numbers[steps], np.repeat(orders, steps_of_all)[steps], size)

        def rows_of_epoch(_):
            numbers, epochs = tf.numpy_function(
                numbers_of, [epoch], [tf.int32, tf.int64], stateful=True
            )
            numbers = tf.ensure_shape(numbers, [num_steps * num_replicas, size])
            epochs = tf.ensure_shape(epochs, [num_steps * num_replicas])
            return tf.data.Dataset.from_tensor_slices((numbers, epochs))

        rows = tf.data.Dataset.from_tensors(0).flat_map(rows_of_epoch)
        rows = rows.apply(tf.data.experimental.assert_cardinality(num_steps * num_replicas))
        return self._labelled_batches(select(rows), size, seed)

    def evaluation_batches(
        self,
        order: np.ndarray,
        replica_batch_size: int,
        num_replicas: int = 1,
        select: Select = lambda rows: rows,
    ) -> tf.data.Dataset:
        """Return batches (inputs, is_sample) of each sample once.

        Args:
            order: int `(S,)`, sample indices.
            replica_batch_size: Samples per element.
            num_replicas: Consecutive elements of the dataset per step.
            select: As of `training_batches`.

        Returns:
            Dataset whose is_sample, int32 `(B,)`, is 0 for padding samples.
        """
        inputs_of = self._inputs(replica_batch_size)

        def batch_of(numbers_B):
            numbers_b, is_sample_b = self._samples(numbers_B)
            inputs = inputs_of(numbers_b)
            if self.draw is not None:
                inputs = self._drawn(inputs, numbers_b)[0]
            # An integer, since booleans cannot be gathered from replicas.
            return inputs, tf.cast(is_sample_b, tf.int32)

        numbers = _padded(order, replica_batch_size * num_replicas).astype(np.int32)
        rows = tf.data.Dataset.from_tensor_slices(numbers.reshape(-1, replica_batch_size))
        return _mapped(select(rows), batch_of)

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

    def by_window(self) -> "EncodedExamples":
        """Return the examples without labels and choices, so that every window is a sample."""
        return EncodedExamples(
            self.task,
            Examples(self.examples.texts, []),
            self.windows._replace(choice_W=None),
            self.vocabulary,
            self.layout,
            self.static_shape,
        )

    def example_of_sample(self) -> np.ndarray:
        """Return the index of each sample's example, `(S,)`."""
        if self.windows.choice_W is not None:
            return np.arange(len(self))
        return np.asarray(self.windows.example_W)

    def _order(self, epoch, batch_size, seed, shuffle=True):
        """Return the sample indices of an epoch, int `(batches, batch_size)`, -1 as padding."""
        order = self.task.epoch_order(self, np.random.default_rng([seed, epoch]))
        return _padded(order if shuffle else np.sort(order), batch_size)

    def _labelled_batches(self, rows, batch_size, seed):
        """Return batches (inputs, labels, weights) of rows, elements of `_rows`."""
        inputs_of = self._inputs(batch_size)
        weights_S = self._weights_of_samples()
        weights_S = np.ones(len(self)) if weights_S is None else weights_S
        with tf.device(HOST):
            weights_S = tf.constant(weights_S, tf.float32)
            targets = () if self.draw else (_tensors(self.labels), _tensors(self.weights))

        def batch_of(numbers_B, epoch):
            numbers_b, is_sample_b = self._samples(numbers_B)
            inputs = inputs_of(numbers_b)
            factor_b = tf.where(is_sample_b, tf.gather(weights_S, numbers_b), 0.0)
            if self.draw is not None:
                inputs, labels, weights = self._drawn(inputs, numbers_b, seed, epoch)
            else:
                labels, weights = (
                    {name: _of_batch(values, numbers_b, inputs) for name, values in part.items()}
                    for part in targets
                )
            weights = {name: _scaled(values, factor_b) for name, values in weights.items()}
            return inputs, labels, weights

        return _mapped(rows, batch_of)

    def _weights_of_samples(self):
        """Return the loss weight per sample, of task and rows, or `None` if all are 1."""
        weights_S = self.task.sample_weights(self.examples, self.windows)
        if not self.examples.weights:
            return weights_S
        of_rows = np.array(self.examples.weights)[self.example_of_sample()]
        return of_rows if weights_S is None else of_rows * weights_S

    def _samples(self, numbers_B):
        """Drop padding unless shapes are static; return indices and is_sample, bool `(b,)`."""
        if self.static_shape:
            count = numbers_B.shape[0]
        else:
            # Keep at least one sample, of weight 0, so that no replica's batch is empty.
            count = tf.maximum(tf.reduce_sum(tf.cast(numbers_B >= 0, tf.int32)), 1)
        # Padding repeats sample 0; its weight is 0.
        return tf.maximum(numbers_B[:count], 0), numbers_B[:count] >= 0

    def _inputs(self, batch_size: int) -> Inputs:
        """Return the function from sample indices to inputs of batches of `batch_size`."""
        length = self.task.max_seq_length if self.static_shape else None
        windows_of_samples = tf.RaggedTensor.from_row_splits(
            tf.range(self.sample_splits[-1]), self.sample_splits, validate=False
        )
        choice_W = self.windows.choice_W
        max_choices = None if choice_W is None else int(np.max(choice_W)) + 1
        packed_shape = None
        if self.layout is to_packed:
            lengths_W = self.windows.packed.input_ids.row_lengths().numpy()
            packed_shape = PackedShape.of_lengths(
                lengths_W, batch_size, self.task.max_seq_length, self.sample_splits
            )

        def inputs_of(numbers_b):
            count = tf.size(numbers_b) if length is None else numbers_b.shape[0]
            numbers_bC = tf.gather(windows_of_samples, numbers_b)
            if max_choices is None:
                return in_layout(numbers_bC.flat_values, count)
            grid_bC = self._choice_grid(numbers_bC, count, max_choices)
            return {**in_layout(numbers_bC.flat_values, count), "windows": grid_bC}

        def in_layout(numbers, count):
            """Return windows in the layout of the encoder."""
            packed = Packed(*(tf.gather(part, numbers) for part in self.windows.packed[:2]))
            if length is None:
                return self.layout(packed, self.vocabulary)
            num_rows = count * (max_choices or 1)
            if packed_shape is not None:
                return to_packed(packed, self.vocabulary, packed_shape, num_rows)
            inputs = self.layout(packed, self.vocabulary, length=length)
            return {name: _with_rows(values, num_rows) for name, values in inputs.items()}

        return inputs_of

    def _choice_grid(self, numbers_bC, count, max_choices):
        """Return the row of the batch per sample and choice, int32 `(b, C)`; -1 if there is none.

        C is the largest number of choices of all samples.
        """
        choice = tf.gather(self.windows.choice_W, numbers_bC.flat_values)
        chosen = Windows(self.windows.packed, numbers_bC.value_rowids(), choice_W=choice)
        return chosen.choice_grid(count, max_choices)


def stacked(batches: tf.data.Dataset, count: int, is_compiled: bool) -> tf.data.Dataset:
    """Return consecutive batches stacked on a new first axis, to accumulate their gradients.

    Args:
        batches: Result of `training_batches`.
        count: Batches per stack; a single one is no stack.
        is_compiled: Whether XLA compiles the step. Packed batches then get rows without tokens, up
            to the most rows of a stack. Flat ones differ in their number of tokens, so that their
            stack is ragged.
    """
    if count == 1:
        return batches
    return batches.padded_batch(count) if is_compiled else batches.ragged_batch(count)


def _rows(numbers, epochs, size):
    """Return rows of `size` sample indices of steps, int32 `(batches, size)`, and their epochs."""
    rows = numbers.reshape(-1, size).astype(np.int32)
    return rows, np.repeat(epochs, len(rows) // max(len(epochs), 1)).astype(np.int64)


def _mapped(rows, batch_of):
    batch_of = tf.autograph.experimental.do_not_convert(batch_of)  # The conversion is slow.
    batches = rows.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return batches.prefetch(tf.data.AUTOTUNE)


def _padded(numbers, size):
    """Reshape indices to rows of `size`, the last padded with -1."""
    filled = np.full(-(-len(numbers) // size) * size, -1, np.int64)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, size)


def _tensors(of_samples):
    return {
        name: values if isinstance(values, tf.RaggedTensor) else tf.constant(values)
        for name, values in of_samples.items()
    }


def _of_batch(values, numbers_b, inputs):
    """Gather labels or weights; those per token are ragged and follow the inputs' layout."""
    values = to_dense_like(tf.gather(values, numbers_b), inputs)
    return tf.ensure_shape(values, [numbers_b.shape[0], *values.shape[1:]])


def _scaled(values, factor_b):
    return values * tf.reshape(factor_b, [-1] + [1] * (values.shape.rank - 1))


def _with_rows(values, count):
    """Append rows without tokens to padded inputs, up to `count` rows."""
    values = tf.pad(values, [[0, count - tf.shape(values)[0]], [0, 0]])
    return tf.ensure_shape(values, [count, values.shape[1]])
