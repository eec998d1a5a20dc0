"""Training on a dataset of strings batch by batch, for data that is larger than memory or infinite.

Shape suffixes: B rows of a batch, C labels.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import PackedShape, to_flat, to_packed, to_padded
from tasks.base.task import Task
from tasks.data.examples import Examples, Layout, Select
from tasks.data.readers.memory import named, without_axis
from tasks.graph.pipeline import Pipeline
from tasks.model.labelled_rows import class_factors, column_of, examples_of

_NO_WINDOWS: Any = None  # The targets of tasks that can stream do not depend on windows.


def batches(
    pipeline: Pipeline,
    dataset: tf.data.Dataset,
    class_weight: Mapping[Any, float] | None = None,
    *,
    layout: Layout = to_flat,
    num_replicas: int = 1,
    static_shape: bool = False,
    select: Select = lambda elements: elements,
) -> tf.data.Dataset:
    """Return batches (token ids, labels, weights) of a dataset, those of all replicas in turn.

    A batch of the dataset is filled up with rows of weight 0: to a multiple of the replicas, or, if
    shapes are static, to the size that the dataset was batched with.

    Args:
        pipeline: Pipeline of a task that has `can_stream`.
        dataset: Batches (x, y) or (x, y, sample_weight) of strings and labels.
        class_weight: Loss weight by label name or id.
        layout: `to_flat`, `to_padded` or `to_packed`.
        num_replicas: Replicas that share a batch of the dataset.
        static_shape: Whether batches have at most four shapes, so that XLA compiles few programs.
            Those of a dataset of unknown batch size are padded to max_seq_length.
        select: Returns the elements to make of a dataset of all.

    Raises:
        UserError: If the structure of the batches or class_weight does not fit the task.
    """
    task = pipeline.task
    size = -1  # Of a replica's batch.
    if static_shape:
        size = -(-int(distribute.compute_batch_size(dataset)) // num_replicas)
    if layout is to_packed and size > 0:
        shape = PackedShape.of_unknown_lengths(size, task.max_seq_length)
        layout = functools.partial(to_packed, shape=shape, num_sequences=size)
    elif static_shape:
        layout = functools.partial(to_padded, length=task.max_seq_length)
    if class_weight is not None:
        class_factors(task, class_weight)  # Before the first batch.

    @tf.autograph.experimental.do_not_convert
    def rows_of(x, y, weight_B=None):
        texts = _strings(named(x, task.input_names))
        count = tf.shape(texts[task.input_names[0]])[0]
        numbers_B = tf.range((size if size > 0 else -(-count // num_replicas)) * num_replicas)
        is_row_B, numbers_B = numbers_B < count, numbers_B % tf.maximum(count, 1)
        labels, weights = targets(task, texts, y, weight_B, class_weight)
        texts, labels, weights = tf.nest.map_structure(
            lambda values: tf.gather(values, numbers_B), (texts, labels, weights)
        )
        factor_B = tf.cast(is_row_B, tf.float32)
        return texts, labels, {name: values * factor_B for name, values in weights.items()}

    @tf.autograph.experimental.do_not_convert
    def of_replicas(*rows):
        return tf.nest.map_structure(
            lambda values: tf.reshape(values, [num_replicas, -1, *values.shape[1:]]), rows
        )

    @tf.autograph.experimental.do_not_convert
    def batch_of(texts, labels, weights):
        packed = pipeline.counted(pipeline.encode(**texts)).packed
        return layout(packed, pipeline.vocabulary), labels, weights

    spec = dataset.element_spec
    if not isinstance(spec, tuple) or not 2 <= len(spec) <= 3:
        raise UserError("x: expected batches (x, y) or (x, y, sample_weight) in the dataset")
    rows = dataset.map(rows_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    if num_replicas > 1:
        rows = rows.map(of_replicas).unbatch()
    mapped = select(rows).map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return mapped.prefetch(tf.data.AUTOTUNE)


def _strings(columns):
    columns = {name: without_axis(values) for name, values in columns.items()}
    for name, values in columns.items():
        if values.dtype != tf.string or values.shape.rank not in (1, None):
            raise UserError(
                f"x: {name}: expected batches of strings (B,), received {values.dtype.name} "
                f"{values.shape}"
            )
    return {name: tf.ensure_shape(values, [None]) for name, values in columns.items()}


def targets(
    task: Task,
    texts: Mapping[str, tf.Tensor],
    y: Any,
    weight: Any = None,
    class_weight: Mapping[Any, float] | None = None,
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Return labels and weights of a batch by output name, read as those of rows in memory.

    Texts are strings `(B,)` by input name; y has labels `(B,)`, or lists of them, ragged or padded
    with "" or -1.
    """
    y, weight = column_of(task, y, not task.has_lists_of_labels), column_of(task, weight)
    if isinstance(y, tf.RaggedTensor):
        # Unsigned integers have no -1.
        y = y.to_tensor("") if y.dtype == tf.string else tf.cast(y, tf.int64).to_tensor(-1)
    if isinstance(y, Mapping | tuple):
        raise UserError(f"y: expected one column of labels, received {y!r:.80}")
    columns = [*texts.values(), y, *([] if weight is None else [weight])]

    def targets_of(*columns):
        values = dict(zip(texts, columns, strict=False))
        y, weight = (*columns[len(values) :], None)[:2]
        examples = examples_of(task, values, y, weight, class_weight, is_batch=True)
        task.select_training_examples(examples)  # Tasks that can stream check labels in it.
        labels, weights = task.targets(examples, _NO_WINDOWS)
        for factor in (task.sample_weights(examples, _NO_WINDOWS), examples.weights or None):
            if factor is not None:
                weights = {name: of_name * factor for name, of_name in weights.items()}
        return [*labels.values(), *(of_name.astype(np.float32) for of_name in weights.values())]

    # Without rows, they have the types and the shapes of a batch.
    like = task.targets(Examples({}, []), _NO_WINDOWS)
    flat = tf.numpy_function(
        targets_of, columns, [tf.as_dtype(array.dtype) for array in tf.nest.flatten(like)]
    )
    for tensor, array in zip(flat, tf.nest.flatten(like), strict=True):
        tensor.set_shape([None, *array.shape[1:]])
    return tf.nest.pack_sequence_as(like, flat)


def num_steps(dataset: tf.data.Dataset, steps_per_epoch: int | None) -> int:
    """Return the steps per epoch; raises UserError if they are unknown."""
    steps = int(dataset.cardinality()) if steps_per_epoch is None else steps_per_epoch
    if steps < 0:
        raise UserError("steps_per_epoch: expected a number for a dataset of unknown length")
    if steps == 0:
        raise UserError("x: expected at least one batch, received an empty dataset")
    return steps


@contextlib.contextmanager
def raising_row_errors() -> Iterator[None]:
    """Raise the UserErrors of rows of a dataset, which TensorFlow and Keras wrap."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(r"UserError: (.*?)\]?$", str(error), re.MULTILINE)
        if found is None:
            raise
        raise UserError(found[1]) from None
