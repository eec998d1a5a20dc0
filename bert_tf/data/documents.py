"""Documents of any amount of text: found once, hashed and dealt, then read where they lie.

Pass 1 goes through every file line by line and keeps, for each document, a hash of its content and
where it lies: 36 bytes, whatever its size. It needs no TensorFlow. Pass 2 reads documents by seek.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import math
import os
import zlib
from array import array
from typing import NamedTuple

import numpy as np

from bert_tf import files, strict_json
from bert_tf.errors import UserError

FORMATS = ("lines", "text", "jsonl")
MAX_LINE_BYTES = 1 << 20
MAX_JSON_LINE_BYTES = 64 << 20
# gzip makes text 3 to 10 times as small, and at most 1,032 times. What unpacks to more than this is
# no text, and would fill the disk it is unpacked to.
MAX_EXPANSION = 100
FREE_EXPANSION_BYTES = 4 << 20  # A small file may hold anything.


class DocumentSpan(NamedTuple):
    """A document as pass 1 finds it: 16 bytes of hash, and where in its file it lies."""

    digest: bytes
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
    """All documents in an order that only their content decides.

    paths: the files, or for gzip what they were unpacked to. digests uint64 [D, 2], sorted; files
    int32 [D], numbers into paths; offsets, lengths int64 [D].
    """

    paths: tuple[str, ...]
    digests: np.ndarray
    files: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def __len__(self):
        return len(self.files)

    @property
    def sha256(self):
        """Of all documents' content: equal for equal text, however it is spread over files."""
        return hashlib.sha256(self.digests.tobytes()).hexdigest()


def find_files(patterns, but_in=None):
    """The sorted paths that globs match, each file once, none that lies in the folder `but_in`.

    Raises UserError where a glob matches nothing.
    """
    paths = {}
    for pattern in patterns:
        matches = files.glob_files(pattern)
        if not matches:
            is_directory = not files.is_remote(pattern) and os.path.isdir(pattern)
            what = f"is a folder; {pattern}/* are its files" if is_directory else "no such file"
            raise UserError(f"--input={pattern}: {what}")
        for path in matches:
            real_path = path if files.is_remote(path) else os.path.realpath(path)
            if but_in is None or not real_path.startswith(os.path.join(but_in, "")):
                paths.setdefault(real_path, path)
    if not paths:
        raise UserError(f"--input={','.join(patterns)}: no file but those of {but_in}")
    return sorted(paths.values())


def lines(path, max_bytes=MAX_LINE_BYTES):
    """(offset, bytes, text) of each line of a file, plain or gzip, split at "\\n" only.

    Raises UserError naming the line where one is too long or no UTF-8, and where gzip unpacks to
    over MAX_EXPANSION times its size.
    """
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(files.open_file(path))
        packed, next_check = stream, math.inf
        if path.endswith(".gz"):
            stream = stack.enter_context(gzip.GzipFile(fileobj=packed))
            next_check = FREE_EXPANSION_BYTES
        if not isinstance(stream, io.BufferedReader):
            stream = stack.enter_context(io.BufferedReader(stream, 1 << 20))
        offset = number = 0
        while True:
            try:
                line = stream.readline(max_bytes + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(f"{path}: damaged gzip file ({error})") from None
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            if not line:
                return
            number += 1
            if offset >= next_check:
                if offset > FREE_EXPANSION_BYTES + MAX_EXPANSION * packed.tell():
                    raise UserError(
                        f"{path}: unpacks to over {MAX_EXPANSION} times its size at line {number}, "
                        "which is no text; take it out, or unpack it yourself"
                    )
                next_check = offset + (1 << 20)
            if len(line) > max_bytes and not line.endswith(b"\n"):
                raise UserError(
                    f"{path}: line {number} is longer than {max_bytes} bytes; wanted a sentence or "
                    "a paragraph a line; break the text into lines"
                )
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not UTF-8 at byte {offset + error.start} of the "
                    "file; convert it (iconv -f LATIN1 -t UTF-8) or take the line out"
                ) from None
            yield offset, line, text
            offset += len(line)


def spans(path, input_format, text_field="text", copy_to=None):
    """The documents of a file, as DocumentSpans.

    "lines" are separated by blank lines; "text" is a document a file; "jsonl" a document a line,
    an object whose `text_field` is a string. Documents without text are left out. What is read goes
    to the stream `copy_to` if there is one.
    """
    max_bytes = MAX_JSON_LINE_BYTES if input_format == "jsonl" else MAX_LINE_BYTES
    content, begin, end = _Content(), 0, 0
    for number, (offset, line, text) in enumerate(lines(path, max_bytes), start=1):
        if copy_to is not None:
            copy_to.write(line)
        text = text.strip()
        if input_format == "jsonl":
            content = _Content()
            if text:
                text = json_text(text, text_field, f"{path}: line {number}")
                for part in text.split("\n"):
                    content.add(part.strip())
            if content.has_text:
                yield DocumentSpan(content.digest(), offset, len(line))
        elif text or input_format == "text":
            begin = begin if content.has_text else offset
            content.add(text)
            end = offset + len(line) if text else end
        elif content.has_text:
            yield DocumentSpan(content.digest(), begin, end - begin)
            content = _Content()
    if input_format != "jsonl" and content.has_text:
        yield DocumentSpan(content.digest(), begin, end - begin)


def json_text(line, text_field, where):
    """The text of a JSON line. Raises UserError naming the line if it has none."""
    try:
        text = strict_json.parse(line)[text_field]
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    except (KeyError, TypeError):
        raise UserError(f"{where}: wanted an object with the key {text_field!r}") from None
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_field!r} is {repr(text)[:40]}, wanted a string")
    text = text.encode("utf-8", "ignore").decode()  # Half a surrogate pair is valid JSON, no text.
    if any(len(part) > MAX_LINE_BYTES for part in text.split("\n")):
        raise UserError(
            f"{where}: {text_field!r} has a line of over {MAX_LINE_BYTES} characters; break it "
            "into paragraphs"
        )
    return text


def index(paths, input_format, text_field, spill_dir):
    """Pass 1 -> DocumentIndex. gzip files are unpacked into `spill_dir`, to be read by seek.

    Ordered by (hash, path, offset); the hash has 128 bits, so that equal hashes are equal content.
    Raises UserError where there is no document at all.
    """
    # Arrays, not tuples: a corpus may have many million documents.
    digests, owners, offsets, lengths = bytearray(), array("i"), array("q"), array("q")
    local_paths = []
    for number, path in enumerate(paths):
        local_path, copy = path, contextlib.nullcontext()
        if path.endswith(".gz"):
            files.makedirs(spill_dir)
            local_path = os.path.join(spill_dir, f"{number}")
            copy = files.open_file(local_path, "wb")
        local_paths.append(local_path)
        try:
            with copy as copy_to:
                for span in spans(path, input_format, text_field, copy_to):
                    digests += span.digest
                    owners.append(number)
                    offsets.append(span.offset)
                    lengths.append(span.length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or local_path) from None
    if not owners:
        raise UserError(f"--input: no text in {len(paths)} files, the first is {paths[0]}")
    digests = np.frombuffer(digests, ">u8").reshape(-1, 2).astype(np.uint64)
    owners, offsets, lengths = (np.array(column) for column in (owners, offsets, lengths))
    # `paths` are sorted: a file's number is its path's rank.
    order = np.lexsort((offsets, owners, digests[:, 1], digests[:, 0]))
    return DocumentIndex(
        tuple(local_paths), digests[order], owners[order], offsets[order], lengths[order]
    )


def read(path, offset, length, input_format, text_field="text"):
    """Pass 2: the lines of a document, stripped, as strings; "" between paragraphs."""
    with files.open_file(path) as stream:
        stream.seek(offset)
        data = stream.read(length)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None or len(data) != length:
        raise UserError(f"{path}: was changed while it was read; give the command again")
    if input_format == "jsonl":
        text = json_text(text, text_field, f"{path}: at byte {offset}")
    return [line.strip() for line in text.split("\n")]


class _Content:
    """Hashes a document line by line; line ends, blanks and how many lines are blank do not count.

    That there are blank lines does: they separate paragraphs.
    """

    def __init__(self):
        self._hash = hashlib.blake2b(digest_size=16)
        self.has_text = self._follows_blank = False

    def add(self, line):
        """Takes a line, stripped."""
        if line:
            self._hash.update(b"\n" * self._follows_blank + line.encode() + b"\n")
            self.has_text = True
        self._follows_blank = self.has_text and not line

    def digest(self):
        return self._hash.digest()
