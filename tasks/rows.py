"""Labelled text in files: .csv, .tsv (quotes are data) and .jsonl, by column name."""

import csv
import dataclasses
import json
import pathlib

from bert_tf.errors import UserError


@dataclasses.dataclass(frozen=True)
class Row:
    """The named columns of one row, and where it stood: "train.csv:17"."""

    values: dict
    where: str


def read_rows(path, columns):
    """Yields a Row a row of a file, with `columns` as strings.

    Raises UserError naming file, line and column where something is missing.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix not in _READERS:
        raise UserError(f"{path}: wanted a file that ends in {', '.join(_READERS)}")
    count = 0
    try:
        with open(
            path, encoding="utf-8-sig", newline=""
        ) as lines:  # A byte order mark is no part of a column's name.
            for number, values in _READERS[path.suffix](path, lines):
                for column in columns:
                    if column not in values:
                        raise UserError(
                            f"{path}:{number}: no column {column!r}, there are: "
                            f"{', '.join(map(str, values))}"
                        )
                    if not isinstance(values[column], str | int | float):
                        raise UserError(
                            f"{path}:{number}: column {column!r} holds {values[column]!r}, "
                            "wanted text"
                        )
                    if _has_surrogate(str(values[column])):
                        raise UserError(
                            f"{path}:{number}: column {column!r} holds half of a surrogate pair, "
                            "which is no character"
                        )
                yield Row({column: str(values[column]) for column in columns}, f"{path}:{number}")
                count += 1
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8: {error.reason} at byte {error.start} of a block after row {count}"
        ) from None
    if not count:
        raise UserError(f"{path}: no rows in it")


def _csv_rows(path, lines, **dialect):
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(lines, strict=True, **dialect)
    try:
        header = reader.fieldnames or ()
        if len(set(header)) < len(header):
            raise UserError(f"{path}: two columns have one name: {', '.join(header)}")
        for values in reader:
            if None in values:
                raise UserError(
                    f"{path}:{reader.line_num}: {len(values[None])} more fields than the header's "
                    f"{len(reader.fieldnames)}"
                )
            yield reader.line_num, values
    except csv.Error as error:
        raise UserError(f"{path}: in the row after line {reader.line_num}: {error}") from None


def _tsv_rows(path, lines):
    return _csv_rows(path, lines, delimiter="\t", quoting=csv.QUOTE_NONE)


def _jsonl_rows(path, lines):
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(
                f"{path}:{number}: holds a JSON {type(values).__name__}, wanted an object"
            )
        yield number, values


def _has_surrogate(text):
    return any("\ud800" <= character <= "\udfff" for character in text)


_READERS = {".csv": _csv_rows, ".tsv": _tsv_rows, ".jsonl": _jsonl_rows}
