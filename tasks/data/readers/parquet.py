"""Rows of Parquet files, which pyarrow reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import DataFile

ROWS_AT_ONCE = 4096


def parquet_rows(file: DataFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the row from 1, {column: value}) of a Parquet file.

    Numbers become strings, as labels are read from other files.

    Raises:
        UserError: If the file is no Parquet file, or pyarrow is not installed.
    """
    pyarrow = import_pyarrow(file)

    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream) as table:
            number = 0
            for batch in table.iter_batches(ROWS_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield number, {name: _as_text(value) for name, value in values.items()}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: expected a Parquet file ({reason})") from None


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


def write_parquet(
    stream: Any,
    path: str,
    rows: Iterable[dict[str, Any]],
    types: Mapping[str, tuple[str, int]],
) -> None:
    """Write rows of JSON types as a Parquet file.

    Args:
        stream: Binary stream that receives the file.
        path: Its path, for messages.
        rows: The rows, all of which are kept in memory. A column that a row lacks is null.
        types: Name of the type, such as "float32", and number of list levels by column, so that
            all files of a directory have one schema. Other columns, such as "row", are strings.
    """
    pyarrow = import_pyarrow(path)

    rows = list(rows)
    keys = dict.fromkeys(name for row in rows for name in row if name not in types)
    fields = []
    for name in dict.fromkeys((*keys, *types, "error")):
        type_name, levels = types.get(name, ("string", 0))
        data_type = pyarrow.type_for_alias(type_name)
        for _ in range(levels):
            data_type = pyarrow.list_(data_type)
        fields.append(pyarrow.field(name, data_type))
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, stream)
