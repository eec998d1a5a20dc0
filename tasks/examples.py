"""Examples: texts and labels of a file, then as token ids, then as batches.

Legend: N examples, B rows of a replica's batch.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from bert_tf.text.packing import Packed


@dataclasses.dataclass(frozen=True)
class Examples:
    """{input name: N strings} and {output name: N labels}, empty where a file has none."""

    texts: dict[str, list[str]]
    labels: dict[str, np.ndarray]

    def __len__(self):
        return len(next(iter(self.texts.values())))

    def slices(self, size):
        """The texts of `size` rows at a time, in order, as {input name: string tensor}."""
        for start in range(0, len(self), size):
            yield {
                name: tf.constant(texts[start : start + size]) for name, texts in self.texts.items()
            }


class EncodedExamples:
    """Examples as packed token ids, kept ragged: a row takes the memory of its tokens."""

    def __init__(self, packed, labels, vocabulary, layout):
        """`layout` is bert_tf.text.packing's `flat` or `padded`; `fit` and XLA want the latter."""
        self.packed, self.labels = packed, labels
        self.vocabulary, self.layout = vocabulary, layout

    @classmethod
    def encode(cls, examples, pipeline, layout):
        """Tokenizes Examples with `pipeline`, the one that serves."""
        parts = [pipeline.encode(**texts) for texts in examples.slices(1024)]
        packed = Packed(
            *(
                tf.concat([getattr(part, name) for part in parts], axis=0)
                for name in ("input_ids", "segment_ids")
            )
        )
        return cls(packed, examples.labels, pipeline.vocabulary, layout)

    def __len__(self):
        return int(self.packed.input_ids.nrows())

    def training_batches(
        self, *, global_batch_size, num_epochs, seed, first_step=0, num_replicas=1
    ):
        """Batches (inputs, labels, weights): all examples once an epoch, ordered by (seed, epoch).

        A step takes `num_replicas` elements, global_batch_size / num_replicas rows each. Where the
        last batch of an epoch does not fill a replica's share, the share is shorter; where it
        leaves none, it is one row of weight 0.
        """
        order = [
            _batched(np.random.default_rng([seed, epoch]).permutation(len(self)), global_batch_size)
            for epoch in range(num_epochs)
        ]
        return self._batches(
            np.concatenate(order)[first_step:].reshape(-1, global_batch_size // num_replicas)
        )

    def evaluation_batches(self, order, replica_batch_size, num_replicas=1):
        """The examples numbered `order`, once; a step takes `num_replicas` elements."""
        return self._batches(
            _batched(order, replica_batch_size * num_replicas).reshape(-1, replica_batch_size)
        )

    def by_length(self):
        """The examples' numbers, the longest first: batches of equal length hold little padding."""
        return np.argsort(-self.packed.input_ids.row_lengths().numpy(), kind="stable")

    def _batches(self, numbers):
        """numbers [batches, B], -1 where there is none -> dataset of (inputs, labels, weights)."""
        labels = {name: tf.constant(values) for name, values in self.labels.items()}

        def batch(numbers_B):
            count = tf.maximum(tf.reduce_sum(tf.cast(numbers_B >= 0, tf.int32)), 1)
            weights_B = tf.cast(numbers_B[:count] >= 0, tf.float32)
            numbers_B = tf.maximum(numbers_B[:count], 0)
            inputs = self.layout(
                Packed(*(tf.gather(part, numbers_B) for part in self.packed[:2])), self.vocabulary
            )
            return (
                inputs,
                {name: tf.gather(values, numbers_B) for name, values in labels.items()},
                dict.fromkeys(labels, weights_B),
            )

        dataset = tf.data.Dataset.from_tensor_slices(numbers.astype(np.int32))
        return dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )


def _batched(numbers, size):
    """A list of numbers as rows of `size`, the last filled up with -1."""
    filled = np.full(-(-len(numbers) // size) * size, -1, np.int64)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, size)
