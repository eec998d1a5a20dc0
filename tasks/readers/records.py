"""Records of text files (.csv, .tsv, .jsonl) with their line numbers, and what becomes of bad ones.

A reader yields a BadRow in a bad row's place and goes on; what stops it is a UserError.
A line ends at LF or CR LF, in .csv also at CR. A byte order mark is no text. An empty line of .csv
or .tsv has no fields: where a text is the only column it is an empty text, so that rows keep the
order of lines; elsewhere, and in .jsonl, it is no record.
"""

import csv
import dataclasses
import json
import pathlib

from bert_tf import files, strict_json
from bert_tf.errors import UserError

MAX_LINE_LENGTH = 2**27  # Characters. More is no text, but a line end or a quote left out.


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it stood ("train.csv:17"), and what is wrong with it.

    `is_known`: its published data set is known to hold such rows, and everybody leaves them out.
    """

    location: str
    message: str
    is_known: bool = False

    def __str__(self):
        return f"{self.location}: {self.message}"


class RecordError(Exception):
    """What is wrong with one record. Its reader makes a BadRow of it."""


class KnownRecordError(RecordError):
    """One that a published data set is known to have."""


def raise_bad_rows(items):
    """The items of a reader, for training, less BadRows that are known.

    Raises UserError at the first other BadRow.
    """
    for item in items:
        if not isinstance(item, BadRow):
            yield item
        elif not item.is_known:
            raise UserError(str(item))


def good_or_bad(location, record, make, *arguments):
    """make(record, *arguments, location); a BadRow if the record is a RecordError, or
    `make` raises one.
    """
    try:
        if isinstance(record, RecordError):
            raise record
        return make(record, *arguments, location)
    except RecordError as error:
        return BadRow(location, str(error), isinstance(error, KnownRecordError))


def checked_path(path, suffixes=None):
    """The pathlib.Path. Raises UserError if there is no such file, or it ends in something else."""
    if files.is_remote(path):
        raise UserError(f"{path}: expected a local file; copy it to this machine")
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{path}: wanted a file that ends in {', '.join(suffixes)}")
    return path


def as_label(text):
    """Return a label as all readers and flags take it: without the white space around it."""
    return text.strip()


def check_text(text, what):
    """Raises RecordError if the text, which is `what` ("column 'text'"), holds what no
    text holds.
    """
    if "\0" in text:
        raise RecordError(f"{what} holds a NUL, which is no character of a text")
    if _surrogate_at(text) is not None:
        raise RecordError(f"{what} holds half of a surrogate pair, which is no character")


def read_lines(path, newline="\n"):
    """Yields (number, line with its end) of a UTF-8 file; `newline` is that of `open`."""
    # Bytes that are not UTF-8 come as surrogates, so that their line can be named.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
        number = 0
        while line := file.readline(MAX_LINE_LENGTH + 1):
            number += 1
            if len(line) > MAX_LINE_LENGTH:
                raise UserError(f"{path}:{number}: a line of over {MAX_LINE_LENGTH} characters")
            if (index := _surrogate_at(line)) is not None:
                raise UserError(
                    f"{path}: not UTF-8: byte 0x{ord(line[index]) - 0xDC00:02x} in line {number}; "
                    "convert the file to UTF-8"
                )
            yield number, line


def csv_records(path):
    """Yields (number of the first line, fields); a RecordError for fields where quotes are
    misplaced.

    An empty line has none.
    """
    csv.field_size_limit(MAX_LINE_LENGTH)
    reader = csv.reader((line for _, line in read_lines(path, newline="")), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Text behind a closing quote spoils one row; a quote left open has eaten the file.
            if "expected after" not in str(error):
                raise UserError(f"{path}: in the row after line {number - 1}: {error}") from None
            fields = RecordError(f"{error}; a quote in a quoted field is written twice")
        yield number, fields


def tsv_records(path):
    """Yields (line number, fields), none of an empty line. Quotes are data."""
    for number, line in read_lines(path):
        line = line.removesuffix("\n").removesuffix("\r")
        yield number, line.split("\t") if line else []


def json_records(path, **parsers):
    """Yields (line number, dict or RecordError) of JSON lines; `parsers` are those of
    json.loads.
    """
    for number, line in read_lines(path):
        if line.strip():
            yield number, _json_object(line.strip(), parsers)


def _json_object(line, parsers):
    try:
        values = strict_json.parse(line, **parsers)
    except json.JSONDecodeError as error:
        return RecordError(f"not JSON: {error.msg} at character {error.pos + 1}")
    except ValueError as error:
        return RecordError(f"not JSON: {error}")
    if not isinstance(values, dict):
        return RecordError(f"holds a JSON {type(values).__name__}, wanted an object")
    return values


def _surrogate_at(text):
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
