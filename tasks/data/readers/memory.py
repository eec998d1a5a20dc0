"""Rows given as Python objects: lists, tuples, NumPy arrays, pandas columns and dicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bert_tf.errors import UserError
from bert_tf.system.scalars import to_python
from tasks.data.readers.rows import RowError, as_label, check_text


def columns_of(x: Any, input_names: Sequence[str], lists: Sequence[str] = ()) -> dict[str, list]:
    """Return the texts of rows by input name.

    Args:
        x: For one input: a list, tuple, NumPy array or pandas Series of strings. For two inputs: a
            tuple of two of these. For any task: a dict or pandas DataFrame with a column per input.
        input_names: Names of the inputs that the task expects.
        lists: Names of inputs whose rows are lists of strings.

    Returns:
        `{name: list of N strings, or of N lists of strings}`.

    Raises:
        UserError: If a column is missing, columns differ in length, or an entry is no string.
    """
    columns = {
        name: as_list(values if name in lists else without_axis(values), name)
        for name, values in named(x, input_names).items()
    }
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise UserError(f"x: expected the same number of rows per column, received {counts}")
    if not all(lengths.values()):
        raise UserError("x: expected at least one row, received none")
    for name, values in columns.items():
        for row, value in enumerate(values):
            where = f"x: {name}[{row}]"
            if name in lists:
                values[row] = [_text(text, where) for text in as_list(value, where)]
            else:
                values[row] = _text(value, where)
    return columns


def as_list(values: Any, what: str) -> list:
    """Return a list, tuple, array, tensor or pandas column as a list of Python objects.

    Scalars of NumPy become Python's, and bytes become strings.

    Raises:
        UserError: If `values` is a single value, or has no order or several columns.
    """
    found = values.numpy() if hasattr(values, "numpy") else values  # An eager tensor.
    found = found.tolist() if hasattr(found, "tolist") else found
    if isinstance(found, str | bytes):
        raise UserError(
            f"{what}: expected a list, received the string {found!r:.60}; put it into a list"
        )
    if hasattr(found, "columns"):  # Iterating over it yields the names of its columns.
        columns = ", ".join(map(str, found.columns))
        raise UserError(
            f"{what}: expected a list, a NumPy array or a pandas column, received a "
            f"{type(values).__name__} with the columns {columns:.80}; pass one of them"
        )
    is_other = isinstance(found, Mapping | Set)  # Sets have no order.
    if is_other or not hasattr(found, "__len__") or hasattr(found, "element_spec"):
        raise UserError(
            f"{what}: expected a list, a NumPy array or a pandas column, received "
            f"{type(values).__name__} {values!r:.60}"
        )
    return list(map(to_python, found))


def is_missing(value: Any) -> bool:
    """Whether a value is missing, as in a pandas column: `None`, NaN, pandas.NA or NaT."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def label_names(labels: Any) -> tuple[str, ...]:
    """Return the names of labels, given as a list, an array or a pandas column.

    Raises:
        UserError: If it is none of these, or a name is missing, empty or given twice.
    """
    values = as_list(labels, "labels")
    names = tuple("" if is_missing(value) else as_label(str(value)) for value in values)
    if not all(names):
        raise UserError(
            f"labels[{names.index('')}]: expected a name, received "
            f"{values[names.index('')]!r:.80}; drop rows without a label"
        )
    if len(set(names)) < len(names):
        raise UserError(
            f"labels: expected each label once, received {len(names)} values of which "
            f"{len(set(names))} differ; pass sorted(set(y))"
        )
    return names


def without_axis(values: Any) -> Any:
    """Return an array or tensor of shape (N, 1) as (N,), as Keras does; other values unchanged."""
    shape: Any = getattr(values, "shape", ())
    if getattr(shape, "rank", 0) is None or hasattr(values, "columns"):
        return values
    return values[:, 0] if len(shape) == 2 and shape[1] == 1 else values


def named(x: Any, input_names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of x, see `columns_of`, by input name, unchanged.

    Raises:
        UserError: If a column is missing.
    """
    expected = ", ".join(input_names)
    if hasattr(x, "columns") and hasattr(x, "to_dict"):  # A pandas DataFrame.
        x = {str(name): x[name] for name in x.columns}
    if isinstance(x, Mapping):
        missing = [name for name in input_names if name not in x]
        if missing:
            found = ", ".join(map(str, x)) or "none"
            raise UserError(f"x: expected the columns {expected}, received {found}")
        return {name: x[name] for name in input_names}
    if len(input_names) == 1:
        return {input_names[0]: x}
    if isinstance(x, tuple) and len(x) == len(input_names):
        return dict(zip(input_names, x, strict=True))
    raise UserError(
        f"x: expected {len(input_names)} columns ({expected}), as a tuple, a dict or a DataFrame; "
        f"received {type(x).__name__}"
    )


def _text(value, where):
    if not isinstance(value, str):
        raise UserError(
            f"{where}: expected a string, received {type(value).__name__} {value!r:.60}"
        )
    try:
        check_text(value, where)
    except RowError as error:
        raise UserError(str(error)) from None
    return value


def jsonable(tensor: ArrayLike) -> Any:
    """Convert a tensor or array to nested lists of JSON types.

    Strings become text, invalid UTF-8 U+FFFD.
    """

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return text(np.asarray(tensor).tolist())
