"""Labelled text in files: .csv, .tsv (quotes are data) and .jsonl, by column name."""

import dataclasses
import html

from bert_tf.errors import UserError
from tasks.readers.records import (
    RecordError,
    check_text,
    checked_path,
    csv_records,
    good_or_bad,
    json_records,
    tsv_records,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """The named columns of one row, and where it stood: "train.csv:17", the row's first line."""

    values: dict
    location: str


def read_rows(path, columns, unescape_html=False, lists=(), optional=()):
    """Yields a Row, or a BadRow, a row of a file, with `columns` as strings.

    Numbers of .jsonl come as they are written there ("1.50"). A column that is also in `lists`
    may hold a list of strings in .jsonl; those in `optional` are left out where the file, or the
    JSON object, has none. Where a .csv or .tsv has one column alone, a blank line is an empty text;
    else it is no row. `unescape_html` makes "&amp;" of every column but `lists` a "&".
    Raises UserError if the file is missing, empty, of another extension or not UTF-8, if its header
    lacks a column, or if its last quote is left open.
    """
    path = checked_path(path, SUFFIXES)
    is_empty = True
    for number, record in _records(path, columns):
        is_empty = False
        yield good_or_bad(f"{path}:{number}", record, _row, columns, unescape_html, lists, optional)
    if is_empty:
        raise UserError(f"{path}: no rows in it")


def header_of(path):
    """The column names of a .csv or .tsv file, [] if it is empty."""
    for _, fields in _TABLES[path.suffix](path):
        if fields:
            return [] if isinstance(fields, RecordError) else fields
    return []


def _records(path, columns):
    """Yields (line number, {column: value} or RecordError)."""
    if path.suffix == ".jsonl":
        return json_records(path, parse_int=str, parse_float=str)
    return _table(path, _TABLES[path.suffix](path), columns)


def _table(path, records, columns):
    header = None
    for number, fields in records:
        if not fields:
            if header is None or len(header) > 1:
                continue
            fields = [""]
        if header is None:
            header = fields
            if isinstance(header, RecordError):
                raise UserError(f"{path}:{number}: {header}")
            if len(set(header)) < len(header):
                raise UserError(f"{path}: two columns have one name: {', '.join(header):.200}")
            continue
        for column in columns:
            if column not in header:
                raise UserError(f"{path}:{number}: {_no_column(column, header)}")
        yield number, fields if isinstance(fields, RecordError) else _named(header, fields)


def _named(header, fields):
    """{column: field}, or a RecordError, whichever columns are wanted.

    A line end in a text makes two short rows of one: neither may pass.
    """
    if len(fields) > len(header):
        return RecordError(
            f"{len(fields) - len(header)} more fields than the header's {len(header)}"
        )
    if len(fields) < len(header):
        return RecordError(
            f"column {header[len(fields)]!r:.80} holds None: {len(fields)} fields, but the header "
            f"has {len(header)}"
        )
    return dict(zip(header, fields, strict=True))


def _row(values, columns, unescape_html, lists, optional, location):
    present = [column for column in optional if values.get(column) is not None]
    row = {}
    for column in (*columns, *present):
        if column not in values:
            raise RecordError(_no_column(column, values))
        value = values[column]
        texts = value if column in lists and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            expected = "text or a list of texts" if column in lists else "text"
            raise RecordError(f"column {column!r} holds {value!r:.80}, wanted {expected}")
        for text in texts:
            check_text(text, f"column {column!r}")
        if unescape_html and column not in lists:
            value = html.unescape(value)
        row[column] = value
    return Row(row, location)


def _no_column(column, columns):
    return f"no column {column!r}, there are: {', '.join(columns):.200}"


_TABLES = {".csv": csv_records, ".tsv": tsv_records}
SUFFIXES = (*_TABLES, ".jsonl")
