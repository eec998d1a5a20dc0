"""Reader of labelled text by column name.

Files are .csv, .tsv (quotes are data) and .jsonl, each also as .gz, and .parquet.
"""

from __future__ import annotations

import collections
import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.parquet import parquet_rows
from tasks.data.readers.rows import (
    BadRow,
    DataFile,
    Example,
    RowError,
    Source,
    check_text,
    csv_rows,
    data_file,
    good_or_bad,
    json_rows,
    quoted,
    tsv_rows,
)


def _of_columns(values, location):
    return Example(values, None, location)


def read_rows(
    source: Source,
    columns: Sequence[str],
    unescape_html: bool = False,
    lists: Collection[str] = (),
    optional: Sequence[str] = (),
    make: Callable[[dict[str, Any], str], Example] = _of_columns,
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file.

    If a .csv or .tsv has one column only, a blank line is an empty text; otherwise it is not a row.

    Args:
        source: .csv, .tsv or .jsonl, also compressed (.csv.gz), or .parquet.
        columns: Columns to read, as strings. Numbers of .jsonl are kept as they are written there
            ("1.50").
        unescape_html: Whether to convert entities such as "&amp;" in all columns but `lists`.
        lists: Those of `columns` that may be a list of strings in .jsonl.
        optional: Further columns, read if the file or the JSON object has them.
        make: Callable from ({column: string or list of strings}, location), which may raise
            `RowError`. By default, the columns are the texts of an example.

    Yields:
        An `Example`, or a `BadRow` for a row that cannot be used.

    Raises:
        UserError: If the file is missing, empty, not UTF-8 or has another suffix, if its header
            lacks a column, or if its last quote is not closed.
    """
    file = data_file(source, SUFFIXES)
    is_empty = True
    for number, row in named_rows(file, columns):
        is_empty = False
        yield good_or_bad(
            f"{file}:{number}", row, _row, columns, unescape_html, lists, optional, make
        )
    if is_empty:
        raise UserError(f"{file}: expected at least one row, received none")


def text_names(count: int) -> tuple[str, ...]:
    """Return the names of the inputs of a text, or of two."""
    return ("text",) if count == 1 else ("text_a", "text_b")


def read_texts(
    task: Mapping[str, Any], source: Source, label: str | None, is_optional: bool = False
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file with a text or pair in named columns.

    Args:
        task: Values of a task.json: "text_columns", "unescape_html" and "multi_label".
        source: The file.
        label: Column of the label, None to read none.
        is_optional: Whether the file may lack this column.
    """
    columns = task.get("text_columns", ("text",))
    names, labels = text_names(len(columns)), [label] if label else []

    def example(values, location):
        texts = {name: values[column] for name, column in zip(names, columns, strict=True)}
        return Example(texts, values.get(label), location)

    return read_rows(
        source,
        (*columns, *([] if is_optional else labels)),
        task.get("unescape_html", False),
        lists=labels if task.get("multi_label") else (),
        optional=labels if is_optional else (),
        make=example,
    )


def rows_with_optional_labels(
    task: Mapping[str, Any], source: Source, labelled: bool
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file for the values of a task.json; see `TaskType`."""
    column = task.get("label_column")
    return read_texts(task, source, (column or "label") if labelled else None, column is None)


def header_of(file: DataFile) -> list[str]:
    """Return the column names of a .csv or .tsv file, [] if it is empty."""
    for _, fields in _TABLES[file.suffix](file):
        if fields:
            return [] if isinstance(fields, RowError) else fields
    return []


def named_rows(
    file: DataFile, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Yield (line number, {column: value} or `RowError`) of a file.

    Args:
        file: The file.
        columns: Columns that the header of a .csv or .tsv file must have.
    """
    suffix = file.suffix
    if suffix == ".parquet":
        return parquet_rows(file)
    if suffix == ".jsonl":
        # Numbers stay as they are written, so that the label 1.50 is not read as 1.5.
        return json_rows(file, parse_int=str, parse_float=str)
    return _table(file, _TABLES[suffix](file), columns)


def _table(file, rows, columns):
    header = None
    for number, fields in rows:
        if not fields:
            # A blank line is an empty text if there is one column, otherwise no row.
            if header is None or len(header) > 1:
                continue
            fields = [""]
        if header is None:
            header = fields
            if isinstance(header, RowError):
                raise UserError(
                    f"{file}:{number}: expected column names, separated by commas; {header}"
                )
            name, count = collections.Counter(header).most_common(1)[0]
            if count > 1:
                raise UserError(f"{file}:{number}: {_repeated(name, header)}")
            continue
        for column in columns:
            if column not in header:
                separator = _other_separator(header)
                raise UserError(f"{file}:{number}: {no_column(column, header)}{separator}")
        yield number, fields if isinstance(fields, RowError) else _named(header, fields)


def _named(header, fields):
    """Return {column: field}, or a RowError if the numbers differ.

    All columns are checked, not only the requested ones: an unescaped line end in a text splits a
    row into two short ones, and neither may be used.
    """
    if len(fields) > len(header):
        return RowError(f"expected {len(header)} fields as in the header, received {len(fields)}")
    if len(fields) < len(header):
        return RowError(
            f"expected {len(header)} fields as in the header, received {len(fields)}; the first "
            f"missing column is {header[len(fields)]!r:.80}"
        )
    return dict(zip(header, fields, strict=True))


def _row(values, columns, unescape_html, lists, optional, make, location):
    present = [column for column in optional if values.get(column) is not None]
    row = {}
    for column in (*columns, *present):
        if column not in values:
            raise RowError(no_column(column, values))
        value = values[column]
        texts = value if column in lists and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            expected = "text or a list of texts" if column in lists else "text"
            raise RowError(f"column {column!r}: expected {expected}, received {value!r:.80}")
        for text in texts:
            check_text(text, f"column {column!r}")
        if unescape_html and column not in lists:
            value = html.unescape(value)
        row[column] = value
    return make(row, location)


def no_column(column: str, columns: Iterable[str]) -> str:
    """Return the message that a row or a file lacks a column."""
    return f"no column {column!r}; the columns are {quoted(columns)}"


def _repeated(name, header):
    """Return the message that several columns have one name, or none."""
    numbers = [str(number) for number, other in enumerate(header, start=1) if other == name]
    which = f"columns {', '.join(numbers[:-1]):.80} and {numbers[-1]}"
    if name:
        return f"{which} are named {name!r:.80}; expected distinct names"
    return f"{which} have no name; name them, or remove them if they are empty"


def _other_separator(header):
    """Return what a message adds if the names are separated by another character."""
    if header[0].startswith("sep="):
        return "; the first line names a separator: remove it, and separate columns by commas"
    found = [name for name in _SEPARATORS if len(header) == 1 and name in header[0]]
    if not found:
        return ""
    name, remedy = _SEPARATORS[found[0]]
    return f"; they seem to be separated by {name}: {remedy}"


_SAVE = "save the file with commas as .csv or with tabs as .tsv"
_SEPARATORS = {
    "\t": ("tabs", "name the file .tsv"),
    ";": ("semicolons", _SAVE),
    "|": ("vertical bars", _SAVE),
    ",": ("commas", "name the file .csv"),
}
_TABLES = {".csv": csv_rows, ".tsv": tsv_rows}
SUFFIXES = (*_TABLES, ".jsonl", ".parquet")
