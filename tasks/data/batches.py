"""Batches of samples, built in the graph of a `tf.data.Dataset`.

A sample is the unit of a batch, as in Keras: one window, or one example with all its choices.

Shape suffixes: W windows, S samples, B samples of a batch, b samples of a batch without padding,
(L) tokens of a window (ragged), C windows of a sample.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.model.layout import to_dense_like
from bert_tf.text.encoder_inputs import PackedShape, to_packed
from bert_tf.text.packing import Packed
from bert_tf.text.vocabulary import Vocabulary
from tasks.data.windows import Windows

Layout = Callable[..., dict[str, tf.Tensor]]  # to_flat, to_padded or to_packed.
# Maps indices of samples, int32 `(b,)`, to the model's inputs.
Inputs = Callable[[tf.Tensor], dict[str, tf.Tensor]]


class WindowInputs:
    """Inputs of a model that reads token ids."""

    def __init__(
        self,
        windows: Windows,
        sample_splits: np.ndarray,
        vocabulary: Vocabulary,
        layout: Layout,
        length: int | None = None,
        num_parts: int = 1,
        shape: PackedShape | None = None,
    ):
        """Put the row splits on the device.

        Args:
            windows: The packed sequences of all samples.
            sample_splits: int `(S + 1,)`, row splits of the windows by sample.
            vocabulary: The vocabulary of the ids.
            layout: `to_flat`, `to_padded` or `to_packed`.
            length: Tokens per window of every batch, which then also has a fixed number of windows.
                By default those of the batch.
            num_parts: Number of replicas between which Keras splits the inputs by their first axis.
            shape: Shapes of packed batches.
        """
        self.shape = shape
        self.windows, self.vocabulary = windows, vocabulary
        self.layout, self.length, self.num_parts = layout, length, num_parts
        self.windows_of_samples = tf.RaggedTensor.from_row_splits(
            tf.range(sample_splits[-1]), sample_splits, validate=False
        )
        choice_W = windows.choice_W
        self.max_choices = None if choice_W is None else int(np.max(choice_W)) + 1

    def __call__(self, numbers_b: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the inputs of samples, int32 `(b,)`."""
        count = tf.size(numbers_b) if self.length is None else numbers_b.shape[0]
        numbers_bC = tf.gather(self.windows_of_samples, numbers_b)
        if self.max_choices is None:
            return self._packed(numbers_bC.flat_values, count)
        grid_bC = self._choice_grid(numbers_bC, count)
        if self.num_parts == 1:
            return {**self._packed(numbers_bC.flat_values, count), "windows": grid_bC}
        # Samples have equally many windows, so that a part contains those of its samples. Row 0
        # stands for missing choices.
        rows = tf.gather(numbers_bC.flat_values, tf.reshape(tf.maximum(grid_bC, 0), [-1]))
        row_in_part = tf.range(count * self.max_choices) % (
            count // self.num_parts * self.max_choices
        )
        row_in_part_bC = tf.reshape(row_in_part, tf.shape(grid_bC))
        return {
            **self._packed(rows, count),
            "windows": tf.where(grid_bC < 0, grid_bC, row_in_part_bC),
        }

    def _packed(self, numbers, count):
        """Return windows in the layout of the encoder."""
        parts = [tf.gather(part, numbers) for part in self.windows.packed[:2]]
        if self.length is None:
            return self.layout(Packed(*parts), self.vocabulary)
        if self.shape is not None:
            num_sequences = count * (self.max_choices or 1)
            return to_packed(Packed(*parts), self.vocabulary, self.shape, num_sequences)
        inputs = self.layout(Packed(*parts), self.vocabulary, length=self.length)
        num_rows = count * (self.max_choices or 1)
        return {name: _with_rows(values, num_rows) for name, values in inputs.items()}

    def _choice_grid(self, numbers_bC, count):
        """Return the row of the batch per sample and choice, int32 `(b, C)`; -1 if there is none.

        C is the largest number of choices of all samples.
        """
        choice = tf.gather(self.windows.choice_W, numbers_bC.flat_values)
        chosen = Windows(self.windows.packed, numbers_bC.value_rowids(), choice_W=choice)
        return chosen.choice_grid(count, self.max_choices)


class BatchBuilder:
    """Builds batches from indices of samples, int32 `(B,)`, the last of them -1 as padding."""

    def __init__(
        self,
        inputs: Inputs,
        static_shape: bool,
        labels: Mapping[str, Any] | None = None,
        weights: Mapping[str, Any] | None = None,
        weights_S: np.ndarray | None = None,
        multiple_of: int = 1,
    ):
        """Put labels and weights on the device, once for all batches.

        Args:
            inputs: Callable that returns the model's inputs.
            static_shape: Keep padding samples in the batch, with weight 0.
            labels: S elements by output name, for `training_batch`.
            weights: Loss weights of the same structure.
            weights_S: Loss weights of samples, by which `weights` are multiplied.
            multiple_of: Fill up batches to a multiple of this number, for Keras, which splits a
                batch by the number of replicas.
        """
        self.inputs, self.static_shape, self.multiple_of = inputs, static_shape, multiple_of
        self.labels, self.weights = _tensors(labels or {}), _tensors(weights or {})
        self.weights_S = None if weights_S is None else tf.constant(weights_S, tf.float32)

    def training_batch(self, numbers_B: tf.Tensor) -> tuple[dict, dict, dict]:
        """Return (inputs, labels, weights)."""
        numbers_b, is_sample_b = self._samples(numbers_B)
        inputs = self.inputs(numbers_b)
        factor_b = tf.where(is_sample_b, tf.gather(self.weights_S, numbers_b), 0.0)
        return (
            inputs,
            {name: _of_batch(values, numbers_b, inputs) for name, values in self.labels.items()},
            {
                name: _scaled(_of_batch(values, numbers_b, inputs), factor_b)
                for name, values in self.weights.items()
            },
        )

    def evaluation_batch(self, numbers_B: tf.Tensor) -> tuple[dict, tf.Tensor]:
        """Return (inputs, is_sample), int32 `(b,)`."""
        numbers_b, is_sample_b = self._samples(numbers_B)
        # An integer, since booleans cannot be gathered from replicas.
        return self.inputs(numbers_b), tf.cast(is_sample_b, tf.int32)

    def _samples(self, numbers_B):
        """Drop padding unless shapes are static; return indices and is_sample, bool `(b,)`."""
        if self.static_shape:
            count = numbers_B.shape[0]
        else:
            # Keep at least one sample, of weight 0, so that no replica's batch is empty.
            count = tf.maximum(tf.reduce_sum(tf.cast(numbers_B >= 0, tf.int32)), 1)
            count = -(-count // self.multiple_of) * self.multiple_of
        # Padding repeats sample 0; its weight is 0.
        return tf.maximum(numbers_B[:count], 0), numbers_B[:count] >= 0


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
