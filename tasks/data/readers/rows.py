"""Rows of data files (.csv, .tsv, .jsonl, also .gz) with their line numbers.

A reader yields an `Example` per row. For a row that cannot be used it yields a `BadRow` and
continues; a `UserError` stops it.
A line ends at LF or CR LF, in .csv and in files without LF also at CR. A byte order mark is
ignored. An empty line of .csv or .tsv has no fields: if a text is the only column, it is an empty
text, so that rows keep the order of lines; otherwise, and in .jsonl, it is not a row.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json

# In characters. Longer lines come from missing line ends or an unclosed quote.
MAX_LINE_LENGTH = 2**27
BUFFER_BYTES = 1 << 16

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of a file.

    Attributes:
        texts: String by input name; a list of strings for the choices of a question.
        label: Label as it is written in the file; None for unlabelled rows. A task converts it to
            its representation.
        location: Position for messages, such as "train.csv:17".
        id: Name of the row, if the file has a column of names.
    """

    texts: dict[str, str | list[str]]
    label: Any
    location: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        location: File and line, such as "train.csv:17".
        message: The reason.
        is_known: Whether the published dataset is known to contain such rows, which are then
            skipped in training.
    """

    location: str
    message: str
    is_known: bool = False

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class RowError(Exception):
    """Error in one row; its reader turns it into a `BadRow`."""


class KnownRowError(RowError):
    """Error that a published dataset is known to contain."""


def raise_bad_rows(items: Iterable[_Item | BadRow]) -> Iterator[_Item]:
    """Yield the good items of a reader, for training; known bad rows are skipped.

    Raises:
        UserError: At the first bad row that is not known.
    """
    for item in items:
        if not isinstance(item, BadRow):
            yield item
        elif not item.is_known:
            raise UserError(str(item))


def check_good(items: Iterable[object]) -> None:
    """Read all items of a reader, for training; raises UserError as `raise_bad_rows`."""
    for _ in raise_bad_rows(items):
        pass


def check_any_good(items: Iterable[_Item | BadRow]) -> None:
    """Read up to the first good item of a reader, for commands that continue after a bad row.

    Raises:
        UserError: If there are bad rows only.
    """
    count, first = 0, None
    for item in items:
        if not isinstance(item, BadRow):
            return
        count, first = count + 1, first or item
    if first:
        raise UserError(f"{first}; none of {count} rows can be read" if count > 1 else str(first))


def good_or_bad(
    location: str, row: Any, make: Callable[..., _Item], *arguments: Any
) -> _Item | BadRow:
    """Return make(row, *arguments, location), or a `BadRow` if there is a `RowError`.

    The error may be the row itself, or raised by `make`.
    """
    try:
        if isinstance(row, RowError):
            raise row
        return make(row, *arguments, location)
    except RowError as error:
        return BadRow(location, str(error), isinstance(error, KnownRowError))


class DataFile:
    """A local file of rows.

    Args:
        path: The file.
        content: Its bytes, if they are in memory.
    """

    def __init__(self, path: str | os.PathLike, content: bytes | None = None) -> None:
        self.path, self._content = pathlib.Path(path), content

    def __str__(self) -> str:
        return str(self.path)

    @property
    def suffix(self) -> str:
        """The suffix without compression, such as ".csv" for rows.csv.gz."""
        path = self.path
        return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix

    def open(self) -> files.Stream:
        """Open a stream of the bytes."""
        return files.open_file(self.path) if self._content is None else io.BytesIO(self._content)


Source = str | os.PathLike | DataFile  # What readers take.


def data_file(source: Source, suffixes: Collection[str] | None = None) -> DataFile:
    """Check that a source is a local file, and return it.

    Args:
        source: The file.
        suffixes: Accepted suffixes, such as ".csv"; by default all.

    Raises:
        UserError: If it is remote, missing or has another suffix.
    """
    if not isinstance(source, DataFile):
        if files.is_remote(source):
            raise UserError(f"{source}: expected a local file; copy it to this machine")
        source = DataFile(source)
        if not source.path.is_file():
            raise UserError(f"{source}: no such file")
    if suffixes and source.suffix not in suffixes:
        raise UserError(f"{source}: expected a file that ends in {', '.join(suffixes)}")
    return source


class FileRows:
    """The rows of a file that is opened once: for its hash, its check, its labels, its examples.

    An iteration yields an `Example` or a `BadRow` per row. All rows are kept, for the next one.

    Args:
        path: The file.
        read: Reader of its format.

    Attributes:
        path: The file.
        sha256: Hash of its bytes, as `files.sha256`.

    Raises:
        UserError: If it is no local file; in an iteration, what `read` raises.
    """

    def __init__(
        self, path: str | os.PathLike, read: Callable[[DataFile], Iterable[Example | BadRow]]
    ) -> None:
        with data_file(path).open() as stream:
            content = stream.read()
        self.path, self.sha256 = os.fspath(path), hashlib.sha256(content).hexdigest()
        self._read_rows: list[Example | BadRow] = []
        self._other_rows = _iterated(read, DataFile(path, content))

    def __str__(self) -> str:
        return self.path

    def __iter__(self) -> Iterator[Example | BadRow]:
        yield from self._read_rows
        for row in self._other_rows:
            self._read_rows.append(row)
            yield row


def _iterated(read, file):
    """Yield the rows of a reader. At the end, the generator releases the bytes of the file."""
    yield from read(file)


def as_label(text: str) -> str:
    """Normalize a label, in files as in flags: strip surrounding white space."""
    return text.strip()


def quoted(names: Iterable[object]) -> str:
    """Return names for a message, quoted so that white space in them is visible."""
    return f"{', '.join(map(repr, names)):.200}"


def check_text(text: str, what: str) -> None:
    """Check that a text contains neither NUL nor lone surrogates, which no tokenizer accepts.

    Args:
        text: The text.
        what: Name of the text for the message, such as "column 'text'".

    Raises:
        RowError: If it does.
    """
    if "\0" in text:
        raise RowError(f"{what}: expected text, received a NUL character")
    if _surrogate_at(text) is not None:
        raise RowError(f"{what}: expected text, received half of a surrogate pair")


def read_lines(file: DataFile, newline: str = "\n") -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line with its end) of a UTF-8 file.

    Args:
        file: The file.
        newline: As in `open`.

    Raises:
        UserError: At a byte that is not UTF-8, or a line that is too long.
    """
    # Bytes that are not UTF-8 are read as surrogates, so that the error can name their line.
    text = files.TextFile(file.path, keep_cr=newline == "", stream=file.open())
    with io.TextIOWrapper(
        io.BufferedReader(text, BUFFER_BYTES),
        encoding="utf-8",
        errors="surrogateescape",
        newline=newline,
    ) as lines:
        number = 0
        # A limit bounds the memory of a file without line ends.
        while line := lines.readline(MAX_LINE_LENGTH + 1):
            number += 1
            if len(line) > MAX_LINE_LENGTH:
                raise UserError(
                    f"{file}:{number}: expected a line of at most {MAX_LINE_LENGTH} characters"
                )
            if (index := _surrogate_at(line)) is not None:
                raise UserError(
                    f"{file}: not UTF-8: byte 0x{ord(line[index]) - 0xDC00:02x} in line {number}; "
                    "convert the file to UTF-8"
                )
            yield number, line


def csv_rows(file: DataFile) -> Iterator[tuple[int, list[str] | RowError]]:
    """Yield (number of the first line, fields) of .csv.

    Fields are [] for an empty line, and a `RowError` if quotes are misplaced.

    Raises:
        UserError: If the last quote is not closed.
    """
    csv.field_size_limit(MAX_LINE_LENGTH)
    lines: list[str] = []  # Of the current row.

    def recorded():
        for _, line in read_lines(file, newline=""):
            lines.append(line)
            yield line

    reader = csv.reader(recorded(), strict=True)
    while True:
        number = reader.line_num + 1
        lines.clear()
        try:
            fields = next(reader)
            yield number, _misquoted(fields, lines) or fields
        except StopIteration:
            return
        except csv.Error as error:
            # Text after a closing quote breaks one row only; an unclosed quote consumes the file.
            if "expected after" not in str(error):
                raise UserError(f"{file}: in the row after line {number - 1}: {error}") from None
            yield number, RowError(f"{error}; a quote in a quoted field has to be doubled")


def _misquoted(fields, lines):
    """Return a `RowError` if a blank comes before the quote of a field, which is then data."""
    suspects = [field for field in fields if field[:1] in (" ", "\t") and '"' in field]
    if not any(field.lstrip(" \t").startswith('"') for field in suspects):
        return None
    row, position = "".join(lines), 0
    for field in fields:
        is_quoted = row.startswith('"', position)
        if not is_quoted and field[:1] in (" ", "\t") and field.lstrip(" \t").startswith('"'):
            return RowError(
                f"a blank before the quote in {field!r:.40}, which makes the quotes part of the "
                "text; remove the blank"
            )
        # The quotes in a quoted field are doubled.
        position += len(field) + is_quoted * (2 + field.count('"')) + 1
    return None


def tsv_rows(file: DataFile) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of .tsv, [] for an empty line. Quotes are data."""
    for number, line in read_lines(file):
        line = line.removesuffix("\n").removesuffix("\r")
        yield number, line.split("\t") if line else []


def json_rows(
    file: DataFile, **parsers: Callable[[str], Any]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Yield (line number, object or `RowError`) of JSON lines.

    Args:
        file: The file.
        **parsers: As in `json.loads`, such as `parse_float`.
    """
    for number, line in read_lines(file):
        if line.strip():
            yield number, _json_object(line.strip(), parsers)


def _json_object(line, parsers):
    try:
        values = strict_json.parse(line, **parsers)
    except json.JSONDecodeError as error:
        return RowError(f"not JSON: {error.msg} at character {error.pos + 1}")
    except ValueError as error:
        return RowError(f"not JSON: {error}")
    if not isinstance(values, dict):
        return RowError(f"expected a JSON object, received a {type(values).__name__}")
    return values


def _surrogate_at(text):
    # A fast path: most lines are ASCII.
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
