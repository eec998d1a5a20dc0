"""File operations on local and remote paths, with atomic writes.

Remote paths contain "://" (gs://, s3://, hdfs:// and others that `tf.io.gfile` supports).
TensorFlow is imported only for these. All errors of files are raised as `OSError`.
"""

import codecs
import contextlib
import errno
import glob
import gzip
import hashlib
import io
import json
import os
import pathlib
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from bert_tf.errors import UserError, tensorflow_reason

Stream = BinaryIO | io.RawIOBase  # Binary streams. Only remote ones are unbuffered.
TEMPORARY = ".writing-"  # Start of temporary names.
# Absolute paths of the directories and output files that this process has locked; see ownership.py.
locked: set[str] = set()


def sync(path: str | os.PathLike) -> None:
    """Flush a local file or directory to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory, and need not.
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not (is_directory and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def atomic_write_json(path: str | os.PathLike, values: Any) -> None:
    """Write a readable JSON file atomically, in UTF-8."""
    atomic_write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically: readers see the old content or the new."""
    with atomic_writer(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike) -> Iterator[codecs.StreamWriter]:
    """Open a UTF-8 text stream whose content replaces the file `path` at the end of the block.

    After an error the file is unchanged.
    """
    with atomic_bytes_writer(path) as stream:
        yield codecs.getwriter("utf-8")(stream)


@contextlib.contextmanager
def atomic_bytes_writer(path: str | os.PathLike) -> Iterator[Stream]:
    """Open a binary stream whose content replaces the file `path`; see `atomic_path`."""
    with atomic_path(path) as temporary, open_file(temporary, "wb") as stream:
        yield stream


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[str]:
    """Yield the path of a new file that replaces the file `path` at the end of the block.

    After an error the file is unchanged. An `OSError` of the temporary file names `path`.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        move(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        # Errors of files that are read have the names of those files; see `open_file`.
        if isinstance(error, OSError) and str(error.filename or temporary) == temporary:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextlib.contextmanager
def staging_directory(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a new local directory with the temporary name of `path`, to which the block renames it.

    It replaces what a killed process left. It is removed at the end of the block, if it is there.
    """
    temporary = pathlib.Path(temporary_name(path))
    remove_tree(temporary)
    makedirs(temporary)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_name(path: str | os.PathLike) -> str:
    """Return the hidden path under which a file or directory is written before it is renamed.

    It is the same for each process that has locked `path` or a directory above it, so that a rerun
    replaces what a killed process left. Without a lock, it contains host and PID.
    """
    directory, name = os.path.split(path)
    absolute = os.path.join(os.path.abspath(path), "")
    # A copy, since other threads may lock.
    is_locked = any(absolute.startswith(os.path.join(of, "")) for of in tuple(locked))
    owner = "" if is_locked else f"{socket.gethostname()}-{os.getpid()}-"
    return os.path.join(directory, f"{TEMPORARY}{owner}{name}")


def is_temporary(name: str) -> bool:
    """Return True if `name` is from `temporary_name`."""
    return name.startswith(TEMPORARY)


def move(temporary: str | os.PathLike, path: str | os.PathLike) -> None:
    """Flush a file to disk and rename it, replacing an existing file."""
    if is_remote(path):
        _remote("rename", temporary, path, overwrite=True)
    else:
        # The content has to be on disk before the name, and the name before this returns:
        # otherwise a power failure could leave an empty or a missing file.
        sync(temporary)
        os.replace(temporary, path)
        sync(os.path.dirname(path) or ".")


def open_file(path: str | os.PathLike, mode: Literal["rb", "wb", "ab"] = "rb") -> Stream:
    """Open a binary stream, whose errors name the file."""
    if is_remote(path):
        return _RemoteFile(path, mode)
    raw = _LocalFile(path, mode)
    return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)


def atomic_write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new."""
    with atomic_bytes_writer(path) as stream:
        stream.write(content)


def read_text(path: str | os.PathLike, stream: Stream | None = None) -> str:
    """Return the content of a UTF-8 text file without a byte order mark, with LF as line end.

    `stream` holds the bytes of the file; by default it is opened.

    Raises:
        UnicodeDecodeError: If it is not UTF-8. Positions do not count a byte order mark.
        UserError: If a gzip file is damaged.
    """
    with TextFile(path, stream=stream) as text:
        return text.readall().decode("utf-8").replace("\r\n", "\n")


class TextFile(io.RawIOBase):
    """The bytes of a text file, plain or .gz, as all readers of text see them.

    A byte order mark is no part of the text. CR is read as LF in a file where it ends all lines, as
    some spreadsheets write them: where the first `HEAD_BYTES` have CR, but neither LF nor CR LF.

    Args:
        path: Local or remote path.
        keep_cr: Leave CR in place, for a reader that knows where it ends a line.
        stream: The bytes of the file; by default it is opened.
    """

    HEAD_BYTES = 1 << 18

    def __init__(
        self, path: str | os.PathLike, keep_cr: bool = False, stream: Stream | None = None
    ) -> None:
        self.path, self._keeps_cr = str(path), keep_cr
        self._packed = stream or open_file(path)
        self._is_gzip = self.path.endswith(".gz")
        self._stream = gzip.GzipFile(fileobj=self._packed) if self._is_gzip else self._packed
        self._head: bytes | None = None

    @property
    def is_verbatim(self) -> bool:
        """Whether the bytes are those of the file, at the same offsets."""
        self._read_head()
        return not (self._is_gzip or self._has_mark or self._has_cr)

    @property
    def packed_bytes(self) -> int:
        """Number of bytes that were read from the file, before decompression."""
        return self._packed.tell()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to `len(buffer)` bytes and return their number; see `io.RawIOBase`."""
        self._read_head()
        data = self._head or self._read(len(buffer))
        data, self._head = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(data)] = data.replace(b"\r", b"\n") if self._has_cr else data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._packed.close()
        super().close()

    def _read_head(self):
        if self._head is not None:
            return
        head = self._read(self.HEAD_BYTES)
        self._has_mark = head.startswith(codecs.BOM_UTF8)
        self._head = head.removeprefix(codecs.BOM_UTF8)
        # After a last CR, the LF may follow.
        self._has_cr = not self._keeps_cr and b"\r" in self._head[:-1] and b"\n" not in self._head

    def _read(self, size):
        try:
            return self._stream.read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{self.path}: damaged gzip file ({error})") from None


def exists(path: str | os.PathLike) -> bool:
    """Return True if a file or directory exists; any error but its absence is raised."""
    return _found(path) is not None


def size(path: str | os.PathLike) -> int | None:
    """Return the size of a file in bytes, or `None` if it does not exist."""
    found = _found(path)
    return found and found[1]


def listdir(directory: str | os.PathLike) -> list[str]:
    """Return the sorted names in a directory, or an empty list if it does not exist."""
    if not exists(directory):
        return []
    listed = _remote("listdir", directory) if is_remote(directory) else os.listdir(directory)
    return sorted(name.rstrip("/") for name in listed)


def glob_files(pattern: str) -> list[str]:
    """Return the files that match a glob pattern, in any order; "**" matches directories.

    What exists is meant literally: the path itself, and the directory that a pattern starts with.
    """
    if is_remote(pattern):
        found = [pattern] if exists(pattern) else _remote("glob", pattern)
        return [path for path in found if not isdir(path)]
    literal = pattern
    while not os.path.lexists(literal) and literal != os.path.dirname(literal):
        literal = os.path.dirname(literal)
    escaped = glob.escape(literal) + pattern[len(literal) :]
    return [path for path in glob.glob(escaped, recursive=True) if os.path.isfile(path)]


def has_pattern(path: str | os.PathLike) -> bool:
    """Return True if TensorFlow would take a path for a glob pattern."""
    return any(character in str(path) for character in "*?[\\")


@contextlib.contextmanager
def without_pattern(path: str | os.PathLike) -> Iterator[str]:
    """Yield another path of a checkpoint or SavedModel if its own would be a glob pattern.

    TensorFlow looks for checkpoints by pattern, also in a SavedModel, so that it does not find the
    files in "runs [v1]". For the block, a temporary directory has a link to each file whose path
    starts with `path`. A remote path is unchanged.
    """
    if is_remote(path) or not has_pattern(path):
        yield str(path)
        return
    directory, start = os.path.split(os.path.abspath(path))
    with tempfile.TemporaryDirectory() as links:
        for name in listdir(directory):
            if name.startswith(start):
                link = os.path.join(links, f"link{name.removeprefix(start)}")
                os.symlink(os.path.join(directory, name), link)
        yield os.path.join(links, "link")


def isdir(path: str | os.PathLike) -> bool:
    """Return True if `path` is an existing directory; any error but its absence is raised."""
    found = _found(path)
    return found is not None and found[0]


def makedirs(path: str | os.PathLike) -> list[str]:
    """Create a directory and its parents. Return those that were missing, innermost first.

    For remote paths the result is empty.
    """
    if is_remote(path):
        _remote("makedirs", path)
        return []
    made, above = [], os.path.abspath(path)
    while not exists(above):
        made.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for directory in made:
        sync(os.path.dirname(directory))  # Otherwise a crash could lose the new directory.
    return made


def sync_directory(path: str | os.PathLike) -> None:
    """Flush a local directory and the files in it to disk."""
    if not is_remote(path):
        for name in os.listdir(path):
            sync(os.path.join(path, name))
        sync(path)


def remove(path: str | os.PathLike) -> None:
    """Delete a file."""
    _remote("remove", path) if is_remote(path) else os.remove(path)


def remove_tree(path: str | os.PathLike) -> None:
    """Delete a directory and all that is in it, if it exists; of a link, only the link."""
    if os.path.islink(path):
        os.remove(path)
    elif exists(path):
        _remote("rmtree", path) if is_remote(path) else shutil.rmtree(path)


def rename_directory(path: str | os.PathLike, target: str | os.PathLike) -> None:
    """Rename a directory; a remote one file by file, in the order of their names.

    Raises:
        OSError: If `target` is a file, or a directory that is not empty.
    """
    if not is_remote(path):
        try:
            os.rename(path, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        sync(os.path.dirname(os.path.abspath(target)))
        return
    makedirs(target)
    for name in listdir(path):
        move(os.path.join(path, name), os.path.join(target, name))
    remove_tree(path)


def stamp(path: str | os.PathLike) -> tuple[int, int]:
    """Return size in bytes and modification time in ns, to detect changes to a file."""
    return _status(path)[1:]


def _status(path: str | os.PathLike) -> tuple[bool, int, int]:
    """Return whether a path is a directory, its size in bytes and its modification time in ns."""
    if is_remote(path):
        remote = _remote("stat", path)
        return remote.is_directory, remote.length, remote.mtime_nsec
    local = os.stat(path)
    return stat.S_ISDIR(local.st_mode), local.st_size, local.st_mtime_ns


def _found(path):
    """Return `_status`, or `None` if nothing is there.

    Other errors are raised: a file system that fails for a moment has lost nothing, and what is
    taken for absent may be overwritten.
    """
    try:
        return _status(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def sha256(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with open_file(path) as stream:
        # Both kinds of streams can be read into a buffer.
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def check_is_file(path: str | os.PathLike, location: str) -> None:
    """Raise UserError, which names `location`, unless a local path is a regular file."""
    if os.path.isfile(path):
        return
    found = "no such file"
    if os.path.isdir(path):
        found = "expected a file, received a directory"
    elif os.path.exists(path):  # A file may be read several times.
        found = "expected a file, received a pipe or a device; write its content to a file"
    raise UserError(f"{location}: {found}")


def is_remote(path: str | os.PathLike) -> bool:
    """Return True for paths that only TensorFlow can access, such as gs://bucket/file."""
    return "://" in str(path)


def _remote(function, path, *arguments, **options):
    """Call a function of `tf.io.gfile`, raising `OSError` as local file operations do.

    Raise UserError if TensorFlow has no file system for the path.
    """
    import tensorflow as tf

    known = [scheme for scheme in tf.io.gfile.get_registered_schemes() if scheme]
    if str(path).partition("://")[0] not in known:
        raise UserError(
            f"{path}: expected a local path, or one of the file systems of TensorFlow here "
            f"({', '.join(f'{scheme}://' for scheme in sorted(known))}); download the files first"
        )
    return _called(path, getattr(tf.io.gfile, function), path, *arguments, **options)


def _called(path, function, *arguments, **options):
    """Return the result of a call, raising `OSError` for errors of a TensorFlow file system."""
    import tensorflow as tf

    try:
        return function(*arguments, **options)
    except tf.errors.OpError as error:
        number = {
            tf.errors.NotFoundError: errno.ENOENT,
            tf.errors.PermissionDeniedError: errno.EACCES,
            tf.errors.ResourceExhaustedError: errno.ENOSPC,
            tf.errors.OutOfRangeError: errno.EFBIG,
        }.get(type(error), errno.EIO)
        raise OSError(number, tensorflow_reason(error), str(path)) from None


class _LocalFile(io.FileIO):
    """A local file. Other than Python's, errors of reading and writing have its name."""

    def readinto(self, buffer):
        return self._named(super().readinto, buffer)

    def readall(self):
        return self._named(super().readall)

    def write(self, data):
        return self._named(super().write, data)

    def _named(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.name)) from None


class _RemoteFile(io.RawIOBase):
    """A `tf.io.gfile.GFile` as a raw Python stream."""

    def __init__(self, path, mode):
        self._path = path
        self._file = _remote("GFile", path, mode)

    def readable(self):
        return True

    def writable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        self._do(self._file.seek, offset, whence)
        return self.tell()

    def tell(self):
        return self._do(self._file.tell)

    def readinto(self, buffer):
        data = self._do(self._file.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data):
        self._do(self._file.write, bytes(data))
        return len(data)

    def close(self):
        if not self.closed:
            self._do(self._file.close)
        super().close()

    def _do(self, function, *arguments):
        return _called(self._path, function, *arguments)
