"""Locks: one writing process per directory or output file.

DIR/.bert_tf.lock   Exists while a process writes to the directory; contains its host and PID.
.NAME.lock          The same for an output file, next to it.

The operating system releases the lock when the process ends, also if it is killed. Remote and some
network file systems have no locks.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from bert_tf.errors import UserError
from bert_tf.storage import files

LOCK = ".bert_tf.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # Of the file system.


@contextlib.contextmanager
def sole_writer(directory: str | os.PathLike) -> Iterator[list[str]]:
    """Create and lock a directory for the block. Yield the directories that were created.

    After an error, those that are empty are removed again.

    Raises:
        UserError: If another process holds the lock.
    """
    made = files.makedirs(directory)
    try:
        with _locked(os.path.join(directory, LOCK), directory):
            yield made
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


@contextlib.contextmanager
def sole_output(path: str | os.PathLike, overwrite: bool = False) -> Iterator[None]:
    """Lock an output file or directory for the block, which writes it under a temporary name.

    Raises:
        UserError: If the file exists and `overwrite` is False, or if another process writes it.
    """
    directory, name = os.path.split(path)
    with _locked(os.path.join(directory, f".{name}.lock"), path):
        if files.exists(path) and not overwrite:
            raise UserError(f"{path}: already exists; name another file, or pass --overwrite")
        yield


@contextlib.contextmanager
def _locked(path, target):
    """Hold the lock file `path` of `target` for the block, if its file system has locks."""
    if files.is_remote(path):
        yield
        return
    import filelock  # It takes as long as the rest of the imports of a command.

    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"{target}: in use by another process{_owner(path)}; wait for it, or stop it"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, str(path)) from None
    absolute = os.path.abspath(target)
    try:
        if lock.is_locked:
            files.locked.add(absolute)
            with contextlib.suppress(OSError), open(path, "w") as stream:  # A disk may be full.
                stream.write(f"{os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        files.locked.discard(absolute)
        with contextlib.suppress(OSError):
            os.remove(path)  # While it is held: later, it may be held by another process.
        lock.release()


def _owner(path):
    """Return PID and host in a lock file in parentheses, if it has them."""
    with contextlib.suppress(OSError), open(path, errors="replace") as stream:
        if owner := stream.read(1000):
            return f" (PID {owner})"
    return ""
