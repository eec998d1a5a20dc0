"""Index and read the documents of a corpus of any size.

Pass 1 reads every file in blocks of lines and keeps 36 bytes per document: a hash of its content,
and its file, offset and length. For local paths it does not import TensorFlow. Pass 2 reads
documents by seek.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json
from bert_tf.text import unicode_tables

FORMATS = ("lines", "text", "jsonl")
MAX_LINE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
MAX_JSON_LINE_BYTES = 64 << 20
# gzip compresses text by a factor of 3 to 10, and anything by at most 1,032. A file beyond this
# limit is not text and could fill the disk.
MAX_EXPANSION = 100
FREE_EXPANSION_BYTES = 4 << 20  # The limit does not apply to small files.


class DocumentSpan(NamedTuple):
    """A document: 16-byte hash of its content, and offset and length in its file in bytes."""

    digest: bytes
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
    """The D documents of a corpus, in an order that depends only on their content."""

    inputs: tuple[str, ...]  # The files.
    # The same files, or copies of those that are not read as they are, such as gzip files.
    paths: tuple[str, ...]
    digests: np.ndarray  # uint64 `(D, 2)`, sorted hashes of the content.
    files: np.ndarray  # int32 `(D,)`, indices into `inputs` and `paths`.
    offsets: np.ndarray  # int64 `(D,)`, in bytes.
    lengths: np.ndarray  # int64 `(D,)`, in bytes.

    def __len__(self) -> int:
        return len(self.files)

    @property
    def sha256(self) -> str:
        """SHA-256 of the content of all documents, however they are distributed over files."""
        return hashlib.sha256(self.digests.tobytes()).hexdigest()


def find_files(patterns: Iterable[str], but_in: str | None = None) -> list[str]:
    """Return the sorted paths that match glob patterns, each file once, but those in `but_in`.

    Raises:
        UserError: If a pattern matches no file.
    """
    paths: dict[str, str] = {}
    for pattern in patterns:
        matches = files.glob_files(pattern)
        if not matches:
            is_directory = not files.is_remote(pattern) and os.path.isdir(pattern)
            what = (
                f"is a directory; use {pattern}/* for its files" if is_directory else "no such file"
            )
            raise UserError(f"--input={pattern}: {what}")
        for path in matches:
            real_path = path if files.is_remote(path) else os.path.realpath(path)
            if but_in is None or not real_path.startswith(os.path.join(but_in, "")):
                paths.setdefault(real_path, path)
    if not paths:
        raise UserError(f"--input={','.join(patterns)}: no files other than those in {but_in}")
    return sorted(paths.values())


def lines(
    stream: files.TextFile, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes, str]]:
    """Read a file line by line. Only LF ends a line, if the file has any.

    Yields:
        Offset in bytes (after decompression), the line as bytes with its LF, and as text.

    Raises:
        UserError: See `_blocks`.
    """
    for offset, data, text in _blocks(stream, max_bytes):
        # `splitlines` would end lines at other characters, too.
        for line, text_line in zip(io.BytesIO(data), text.split("\n"), strict=False):
            yield offset, line, text_line
            offset += len(line)


def _blocks(stream: files.TextFile, max_bytes: int) -> Iterator[tuple[int, bytes, str]]:
    """Read a file in blocks of whole lines of at most `max_bytes`.

    Yields:
        Offset in bytes of the stream, the block as bytes, and as text.

    Raises:
        UserError: If a line is too long or not UTF-8, or if a gzip file expands to more than
            `MAX_EXPANSION` times its size.
    """
    path = stream.path
    # Number of the current line, and what was read of it.
    offset, number, rest = 0, 1, b""
    while True:
        data = stream.read(min(BUFFER_BYTES, max_bytes)) or b""
        # Only the first line can be too long: each of the others is shorter than `data`.
        if len(rest) + len(data.partition(b"\n")[0]) > max_bytes:
            raise UserError(
                f"{path}: line {number} is longer than {max_bytes} bytes; expected one "
                "sentence or paragraph per line"
            )
        if data and b"\n" not in data:
            rest += data
            continue
        # At the end of the file, the block is a last line without LF, or empty.
        cut = data.rfind(b"\n") + 1
        block, rest = rest + data[:cut], data[cut:]
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            number += block.count(b"\n", 0, error.start)
            raise UserError(
                f"{path}: line {number} is not UTF-8 at byte {offset + error.start} of the "
                "file; convert it (iconv -f LATIN1 -t UTF-8) or remove the line"
            ) from None
        if block:
            yield offset, block, text
        if not data:
            return
        offset += len(block)
        number += block.count(b"\n")
        if offset > FREE_EXPANSION_BYTES + MAX_EXPANSION * stream.packed_bytes:
            raise UserError(
                f"{path}: expands to over {MAX_EXPANSION} times its size at line {number}; "
                "expected text; remove it, or decompress it"
            )


def spans(
    stream: files.TextFile, input_format: str, text_field: str, copy_to: files.Stream | None = None
) -> Iterator[DocumentSpan]:
    """Find the documents of a file. Those without text are skipped.

    Args:
        stream: UTF-8 file, plain or gzip.
        input_format: "lines", documents separated by blank lines; "texts", one document per line;
            "text", one per file; or "jsonl", one object per line with a string in `text_field`.
        text_field: Key of the text in "jsonl".
        copy_to: Stream that the file is also written to.

    Raises:
        UserError: See `_blocks` and `json_text`.
    """
    if input_format == "jsonl":
        yield from _json_spans(stream, text_field, copy_to)
        return
    content, begin, end = _Content(), 0, 0
    for offset, data, text in _blocks(stream, MAX_LINE_BYTES):
        if copy_to is not None:
            copy_to.write(data)
        sizes = map(len, io.BytesIO(data))  # Of the lines with their LF.
        # Line i is at offsets[i] to offsets[i + 1].
        offsets = list(itertools.accumulate(sizes, initial=offset))
        # `splitlines` would end lines at other characters, too.
        stripped = [line.strip() for line in text.removesuffix("\n").split("\n")]
        if input_format == "texts":
            for line, begin, end in zip(stripped, offsets, offsets[1:], strict=False):
                if _has_text(line):
                    of_line = _Content()
                    of_line.add([line])
                    yield DocumentSpan(of_line.digest(), begin, end - begin)
            continue
        first = 0
        for last in [number for number, line in enumerate(stripped) if not line] + [len(stripped)]:
            numbers = [number for number in range(first, last) if _has_text(stripped[number])]
            if numbers:
                begin = begin if content.has_text else offsets[numbers[0]]
                content.add(stripped[number] for number in numbers)
                end = offsets[numbers[-1] + 1]
            if last < len(stripped):  # A blank line.
                content.end_paragraph()
                if input_format == "lines" and content.has_text:
                    yield DocumentSpan(content.digest(), begin, end - begin)
                    content = _Content()
            first = last + 1
    if content.has_text:
        yield DocumentSpan(content.digest(), begin, end - begin)


def _json_spans(stream, text_field, copy_to):
    found = lines(stream, MAX_JSON_LINE_BYTES)
    for number, (offset, line, text) in enumerate(found, start=1):
        if copy_to is not None:
            copy_to.write(line)
        if not text.strip():
            continue
        content = _Content()
        text = json_text(text, text_field, f"{stream.path}: line {number}")
        for part in map(str.strip, text.split("\n")):
            if _has_text(part):
                content.add([part])
            elif not part:
                content.end_paragraph()
        if content.has_text:
            yield DocumentSpan(content.digest(), offset, len(line))


def _has_text(line):
    """Return whether a stripped line has a character that the tokenizer keeps."""
    # The first character of most lines decides, without a table.
    return bool(line) and ("!" <= line[0] <= "~" or unicode_tables.has_text(line))


def json_text(line: str, text_field: str, where: str) -> str:
    """Return the text in a line of JSON, an object with the key `text_field`.

    White space around the object is ignored.

    Raises:
        UserError: If the line is not such an object, or the text has too long lines. The message
            begins with `where`, the file and the line.
    """
    try:
        text = strict_json.parse(line.strip())[text_field]
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    except (KeyError, TypeError):
        raise UserError(f"{where}: expected an object with the key {text_field!r}") from None
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field!r} is {repr(text)[:40]}; expected a string")
    text = text.encode("utf-8", "ignore").decode()  # Half a surrogate pair is valid JSON.
    if any(len(part) > MAX_LINE_BYTES for part in text.split("\n")):
        raise UserError(
            f"{where}: {text_field!r} has a line of over {MAX_LINE_BYTES} characters; expected "
            "one paragraph per line"
        )
    return text


def index(
    paths: Sequence[str], input_format: str, text_field: str, spill_dir: str
) -> DocumentIndex:
    """Index the documents of a corpus (pass 1).

    They are ordered by hash, path and offset. The hash has 128 bits, so that documents with equal
    hashes can be assumed to have equal content.

    `paths` are sorted. `spill_dir` is for copies of files that are not read as they are, such as
    gzip files: they are read by seek later. The format is as in `spans`.

    Raises:
        UserError: If there is no document, or a file cannot be used.
    """
    # Arrays instead of tuples save memory: a corpus may have many millions of documents.
    hashes, numbers, begins, sizes = bytearray(), array("i"), array("q"), array("q")
    local_paths = []
    for number, path in enumerate(paths):
        local_path = path
        copy_to: files.Stream | None = None
        try:
            with contextlib.ExitStack() as stack:
                stream = stack.enter_context(files.TextFile(path))
                if not stream.is_verbatim:
                    files.makedirs(spill_dir)
                    local_path = os.path.join(spill_dir, f"{number}")
                    copy_to = files.open_file(local_path, "wb")
                    stack.enter_context(copy_to)
                for span in spans(stream, input_format, text_field, copy_to):
                    hashes += span.digest
                    numbers.append(number)
                    begins.append(span.offset)
                    sizes.append(span.length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or local_path) from None
        local_paths.append(local_path)
    if not numbers:
        raise UserError(f"--input: no text in {len(paths)} files, the first is {paths[0]}")
    digests = np.frombuffer(hashes, ">u8").reshape(-1, 2).astype(np.uint64)
    owners, offsets, lengths = (np.array(column) for column in (numbers, begins, sizes))
    # `paths` are sorted, so sorting by file number sorts by path.
    order = np.lexsort((offsets, owners, digests[:, 1], digests[:, 0]))
    return DocumentIndex(
        tuple(paths),
        tuple(local_paths),
        digests[order],
        owners[order],
        offsets[order],
        lengths[order],
    )


def read(
    path: str, offset: int, length: int, input_format: str, text_field: str = "text"
) -> list[str]:
    """Return the lines of a document (pass 2), stripped; empty strings separate paragraphs.

    `offset` and `length` are in bytes; the others are as in `spans`.

    Raises:
        UserError: If the file was changed.
    """
    with files.open_file(path) as stream:
        stream.seek(offset)
        data = stream.read(length)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None or len(data) != length:
        raise UserError(f"{path}: was changed while it was read; rerun the command")
    if input_format == "jsonl":
        text = json_text(text, text_field, f"{path}: at byte {offset}")
    return [line.strip() for line in text.split("\n")]


class _Content:
    """Hash of a document, updated paragraph by paragraph.

    It does not depend on line ends, surrounding blanks or the number of consecutive blank lines,
    but on the paragraphs, which blank lines separate.
    """

    def __init__(self):
        self._hash = hashlib.blake2b(digest_size=16)
        self.has_text = self._follows_blank = False

    def add(self, lines):
        """Add stripped lines of a paragraph, all of them with text."""
        if self._follows_blank:
            self._hash.update(b"\n")
        self._hash.update("\n".join([*lines, ""]).encode())
        self.has_text, self._follows_blank = True, False

    def end_paragraph(self):
        self._follows_blank = self.has_text

    def digest(self):
        return self._hash.digest()
