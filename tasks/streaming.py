"""Training on a dataset of strings batch by batch, for data that is larger than memory or infinite.

Shape suffixes: B rows of a batch, C labels.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.layout import to_flat, to_padded
from tasks.compiling import needs_padding
from tasks.readers.memory import named
from tasks.rows import class_factors

if TYPE_CHECKING:
    from tasks.task_model import TaskModel


def batches(
    model: TaskModel, dataset: tf.data.Dataset, class_weight: Mapping[Any, float] | None
) -> tf.data.Dataset:
    """Return batches (token ids, labels, weights) of a dataset.

    A batch is filled up to a multiple of the replicas with rows of weight 0.

    Args:
        model: A model whose task has `can_stream`.
        dataset: Batches (x, y) or (x, y, sample_weight) of strings and labels.
        class_weight: Loss weight by label name or id.

    Raises:
        UserError: If the structure of the batches or class_weight does not fit the task.
    """
    task, pipeline = model.task, model.serving.pipeline
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    is_padded, length = needs_padding(model), task.max_seq_length if model.jit_compile else None
    factors_C = None
    if class_weight is not None:
        factors = class_factors(task, class_weight)
        factors_C = tf.constant(
            [factors.get(label, 1.0) for label in range(len(model.labels or ()))]
        )

    @tf.autograph.experimental.do_not_convert
    def batch_of(x, y, weight_B=None):
        texts = _strings(named(x, task.input_names))
        count = tf.shape(texts[task.input_names[0]])[0]
        numbers_B = tf.range(-(-count // num_replicas) * num_replicas)
        is_row_B, numbers_B = numbers_B < count, numbers_B % tf.maximum(count, 1)
        texts = {name: tf.gather(values, numbers_B) for name, values in texts.items()}
        labels, weights = task.graph_targets(tf.gather(y, numbers_B))
        factor_B = tf.cast(is_row_B, tf.float32)
        if weight_B is not None:
            factor_B *= tf.cast(tf.gather(weight_B, numbers_B), tf.float32)
        if factors_C is not None:
            factor_B *= tf.gather(factors_C, labels["label"])
        packed, vocabulary = pipeline.encode(**texts).packed, pipeline.vocabulary
        inputs = to_padded(packed, vocabulary, length) if is_padded else to_flat(packed, vocabulary)
        return inputs, labels, {name: values * factor_B for name, values in weights.items()}

    spec = dataset.element_spec
    if not isinstance(spec, tuple) or not 2 <= len(spec) <= 3:
        raise UserError("x: expected batches (x, y) or (x, y, sample_weight) in the dataset")
    mapped = dataset.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return mapped.prefetch(tf.data.AUTOTUNE)


def _strings(columns):
    for name, values in columns.items():
        if values.dtype != tf.string or values.shape.rank not in (1, None):
            raise UserError(
                f"x: {name}: expected batches of strings (B,), received {values.dtype.name} "
                f"{values.shape}"
            )
    return columns


def num_steps(dataset: tf.data.Dataset, steps_per_epoch: int | None) -> int:
    """Return the steps per epoch; raises UserError if they are unknown."""
    steps = int(dataset.cardinality()) if steps_per_epoch is None else steps_per_epoch
    if steps < 0:
        raise UserError("steps_per_epoch: expected a number for a dataset of unknown length")
    if steps == 0:
        raise UserError("x: expected at least one batch, received an empty dataset")
    return steps


def check_rank(y: tf.Tensor, rank: int) -> None:
    """Raise UserError unless a batch of labels has a rank."""
    if y.shape.rank not in (rank, None):
        expected = "one label per row, (B,)" if rank == 1 else "a list of labels per row, (B, K)"
        raise UserError(f"y: expected {expected}, received the shape {y.shape}")


def check_label(is_valid: tf.Tensor, label: tf.Tensor, expected: str) -> tf.Operation:
    """Assert that all labels of a batch are valid, in the graph.

    Args:
        is_valid: bool, shaped like `label`.
        label: Strings.
        expected: What is expected, for the message.
    """
    first = tf.strings.reduce_join(tf.boolean_mask(label, ~is_valid)[:1])
    message = tf.strings.join(["y: label '", first, f"': expected {expected}"])
    return tf.debugging.Assert(tf.reduce_all(is_valid), [message])


@contextlib.contextmanager
def raising_label_errors() -> Iterator[None]:
    """Raise the failures of `check_label`, which Keras wraps, as UserErrors."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(r"assertion failed: \[(y: .*)\]", str(error))
        if found is None:
            raise
        # TensorFlow escapes the bytes of strings.
        message = found[1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
        raise UserError(message) from None
