"""Labels of classification and tagging: their names and ids, in Python and in the graph.

Shape suffixes: B rows of a batch, K labels of the row that has most, C labels of the task.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.system.scalars import to_python
from tasks.data.readers.memory import as_list, is_missing
from tasks.data.readers.rows import as_label

_BOOLEANS = {"False": 0, "True": 1}
_INTEGER = re.compile(r"([+-]?\d{1,18})(\.0+)?")  # Of 64 bits.
# What str.strip() removes, as a regular expression of TensorFlow.
_BLANK = (
    r"[\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"
)
_BLANKS = f"^{_BLANK}+|{_BLANK}+$"


@dataclasses.dataclass(frozen=True)
class LabelSpace:
    """The labels of a task.

    A label is a name (str) or an id (int). If all `labels` are integers, written as int or as str,
    an integer in y is a name; otherwise it is an id. Whole floats and booleans count as integers.
    Decided by `labels`, never by y. Multi-label: a list of names per row, or a 0/1 array (N, C) or
    table with the labels as columns. One label per row may also be one-hot, an array (N, C).

    Attributes:
        labels: Names of the C labels, in the order of their ids.
    """

    labels: tuple[str, ...]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.labels)}

    @functools.cached_property
    def _ids_of_integers(self) -> dict[int, int]:
        """Ids by the integer that stands for each, in their order."""
        ids = range(len(self.labels))
        integers = [found for found in map(_integer, self.labels) if found is not None]
        if len(integers) < len(ids):
            return {number: number for number in ids}
        # Of "1" and "01", an integer is neither.
        return dict(zip(integers, ids, strict=True)) if len(set(integers)) == len(ids) else {}

    @property
    def _expected(self):
        names = f"one of {', '.join(self.labels):.200}"
        are_ids = None in map(_integer, self.labels)
        return names + f", or an id from 0 to {len(self.labels) - 1}" * are_ids

    def id_of(self, label: Any) -> int:
        """Return the id of a label, or of a one-hot row; raises ValueError if it is none."""
        if _is_row(label):
            (*ids,) = self._ids_of_hot(label)
            if len(ids) != 1:
                raise ValueError(f"row {label!r:.80}: expected exactly one 1")
            return ids[0]
        if is_missing(label):
            raise ValueError(f"label {label!r}: expected no missing value; drop rows without label")
        if isinstance(label, str):
            found = self._ids.get(as_label(label))
        else:
            is_whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
            found = self._ids_of_integers.get(int(label)) if is_whole else None
        if found is None:
            raise ValueError(f"label {label!r:.80}: expected {self._expected}")
        return found

    def ids_of(self, row: Any) -> tuple[int, ...]:
        """Return the ids of a row with any number of labels; raises ValueError if it is none.

        Names may be padded with "", as in the batches of a dataset.
        """
        if isinstance(row, str):
            raise ValueError(
                f"label {row!r:.80}: expected a list of names; split it, as in text.split('|')"
            )
        if not _is_row(row):
            raise ValueError(
                f"label {row!r:.80}: expected a list of names, [] for none, or {len(self.labels)} "
                "values that are 0 or 1"
            )
        names = as_list(row, "a list")
        if all(isinstance(name, str) for name in names):
            return tuple(self.id_of(name) for name in names if name)
        return self._ids_of_hot(names)

    def _ids_of_hot(self, row):
        values, count = as_list(row, "a list"), len(self.labels)
        if len(values) != count or not all(map(_is_bit, values)):
            raise ValueError(f"row {row!r:.80}: expected {count} values, one per label, 0 or 1")
        return tuple(number for number, value in enumerate(values) if value)

    def table(self, table: Any) -> list[list]:
        """Return the rows of a table, 0 or 1 per label, whose columns are the labels in any order.

        Raises:
            UserError: If it has other columns.
        """
        columns = {str(name): name for name in table.columns}
        if sorted(map(str, table.columns)) != sorted(self.labels):
            raise UserError(
                f"y: expected a table with the columns {', '.join(self.labels):.200}, received "
                f"{', '.join(columns):.200}"
            )
        values = [as_list(table[columns[label]], "y") for label in self.labels]
        return list(map(list, zip(*values, strict=True)))

    def batch(self, y: tf.Tensor) -> tf.Tensor:
        """Return the ids of a batch of labels, int32 `(B,)`, in the graph.

        Args:
            y: Names or numbers, `(B,)` or `(B, 1)`, or one-hot, `(B, C)`.

        Raises:
            UserError: If its shape is none of these; a label that is none fails an assertion whose
                message contains "UserError: ".
        """
        count = len(self.labels)
        if y.shape.rank == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.shape.rank is None:  # A generator need not tell its shapes.
            y = tf.ensure_shape(y, [None])
        if y.shape.rank == 2 and y.shape[1] == count and y.dtype != tf.string:
            hot_BC = _as_bits(y)
            sums_B = tf.reduce_sum(hot_BC, axis=1)
            with check_batch(sums_B == 1, sums_B, "1 as the sum of a one-hot row"):
                return tf.argmax(hot_BC, axis=1, output_type=tf.int32)
        if y.shape.rank != 1:
            raise UserError(
                f"y: expected labels (B,), or one-hot rows (B, {count}), received {y.shape}"
            )
        is_label_BC = self._equals(y)
        with check_batch(tf.reduce_any(is_label_BC, axis=1), y, self._expected):
            return tf.argmax(tf.cast(is_label_BC, tf.int32), axis=1, output_type=tf.int32)

    def multi_hot_batch(self, y: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
        """Return 0 or 1 per label of a batch, int32 `(B, C)`, in the graph.

        Args:
            y: Names, ragged or `(B, K)` padded with "", or numbers that are 0 or 1, `(B, C)`.

        Raises:
            UserError: As `batch`.
        """
        if y.dtype != tf.string:
            if (
                isinstance(y, tf.RaggedTensor)
                or y.shape.rank != 2
                or y.shape[1] != len(self.labels)
            ):
                raise UserError(
                    f"y: expected lists of names, or numbers (B, {len(self.labels)}) that are 0 or "
                    f"1, received {y.dtype.name} {y.shape}"
                )
            return _as_bits(y)
        names_BK = y.to_tensor("") if isinstance(y, tf.RaggedTensor) else y
        if names_BK.shape.rank != 2:
            raise UserError(f"y: expected lists of names (B, K), received strings {y.shape}")
        is_label_BKC = self._equals(names_BK)
        is_good_BK = tf.reduce_any(is_label_BKC, axis=2) | (names_BK == "")
        with check_batch(is_good_BK, names_BK, self._expected):
            return tf.cast(tf.reduce_any(is_label_BKC, axis=1), tf.int32)

    def _equals(self, y):
        """Return bool (..., C), which label each entry is."""
        if y.dtype == tf.string:
            names = tf.strings.regex_replace(y, _BLANKS, "")
            return names[..., tf.newaxis] == tf.constant(self.labels)
        integers = tf.cast(y, tf.int64)
        is_whole = tf.cast(integers, y.dtype) == y
        known_C = tf.constant(list(self._ids_of_integers), tf.int64)
        return (integers[..., tf.newaxis] == known_C) & is_whole[..., tf.newaxis]

    def factors(self, class_weight: Any, argument: str = "class_weight") -> np.ndarray:
        """Return a dict of loss weights by label as float64 `(C,)`, 1 of labels that it lacks.

        Raises:
            UserError: If it is no dict, a label is none or given twice, or a weight is no number.
        """
        if not isinstance(class_weight, Mapping):
            raise UserError(
                f"{argument}: expected a dict of label and weight, received {class_weight!r:.80}"
            )
        factors_C, given = np.ones(len(self.labels)), dict[int, Any]()
        for label, weight in class_weight.items():
            try:
                number = self.id_of(to_python(label))
            except ValueError as error:
                raise UserError(f"{argument}: {error}") from None
            if number in given:
                raise UserError(
                    f"{argument}: {given[number]!r} and {label!r} are the same label; expected "
                    "each once"
                )
            given[number] = label
            factors_C[number] = loss_weight(f"{argument}: {label!r}", weight)
        return factors_C


def loss_weight(what: str, value: Any) -> float:
    """Return a loss weight; raises UserError, prefixed with `what`, if it is no number >= 0."""
    value = to_python(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise UserError(f"{what}: expected a number >= 0, received {value!r:.80}")
    return float(value)


def check_batch(is_good: tf.Tensor, labels: tf.Tensor, expected: str) -> Any:
    """Return a context whose operations run if all labels of a batch are good.

    Otherwise an assertion fails, whose message has the first bad label after "UserError: ".
    """
    bad = tf.strings.as_string(tf.boolean_mask(labels, ~is_good)[:1])
    message = tf.strings.join(
        ["UserError: y: received ", tf.strings.reduce_join(bad), ", expected ", expected]
    )
    return tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_good), [message])])


def _as_bits(y):
    """Return a tensor of numbers that are 0 or 1 as int32."""
    bits = tf.cast(y, tf.int32)
    with check_batch((y == tf.cast(bits, y.dtype)) & (bits >= 0) & (bits <= 1), y, "0 or 1"):
        return tf.identity(bits)


def _integer(label: str) -> int | None:
    """Return the integer that a label is written as, or `None`."""
    found = _INTEGER.fullmatch(label)
    return int(found[1]) if found else _BOOLEANS.get(label)


def _is_row(value):
    return isinstance(value, Sequence | np.ndarray | tf.Tensor) and not isinstance(value, str)


def _is_bit(value):
    return isinstance(value, int | float) and value in (0, 1)
