"""Which process writes in a folder or to a file, and which folders are ours.

FOLDER/.bert_tf.lock   made before anything else; nothing is deleted in a folder without it. While
                       a process writes there it holds a lock on this file, which then names it
.NAME.lock             the same for an output file, beside it, as long as it is being written

The lock goes with its process, however that ends. Remote file systems have none, and some network
file systems refuse it: there only the file is written.
"""

import contextlib
import fcntl
import os
import socket

from bert_tf import files
from bert_tf.errors import UserError

MARKER = ".bert_tf.lock"


def is_ours(folder):
    """True for a folder that bert_tf has made."""
    return files.exists(os.path.join(folder, MARKER))


def mark(folder):
    """Makes a folder, if it is not there, and marks it as ours; returns the folders made."""
    made = files.make_folder(folder)
    if not is_ours(folder):
        files.write_bytes(os.path.join(folder, MARKER), b"")
    return made


@contextlib.contextmanager
def sole_writer(folder):
    """Makes, marks and holds a folder for the block; yields the folders made, innermost first.

    Raises UserError where another process holds it. After an error a folder in which nothing else
    has come to stand is as it was before.
    """
    was_ours, made = is_ours(folder), files.make_folder(folder)
    marker = os.path.join(folder, MARKER)
    try:
        with _held(marker, folder):
            try:
                yield made
            except BaseException:
                if not was_ours and files.names(folder) == [MARKER]:
                    files.remove(marker)
                raise
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


@contextlib.contextmanager
def sole_output(path, overwrite=False):
    """Holds the place of an output file for the block, which writes it by files.replacing.

    Raises UserError where there is a file already, unless `overwrite`, and where another process
    writes it. What a killed process left of it is removed.
    """
    folder, name = os.path.split(path)
    lock = os.path.join(folder, f".{name}.lock")
    with _held(lock, path) as is_locked:
        try:
            for left in files.names(folder or ".") if is_locked else ():
                if files.is_temporary(left, of=name):
                    files.remove(os.path.join(folder, left))
            if files.exists(path) and not overwrite:
                raise UserError(f"{path}: is there already; name another file, or give --overwrite")
            yield
        finally:
            if not files.is_remote(path):
                files.remove(lock)


@contextlib.contextmanager
def _held(path, what):
    """Holds the lock file `path` of `what` for the block; yields whether it is really locked."""
    if files.is_remote(path):
        if os.path.basename(path) == MARKER:
            files.write_bytes(path, _owner())
        yield False
        return
    descriptor, is_locked = _locked(path, what)
    try:
        yield is_locked
    finally:
        _name(descriptor, b"")
        os.close(descriptor)


def _locked(path, what):
    """(descriptor, whether it is locked) of a lock file that names this process."""
    while True:
        try:
            descriptor = _opened(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(what)) from None
        try:
            is_locked = _lock(descriptor, what)
            if _is_at(descriptor, path):
                _name(descriptor, _owner())
                return descriptor, is_locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # Its owner has just removed it.


def _opened(path):
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        if not os.path.exists(path):
            raise
        return os.open(path, os.O_RDONLY)  # Another user's, or on a disk that is read-only.


def _name(descriptor, owner):
    """Writes who holds a lock file. Held it is also without: of another user's, on a full disk."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)


def _lock(descriptor, what):
    """True if the file is locked, False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        host, _, pid = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").partition(" ")
        owner = f" (PID {pid.strip()} on {host})" if pid else ""
        raise UserError(
            f"{what}: another process is at work there{owner}; wait for it, or stop it"
        ) from None
    except OSError:
        return False


def _is_at(descriptor, path):
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _owner():
    return f"{socket.gethostname()} {os.getpid()}\n".encode()
