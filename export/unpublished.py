"""The folder in which a version is written, by a name that no server reads.

It is named after its process, and locked while that lives: processes of several containers that
share a directory may have the same number.
"""

import contextlib
import fcntl
import os
import shutil

from bert_tf.errors import UserError

PREFIX = ".writing-"  # And the number of the process.


@contextlib.contextmanager
def folder(output_dir):
    """An empty folder below `output_dir` for the block, after which it is gone, or has moved.

    Raises UserError where another process holds the one of our number.
    """
    path = output_dir / f"{PREFIX}{os.getpid()}"
    if path.exists() and not _is_free(path):
        raise UserError(f"{path}: another export is at work there; try again")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        with _locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(output_dir, say):
    """Removes what killed exports have left, and nothing of one that is at work."""
    for path in sorted(output_dir.glob(f"{PREFIX}*")):
        number = path.name.removeprefix(PREFIX)
        if number.isdecimal() and path.is_dir() and not _lives(int(number)) and _is_free(path):
            shutil.rmtree(path, ignore_errors=True)
            say(f"{path}: removed, left by an export that was killed")


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # Another user's, or no number that we know of.
    return True


def _is_free(path):
    try:
        with _locked(path):
            return True
    except BlockingIOError:
        return False


@contextlib.contextmanager
def _locked(path):
    """Holds the lock of a folder. BlockingIOError if another process does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # Some network file systems lock no folders; the process number has to do.
        yield
    finally:
        os.close(descriptor)
