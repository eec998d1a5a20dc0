"""Marker and lock files: one writing process per directory or output file.

DIR/.bert_tf.lock   Created before any other file. Nothing is deleted in a directory without it.
                    A process that writes there holds a lock on it and writes its host and PID.
.NAME.lock          The same for an output file, next to it, while it is being written.

The operating system releases the lock when the process ends, also if it is killed. Remote and some
network file systems have no locks: only the file is written there.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator

from bert_tf.errors import UserError
from bert_tf.storage import files

MARKER = ".bert_tf.lock"


def is_marked(directory: str | os.PathLike) -> bool:
    """Return True if a directory has the marker of bert_tf, which created it."""
    return files.exists(os.path.join(directory, MARKER))


@contextlib.contextmanager
def sole_writer(directory: str | os.PathLike) -> Iterator[tuple[list[str], bool]]:
    """Create, mark and lock a directory for the block.

    Yield the created directories, and whether the lock is held, which some file systems lack. After
    an error, a directory that is still empty is removed again if it was created here.

    Raises:
        UserError: If another process holds the lock.
    """
    was_marked, made = is_marked(directory), files.makedirs(directory)
    marker = os.path.join(directory, MARKER)
    try:
        with _held(marker, directory) as is_locked:
            try:
                yield made, is_locked
            except BaseException:
                if not was_marked and files.listdir(directory) == [MARKER]:
                    files.remove(marker)
                raise
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


@contextlib.contextmanager
def sole_output(path: str | os.PathLike, overwrite: bool = False) -> Iterator[None]:
    """Lock an output file or directory for the block, which writes it under a temporary name.

    What killed processes left under such names is removed.

    Raises:
        UserError: If the file exists and `overwrite` is False, or if another process writes it.
    """
    directory, name = os.path.split(path)
    lock = os.path.join(directory, f".{name}.lock")
    with _held(lock, path) as is_locked:
        try:
            for found in files.listdir(directory or ".") if is_locked else ():
                if files.is_temporary(found, of=name):
                    left = os.path.join(directory, found)
                    shutil.rmtree(left) if os.path.isdir(left) else os.remove(left)
            if files.exists(path) and not overwrite:
                raise UserError(f"{path}: already exists; name another file, or pass --overwrite")
            yield
        finally:
            if not files.is_remote(path):
                files.remove(lock)


@contextlib.contextmanager
def _held(path, what):
    """Hold the lock file `path` of `what` for the block. Yield whether it is locked."""
    if files.is_remote(path):
        if os.path.basename(path) == MARKER:
            files.atomic_write_bytes(path, _owner())
        yield False
        return
    descriptor, is_locked = _locked(path, what)
    try:
        yield is_locked
    finally:
        _name(descriptor, b"")
        os.close(descriptor)


def _locked(path, what):
    """Return the descriptor of a lock file, and whether it is locked."""
    while True:
        try:
            descriptor = _opened(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(what)) from None
        try:
            is_locked = _lock(descriptor, what)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    _name(descriptor, _owner())
                    return descriptor, is_locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # Another process removed the file after this one opened it.


def _opened(path):
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        if not os.path.exists(path):
            raise
        return os.open(path, os.O_RDONLY)  # Owned by another user, or on a read-only disk.


def _name(descriptor, owner):
    """Write the owner if possible: the lock holds also if the disk is full or read-only."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)


def _lock(descriptor, what):
    """Lock a file. Return False if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        host, _, pid = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").partition(" ")
        owner = f" (PID {pid.strip()} on {host})" if pid else ""
        raise UserError(
            f"{what}: in use by another process{owner}; wait for it, or stop it"
        ) from None
    except OSError:
        return False


def _owner():
    return f"{socket.gethostname()} {os.getpid()}\n".encode()
