"""Files that are there whole or not at all, here or wherever tf.io.gfile reaches (gs://, ...).

TensorFlow is imported for paths with "://" only.
"""

import codecs
import contextlib
import errno
import glob
import hashlib
import io
import os
import re
import uuid


def sync(path):
    """Asks the disk to have a file or folder before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_text(path, text):
    """Writes a text file so that a reader sees the old content or the new, never a part."""
    with atomic_writer(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def atomic_writer(path):
    """A UTF-8 text stream, whose content comes to stand at `path` once the block is over.

    After an error nothing is there that was not before.
    """
    with atomic_bytes_writer(path) as stream:
        yield codecs.getwriter("utf-8")(stream)


@contextlib.contextmanager
def atomic_bytes_writer(path):
    """The same as a binary stream."""
    temporary = temporary_name(path)
    try:
        with open_file(temporary, "wb") as stream:
            yield stream
        move(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def temporary_name(path):
    """A name beside a path that no other process, on no other machine, takes too."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{uuid.uuid4().hex}")


def is_temporary(name, of=None):
    """True for names that temporary_name gives, of the file `of` or of any."""
    base = ".*" if of is None else re.escape(of)
    return re.fullmatch(rf"\.{base}\.[0-9a-f]{{32}}", name) is not None


def move(temporary, path):
    """Gives a file that is written its name, once the disk has it."""
    if is_remote(path):
        _remote("rename", temporary, path, overwrite=True)
    else:
        sync(temporary)
        os.replace(temporary, path)
        sync(os.path.dirname(path) or ".")


def open_file(path, mode="rb"):
    """A binary stream."""
    return _RemoteFile(path, mode) if is_remote(path) else open(path, mode)


def atomic_write_bytes(path, content):
    """Writes a file so that a reader sees the old content or the new, never a part."""
    with atomic_bytes_writer(path) as stream:
        stream.write(content)


def read_text(path):
    with open_file(path) as stream:
        return stream.read().decode("utf-8")


def exists(path):
    return _remote("exists", path) if is_remote(path) else os.path.exists(path)


def size(path):
    """Bytes of a file; None where there is none."""
    if not exists(path):
        return None
    return _remote("stat", path).length if is_remote(path) else os.path.getsize(path)


def listdir(directory):
    """The sorted names in a folder, [] where there is none."""
    if not exists(directory):
        return []
    listed = _remote("listdir", directory) if is_remote(directory) else os.listdir(directory)
    return sorted(name.rstrip("/") for name in listed)


def glob_files(pattern):
    """The files that a glob matches."""
    if is_remote(pattern):
        return [path for path in _remote("glob", pattern) if not _remote("isdir", path)]
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def isdir(path):
    return _remote("isdir", path) if is_remote(path) else os.path.isdir(path)


def makedirs(path):
    """Create a directory and its parents. Return those that were missing, innermost first."""
    if is_remote(path):
        _remote("makedirs", path)
        return []
    made, above = [], os.path.abspath(path)
    while not os.path.lexists(above):
        made.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for directory in made:
        sync(os.path.dirname(directory))  # Otherwise a crash could lose the new directory.
    return made


def sync_directory(path):
    """Asks the disk to have a folder and the files in it before we go on."""
    if not is_remote(path):
        for name in os.listdir(path):
            sync(os.path.join(path, name))
        sync(path)


def remove(path):
    _remote("remove", path) if is_remote(path) else os.remove(path)


def walk(directory):
    """Yield the relative paths of all files and, ending in "/", of all empty directories."""
    for name in listdir(directory):
        path = os.path.join(directory, name)
        if isdir(path) and not os.path.islink(path):
            for inner in list(walk(path)) or [""]:
                yield f"{name}/{inner}"
        else:
            yield name


def remove_own(directory, own):
    """Remove files by name, and the directories that become empty, `directory` included.

    Args:
        directory: The directory.
        own: Pattern of the relative paths to remove, as from `walk`. Everything else stays.
    """
    for path in list(walk(directory)):
        if own.fullmatch(path):
            if not path.endswith("/"):
                remove(os.path.join(directory, path))
            while path := os.path.dirname(path):
                remove_if_empty(os.path.join(directory, path))
    remove_if_empty(directory)


def remove_if_empty(directory):
    if isdir(directory) and not listdir(directory):
        _remote("rmtree", directory) if is_remote(directory) else os.rmdir(directory)


def stamp(path):
    """What changes when a file is written to: its size and time."""
    found = _remote("stat", path) if is_remote(path) else os.stat(path)
    return (
        (found.length, found.mtime_nsec) if is_remote(path) else (found.st_size, found.st_mtime_ns)
    )


def sha256(path):
    digest = hashlib.sha256()
    with open_file(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_remote(path):
    return "://" in str(path)


def _remote(function, path, *arguments, **options):
    """Calls a function of tf.io.gfile; what goes wrong is an OSError as elsewhere."""
    import tensorflow as tf

    try:
        return getattr(tf.io.gfile, function)(path, *arguments, **options)
    except tf.errors.OpError as error:
        raise os_error(error, path) from None


def os_error(error, path=None):
    """Return the OSError for an error of TensorFlow's file systems."""
    import tensorflow as tf

    number = {
        tf.errors.NotFoundError: errno.ENOENT,
        tf.errors.PermissionDeniedError: errno.EACCES,
        tf.errors.ResourceExhaustedError: errno.ENOSPC,
        tf.errors.OutOfRangeError: errno.EFBIG,
    }.get(type(error), errno.EIO)
    reason = (error.message or type(error).__name__).splitlines()[0].split(" [Op:")[0]
    return OSError(number, reason, path and str(path))


class _RemoteFile(io.RawIOBase):
    """A tf.io.gfile.GFile as a raw stream of Python's."""

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
        import tensorflow as tf

        try:
            return function(*arguments)
        except tf.errors.OpError as error:
            raise os_error(error, self._path) from None
