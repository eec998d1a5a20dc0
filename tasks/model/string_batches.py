"""Batches of a `tf.data.Dataset`: strings to token ids, and checks of labels, in the graph.

Shape suffixes: B rows of a batch, C labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from bert_tf.errors import UserError
from tasks.base.task import Task
from tasks.data.readers.memory import named, without_axis
from tasks.graph.preprocessor import Preprocessor

# A batch of fewer tokens may have no known one.
_MIN_TOKENS = 100


def to_token_ids(
    preprocessor: Preprocessor,
    x: Any,
    y: Any = None,
    sample_weight: tf.Tensor | None = None,
    *,
    factors_C: Sequence[float] = (),
    length: int | None = None,
) -> Any:
    """Return inputs, or inputs, labels and weights by output, of a batch of strings.

    Args:
        preprocessor: The preprocessor of the model, which knows the task.
        x: Strings `(B,)`; for several inputs a tuple, or a dict by name.
        y: Labels, by the rule of the task; or a dict of them by output.
        sample_weight: Loss weights `(B,)`.
        factors_C: Loss weight by label.
        length: Tokens per row; by default those of the longest one.

    Raises:
        UserError: If x holds no strings, or the task cannot train on a dataset of them.
    """
    task = preprocessor.task
    columns = named(x, task.input_names)
    texts = {name: without_axis(tf.convert_to_tensor(values)) for name, values in columns.items()}
    for name, values in texts.items():
        rank = task.INPUT_RANKS.get(name, 1)
        if values.dtype != tf.string or values.shape.rank not in (rank, None):
            raise UserError(
                f"x: {name}: expected batches of strings of rank {rank}, received "
                f"{values.dtype.name} {values.shape}"
            )
        texts[name] = tf.ensure_shape(values, [None] * rank)
    inputs = preprocessor.encode(texts, length)
    with tf.control_dependencies([_check_known(inputs, preprocessor.vocabulary)]):
        inputs = tf.nest.map_structure(tf.identity, inputs)
    if y is None:
        return inputs
    (output,) = task.losses
    if isinstance(y, Mapping):
        if output not in y:
            raise UserError(f"y: expected one column of labels, received {', '.join(y):.80}")
        y = y[output]
    labels = task.batch_labels(y)
    weights_B = tf.ones(tf.shape(labels)[:1])
    if sample_weight is not None:
        given_B = tf.reshape(tf.cast(sample_weight, tf.float32), [-1])
        line = "UserError: sample_weight: expected numbers >= 0"
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(given_B >= 0), [line])]):
            weights_B *= given_B
    for factors in (getattr(task, "class_weights", ()), factors_C):
        if len(factors):
            weights_B *= tf.gather(tf.constant(factors, tf.float32), labels)
    return inputs, {output: labels}, {output: weights_B}


def checked(task: Task, data: Any, y: Any = None, weights: Any = None) -> Any:
    """Return token ids with labels that are checked to be ids: at once, or as a dataset is read.

    A label that is none raises InvalidArgumentError, whose message contains "UserError: ".
    """

    @tf.autograph.experimental.do_not_convert
    def check(x, y=None, weights=None):
        checks = []
        for name, count in task.num_ids.items():
            labels, factors = (
                of.get(name) if isinstance(of, Mapping) else of for of in (y, weights)
            )
            if labels is not None and not isinstance(labels, list | tuple):
                checks.append(_check_ids(labels, factors, count))
        with tf.control_dependencies(checks):
            y = tf.nest.map_structure(tf.identity, y)
        return tuple(part for part in (x, y, weights) if part is not None)

    if not isinstance(data, tf.data.Dataset):
        if y is not None:  # In a graph, since an eager assertion quotes its message.
            tf.function(lambda: check({}, y, weights)[1], autograph=False)()
        return data
    return data.map(check) if isinstance(data.element_spec, tuple) else data


def _check_known(inputs, vocabulary):
    """Return an operation that fails if the vocabulary knows no token of a batch."""
    ids = inputs["input_ids"]
    special = [vocabulary[name] for name in ("[PAD]", "[CLS]", "[SEP]")]
    is_token = tf.reduce_all(tf.not_equal(ids[..., tf.newaxis], special), axis=-1)
    is_unknown = is_token & (ids == vocabulary["[UNK]"])
    count, unknown = (tf.reduce_sum(tf.cast(of, tf.int32)) for of in (is_token, is_unknown))
    return tf.debugging.Assert(
        (count < _MIN_TOKENS) | (unknown < count),
        ["UserError: x: all tokens of a batch are [UNK]; expected texts of the vocabulary"],
    )


def _check_ids(labels, weights, count):
    """Return an operation that fails if a label of weight above 0 is no id."""
    labels = tf.convert_to_tensor(labels)
    if labels.dtype == tf.string:
        raise UserError("y: expected ids as labels of token ids, received strings")
    numbers = tf.cast(labels, tf.float32)
    is_wrong = (numbers < 0) | (numbers > count - 1)
    if weights is not None:
        weights = tf.convert_to_tensor(weights)
        missing = numbers.shape.rank - weights.shape.rank
        weights = weights[(..., *[tf.newaxis] * missing)] if missing > 0 else weights
        is_wrong &= tf.reshape(weights, tf.shape(weights)[: numbers.shape.rank]) > 0
    first = tf.strings.reduce_join(tf.boolean_mask(tf.as_string(labels), is_wrong)[:1])
    message = [
        "UserError: a label of token ids is ",
        first,
        f"; expected ids from 0 to {count - 1}; remove rows without a label",
    ]
    return tf.debugging.Assert(~tf.reduce_any(is_wrong), [tf.strings.join(message)])
