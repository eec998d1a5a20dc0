"""Rows of data files with their line numbers: .csv, .tsv, .jsonl, each also as .gz, and .parquet.

A reader yields an `Example` per row. For a row that cannot be used it yields a `BadRow` and
continues; a `UserError` stops it.
A line ends at LF or CR LF, in .csv and in files without LF also at CR. A byte order mark is
ignored. An empty line of .csv or .tsv has no fields: if a text is the only column, it is an empty
text, so that rows keep the order of lines; otherwise, and in .jsonl, it is not a row.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json

# In characters. Longer lines come from missing line ends or an unclosed quote.
MAX_LINE_LENGTH = 2**27
BUFFER_BYTES = 1 << 16
PARQUET_ROWS_AT_ONCE = 4096
MAX_CHOICES = 2**12  # Texts of a question or query, which is copied for each: bounds the memory.

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, slots=True)
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


@dataclasses.dataclass(frozen=True, slots=True)
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


def not_empty(items: Iterable[_Item], file: DataFile, what: str = "row") -> Iterator[_Item]:
    """Yield the items of a file; raises UserError if there is none."""
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise UserError(f"{file}: expected at least one {what}, received none")


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
    """A local file of rows, whose bytes may be in memory as `content`."""

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
    """Check that a source is a local file with one of some suffixes, such as ".csv"; return it.

    Raises:
        UserError: If it is remote or missing, or has another suffix or a path that is not UTF-8.
    """
    if not isinstance(source, DataFile):
        if files.is_remote(source):
            raise UserError(f"{source}: expected a local file; copy it to this machine")
        source = DataFile(source)
        files.check_is_file(source.path, str(source))
        if _surrogate_at(str(source)) is not None:  # Runs and manifests record the path.
            raise UserError(f"{str(source)!r:.200}: expected a path in UTF-8; rename it")
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
        self._error: UserError | None = None

    def __str__(self) -> str:
        return self.path

    def __iter__(self) -> Iterator[Example | BadRow]:
        yield from self._read_rows
        if self._error:  # Otherwise the rows before it would seem to be all.
            raise self._error
        try:
            for row in self._other_rows:
                self._read_rows.append(row)
                yield row
        except UserError as error:
            self._error = error
            raise


def _iterated(read, file):
    """Yield the rows of a reader. At the end, the generator releases the bytes of the file."""
    yield from read(file)


def as_label(text: str) -> str:
    """Normalize a label, in files as in flags: strip surrounding white space."""
    return text.strip()


def quoted(names: Iterable[object]) -> str:
    """Return names for a message, quoted so that white space in them is visible."""
    return f"{', '.join(map(repr, names)):.200}"


def check_text(text: Any, what: str) -> None:
    """Check that a value is a text without NUL and lone surrogates, which no tokenizer accepts.

    Raises:
        RowError: If it is not. The message begins with `what`, such as "column 'text'".
    """
    if not isinstance(text, str):
        raise RowError(f"{what}: expected text, received {text!r:.80}")
    if "\0" in text:
        raise RowError(f"{what}: expected text, received a NUL character")
    if _surrogate_at(text) is not None:
        raise RowError(f"{what}: expected text, received half of a surrogate pair")


def check_texts(texts: Mapping[str, Any]) -> None:
    """Check texts by what messages call them, as `check_text` does; none may be empty."""
    for what, text in texts.items():
        check_text(text, what)
        if not text.strip():
            raise RowError(f"{what}: expected text, received an empty string")


def read_lines(file: DataFile, newline: str = "\n") -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line with its end) of a UTF-8 file; `newline` as in `open`.

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
    suspects = [of[:1] in (" ", "\t") and of.lstrip(" \t").startswith('"') for of in fields]
    if not any(suspects):
        return None
    row, position = "".join(lines), 0
    for field, is_suspect in zip(fields, suspects, strict=True):
        is_quoted = row.startswith('"', position)
        if is_suspect and not is_quoted:
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
    """Yield (line number, object or `RowError`) of JSON lines; `parsers` as in `json.loads`."""
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
            for batch in table.iter_batches(PARQUET_ROWS_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield number, {name: _as_text(value) for name, value in values.items()}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: expected a Parquet file ({reason})") from None


def import_pyarrow(path: object) -> Any:
    """Return the module pyarrow; raises UserError if it is not installed, which `path` requires."""
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
    """Write rows of JSON types as a Parquet file, which `path` names in messages.

    All rows are kept in memory. A column that a row lacks is null.

    Args:
        stream: Binary stream that receives the file.
        path: Its path, for messages.
        rows: The rows.
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


def read_rows(
    source: Source,
    columns: Sequence[str],
    lists: Collection[str] = (),
    optional: Sequence[str] = (),
    nullable: Collection[str] = (),
    make: Callable[[dict[str, Any], str], Example] | None = None,
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file.

    If a .csv or .tsv has one column only, a blank line is an empty text; otherwise it is not a row.

    Args:
        source: .csv, .tsv or .jsonl, also compressed (.csv.gz), or .parquet.
        columns: Columns to read, as strings. Numbers of .jsonl are kept as they are written there
            ("1.50").
        lists: Those of `columns` that may be a list of strings or a boolean in .jsonl and .parquet.
        optional: Further columns, read if the file or the JSON object has them.
        nullable: Those of `columns` whose null is an empty text.
        make: Callable from ({column: string or list of strings}, location), which may raise
            `RowError`. By default, the columns are the texts of an example.

    Yields:
        An `Example`, or a `BadRow` for a row that cannot be used.

    Raises:
        UserError: If the file is missing, empty, not UTF-8 or has another suffix, if its header
            lacks a column, or if its last quote is not closed.
    """
    file = data_file(source, SUFFIXES)

    def example(values, location):
        present = [column for column in optional if values.get(column) is not None]
        row = {}
        for column in (*columns, *present):
            if column not in values:
                raise RowError(no_column(column, values))
            value = "" if values[column] is None and column in nullable else values[column]
            if column in lists and isinstance(value, list):
                value = texts = list(map(_as_text, value))  # Those of Parquet may be numbers.
            else:
                value = str(value) if column in lists and isinstance(value, bool) else value
                texts = [value]
            if column in lists and not all(isinstance(text, str) for text in texts):
                raise RowError(
                    f"column {column!r}: expected text or a list of texts, received {value!r:.80}"
                )
            for text in texts:
                check_text(text, f"column {column!r}")
            row[column] = value
        return make(row, location) if make else Example(row, None, location)

    for number, row in not_empty(named_rows(file, columns), file):
        yield good_or_bad(f"{file}:{number}", row, example)


# Of a column of 0 and 1.
_BITS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}


def hot_columns(label_column: str, multi_label: bool) -> tuple[str, ...]:
    """Return the columns of 0 and 1 of each label, if `label_column` names several, else ()."""
    columns = tuple(map(as_label, label_column.split(",")))
    return columns if multi_label and len(columns) > 1 else ()


def text_names(count: int) -> tuple[str, ...]:
    """Return the names of the inputs of a text, or of two."""
    return ("text",) if count == 1 else ("text_a", "text_b")


def read_texts(
    source: Source,
    labelled: bool = True,
    *,
    text_columns: Sequence[str] = ("text",),
    label_column: str | None = None,
    multi_label: bool = False,
    needs_label: bool = True,
    **others: Any,
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file with a text or pair in named columns.

    Args:
        source: The file.
        labelled: Whether to read labels.
        text_columns: Columns of the texts, one or two.
        label_column: Column of the label; by default "label". With `multi_label`, several columns
            joined by commas have 0 or 1 each.
        multi_label: Whether a label may be a list of strings.
        needs_label: Whether the file must have the column of the label.
        **others: Other values of a task.json, which are ignored.
    """
    names, label = text_names(len(text_columns)), label_column or "label"
    hot = hot_columns(label, multi_label)
    labels = (hot or (label,)) if labelled else ()

    def label_of(values):
        for column in hot:
            if str(values[column]) not in _BITS:
                raise RowError(
                    f"column {column!r}: expected 0 or 1, received {values[column]!r:.80}"
                )
        return [name for name in hot if _BITS[str(values[name])]] if hot else values.get(label)

    def example(values, location):
        texts = {name: values[column] for name, column in zip(names, text_columns, strict=True)}
        return Example(texts, label_of(values) if labelled else None, location)

    return read_rows(
        source,
        (*text_columns, *(labels if needs_label else ())),
        lists=labels if multi_label else (),
        optional=() if needs_label else labels,
        make=example,
    )


def read_texts_with_optional_labels(
    source: Source, labelled: bool = True, *, label_column: str | None = None, **task: Any
) -> Iterator[Example | BadRow]:
    """Yield what `read_texts` does; only a `label_column` that is given has to exist."""
    needs_label = label_column is not None
    return read_texts(source, labelled, label_column=label_column, needs_label=needs_label, **task)


def _header_of(file):
    """Return the column names of a .csv or .tsv file, [] if it is empty."""
    for _, fields in _TABLES[file.suffix](file):
        if fields:
            return [] if isinstance(fields, RowError) else fields
    return []


def has_columns(file: DataFile, names: Iterable[str]) -> bool:
    """Return whether a file has named columns; a .tsv file has them if its header has `names`."""
    return file.suffix in (".csv", ".jsonl", ".parquet") or (
        file.suffix == ".tsv" and set(names) <= set(_header_of(file))
    )


def named_rows(
    file: DataFile, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Yield (line number, {column: value} or `RowError`) of a file.

    The header of a .csv or .tsv file must have the `columns`.
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
