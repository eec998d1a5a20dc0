"""Labelled rows given as Python objects, read from a file or from a dataset."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError, argument_names
from bert_tf.system.scalars import to_python
from tasks.base.task import Task, check_positive, task_class
from tasks.base.task_types import default_settings, read_file
from tasks.data.examples import Examples
from tasks.data.labels import loss_weight
from tasks.data.readers.memory import as_list, jsonable, without_axis
from tasks.data.readers.rows import BadRow, raise_bad_rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a file, as `fit`, `evaluate` and `predict` take them.

    Attributes:
        x: N strings, or lists of strings, by input name.
        y: N labels: names, numbers, entities or answers; empty if unlabelled.
        labels: The distinct labels in the order of a task's ids; empty if the task has none.
        source: The file.
    """

    x: dict[str, list]
    y: list
    labels: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))


@argument_names()
def read_examples(
    path: str | os.PathLike[str],
    task_type: str = "classification",
    *,
    labelled: bool = True,
    **options: Any,
) -> Rows:
    """Read a file in a format of a task type.

    Bad rows that a published dataset is known to have are skipped with a warning.

    Args:
        path: .csv, .tsv, .jsonl or a format of the task type (docs/data-formats.md).
        task_type: Name of the task type.
        labelled: Whether to read labels; without them, the file needs none.
        **options: Fields of the task that name columns, such as text_columns=("a", "b").

    Raises:
        UserError: At the first bad row, or at an unknown option.
    """
    task_of_type = task_class(task_type)
    known = {field.name for field in dataclasses.fields(task_of_type)}
    known |= set(inspect.signature(task_of_type.for_reading).parameters) - {"data", "options"}
    if unknown := sorted(options.keys() - known):
        raise UserError(f"{unknown[0]}: unknown option; expected fields of {task_type}")
    y: list = []
    labels: tuple[str, ...] = ()
    if labelled:
        options["max_seq_length"] = default_settings(task_type)["max_seq_length"]
        data = read_file({"kind": task_type, **options, "for_training": True}, path)
        task = task_of_type.for_reading(data, **options)
        examples = task.load_examples(data)
        y = [task.decode_label(label) for label in examples.labels]
        labels = tuple(getattr(task, "labels", ()))
    else:
        examples = _read_texts(path, task_type, options)
    if examples.skipped_rows:
        warnings.warn(examples.skipped_rows_message(), stacklevel=3)  # Of the decorator's caller.
    return Rows(examples.texts, y, labels, os.fspath(path))


def _read_texts(path, task_type, options):
    """Return the rows of a file without labels, of which a task cannot be created."""
    everything = list(read_file({"kind": task_type, **options}, path, labelled=False))
    rows = list(raise_bad_rows(everything))
    if not rows:
        raise UserError(f"{path}: expected at least one good row")
    texts = {name: [row.texts[name] for row in rows] for name in rows[0].texts}
    return Examples(texts, [], tuple(row for row in everything if isinstance(row, BadRow)))


def is_token_ids(x: Any) -> bool:
    """Whether x holds token ids or a dataset of them, which go to Keras untouched."""
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        x = spec[0] if isinstance(spec, tuple) else spec
    return isinstance(x, Mapping) and "input_ids" in x


def inputs_of(x: Any) -> Any:
    """Return the strings of `Rows` or a finite dataset without labels; other x unchanged."""
    if isinstance(x, tf.data.Dataset):
        return _read_dataset(x)[0]
    return x.x if isinstance(x, Rows) else x


def first_batches(x: Any, steps: int | None, name: str = "steps") -> Any:
    """Return the first batches of a dataset; x itself if `steps` is `None`.

    Warns of a dataset of unknown length, which may have no end. Raises UserError, with the name of
    the argument, if x is no dataset or the number is wrong.
    """
    if not isinstance(x, tf.data.Dataset):
        if steps is None:
            return x
        raise UserError(f"{name}: expected with a dataset only; pass the rows that are to be read")
    if steps is not None:
        return x.take(positive(name, steps))
    if x.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        warnings.warn(
            f"reading a dataset of unknown length into memory; pass {name} if it has no end",
            stacklevel=4,
        )
    return x


def check_dataset(dataset: tf.data.Dataset, **others: Any) -> None:
    """Raise UserError if a dataset has no batches, or other arguments give what they contain."""
    for name, value in others.items():
        if value is not None:
            contained = {"y": "labels", "sample_weight": "weights"}.get(name, "batches")
            raise UserError(f"{name}: expected none, since the dataset x contains the {contained}")
    if dataset.cardinality() == 0:
        raise UserError("x: expected at least one batch, received an empty dataset")
    if any(spec.shape.rank == 0 for spec in tf.nest.flatten(dataset.element_spec)):
        raise UserError("x: expected a dataset of batches, received single rows; call batch(32)")


def positive(name: str, value: Any) -> int:
    """Return a positive integer of Python; raises UserError if a value is none."""
    value = to_python(value)
    check_positive(name, value)
    return value


def examples_of(
    task: Task,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[Any, float] | None = None,
    has_teacher: bool = False,
) -> Examples:
    """Return rows as `Examples` with labels in the representation of the task.

    Args:
        task: The task.
        x: Rows, labels and weights as of `TaskModel.fit`; or `Examples` of the task.
        y: Labels.
        sample_weight: Loss weight per row.
        class_weight: Loss weight by label name or id.
        has_teacher: Whether the rows may have no labels, if the task can learn them.

    Raises:
        UserError: If rows, labels and weights differ in number or do not fit the task.
    """
    if isinstance(x, Examples):
        return x
    if isinstance(x, tf.data.Dataset):
        check_dataset(x, y=y, sample_weight=sample_weight)
        x, y, sample_weight = _read_dataset(x)
    if isinstance(x, Rows):
        x, y = x.x, (x.y or None) if y is None else y
    texts = task.labelled_columns(x)
    count = len(next(iter(texts.values())))
    if y is None:
        first = {name: column[0] for name, column in texts.items()}
        if has_teacher and task.can_learn_unlabelled(first):
            return Examples(texts, [])
        y = task.default_labels(x, count)
    else:
        y = as_list(column_of(task, y, not task.has_lists_of_labels), "y")
    if len(y) != count:
        raise UserError(f"y: expected {count} labels, one per row of x, received {len(y)}")
    labels = task.encode_labels(y, texts)
    weights = _weights(task, labels, sample_weight, class_weight)
    return Examples(texts, labels, weights=weights)


def evaluation_examples(task: Task, data: Any) -> Examples:
    """Return the examples of (x, y), `Rows` or a dataset for an evaluation.

    A list of columns is a tuple, as in Keras; weights other than 1 raise UserError.
    """
    if isinstance(data, list) and not any(isinstance(entry, str) for entry in data):
        data = tuple(data)
    if not isinstance(data, tuple):
        data = (data,)
    elif not 2 <= len(data) <= 3:
        raise UserError(f"expected (x, y) or (x, y, sample_weight), received {len(data)} entries")
    return unweighted(examples_of(task, *data))


def unweighted(examples: Examples) -> Examples:
    """Return the rows of an evaluation; raises UserError if they have weights other than 1."""
    if any(weight != 1 for weight in examples.weights):
        raise UserError(
            "sample_weight: expected none in an evaluation, whose metrics count every row once"
        )
    return examples


def split(examples: Examples, fraction: Any) -> tuple[Examples, Examples]:
    """Return the first rows for training and the last ones for validation, as Keras does."""
    first = _num_first(len(examples), fraction)
    return examples.filter(lambda row: row < first), examples.filter(lambda row: row >= first)


def _num_first(count, fraction):
    """Return the number of rows for training."""
    fraction = to_python(fraction)
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"validation_split={fraction!r:.80}: expected a number > 0 and < 1")
    first = math.floor(count * (1 - fraction))
    if not 0 < first < count:
        raise UserError(f"validation_split={fraction}: of {count} rows, one part would be empty")
    return first


def column_of(task: Task, values: Any, is_scalar: bool = True) -> Any:
    """Return labels or weights without what Keras allows around them, otherwise unchanged.

    That is, a dict by the name of the task's output, a table of multi-hot labels and, if a row has
    one value (`is_scalar`), a shape of (N, 1).
    """
    if isinstance(values, Mapping) and len(task.losses) == 1 and set(values) == set(task.losses):
        (values,) = values.values()
    if getattr(task, "multi_label", False) and hasattr(values, "columns"):
        return task.label_space.table(values)
    return without_axis(values) if is_scalar else values


def _weights(task, labels, sample_weight, class_weight):
    """Return the loss weight per row, or () if all are 1."""
    if sample_weight is None and class_weight is None:
        return ()
    weights = [1.0] * len(labels)
    if sample_weight is not None:
        given = as_list(column_of(task, sample_weight), "sample_weight")
        if len(given) != len(labels):
            raise UserError(
                f"sample_weight: expected {len(labels)} weights, one per row, received {len(given)}"
            )
        weights = [loss_weight(f"sample_weight[{row}]", value) for row, value in enumerate(given)]
    if class_weight is not None:
        weights = (class_factors(task, class_weight)[labels] * weights).tolist()
    return tuple(weights)


def class_factors(task: Task, class_weight: Any) -> np.ndarray:
    """Return class_weight, given by label name or id, as float64 `(C,)`.

    Raises UserError if the task has no classes, or a label or weight is wrong.
    """
    if not task.has_classes:
        raise UserError(f"class_weight: not supported by {task.kind}, which has no classes")
    return task.label_space.factors(class_weight)


def _read_dataset(dataset):
    """Return the rows of a finite dataset of batches x, (x, y) or (x, y, sample_weight)."""
    check_dataset(dataset)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError("x: expected a finite dataset, received one that repeats; remove repeat()")
    parts = [part if isinstance(part, tuple) else (part,) for part in dataset]
    if not parts:
        raise UserError("x: expected at least one batch, received an empty dataset")

    def joined(values):
        if isinstance(values[0], Mapping):
            return {name: joined([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], tuple):
            return tuple(map(joined, zip(*values, strict=True)))
        if isinstance(values[0], tf.RaggedTensor):
            return [jsonable(row) for value in values for row in value]
        arrays = [value.numpy() for value in values]
        if len({array.shape[1:] for array in arrays}) == 1:
            return np.concatenate(arrays)
        return [row for array in arrays for row in jsonable(array)]

    x, y, weight = (*map(joined, zip(*parts, strict=True)), None, None)[:3]
    return x, y, weight
