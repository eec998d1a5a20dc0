"""Rows of Parquet files, which pyarrow reads and writes."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from bert_tf.errors import UserError

ROWS_AT_ONCE = 4096


def parquet_rows(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the row from 1, {column: value}) of a Parquet file.

    Numbers become strings, as labels are read from other files.

    Raises:
        UserError: If the file is no Parquet file, or pyarrow is not installed.
    """
    pyarrow = import_pyarrow(path)

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches(ROWS_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield number, {name: _as_text(value) for name, value in values.items()}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: expected a Parquet file ({reason})") from None


def import_pyarrow(path: object) -> Any:
    """Return the module pyarrow.

    Args:
        path: The file that requires it, for the message.

    Raises:
        UserError: If it is not installed.
    """
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: Parquet requires pyarrow; pip install 'bert_tf[parquet]'"
        ) from None
    return pyarrow


def _as_text(value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def write_parquet(stream: Any, path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of JSON types as a Parquet file, numbers with a fraction as float32.

    Args:
        stream: Binary stream that receives the file.
        path: Its path, for messages.
        rows: The rows, all of which are kept in memory. A column that a row lacks is null.
    """
    pyarrow = import_pyarrow(path)

    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    fields = [pyarrow.field(field.name, _as_float32(field.type)) for field in table.schema]
    pyarrow.parquet.write_table(table.cast(pyarrow.schema(fields)), stream)


def _as_float32(data_type):
    import pyarrow

    if pyarrow.types.is_list(data_type):
        return pyarrow.list_(_as_float32(data_type.value_type))
    return pyarrow.float32() if pyarrow.types.is_float64(data_type) else data_type
