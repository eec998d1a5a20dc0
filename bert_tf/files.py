"""Files that are there whole or not at all, here or wherever tf.io.gfile reaches (gs://, ...).

TensorFlow is imported for paths with "://" only.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
import pathlib

from bert_tf.errors import UserError


def sync(path):
    """Asks the disk to have a file or folder before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path, text):
    """Writes a text file so that a reader sees the old content or the new, never a part."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    with open_file(temporary, "wb") as stream:
        stream.write(text.encode("utf-8"))
    move(temporary, path)


def move(temporary, path):
    """Gives a file that is written its name, once the disk has it."""
    if is_remote(path):
        _gfile().rename(temporary, path, overwrite=True)
    else:
        sync(temporary)
        os.replace(temporary, path)


def open_file(path, mode="rb"):
    """A binary stream."""
    return _gfile().GFile(path, mode) if is_remote(path) else open(path, mode)


def read_text(path):
    with open_file(path) as stream:
        return stream.read().decode("utf-8")


def exists(path):
    return _gfile().exists(path) if is_remote(path) else os.path.exists(path)


def size(path):
    """Bytes of a file; None where there is none."""
    if not exists(path):
        return None
    return _gfile().stat(path).length if is_remote(path) else os.path.getsize(path)


def names(folder):
    """The sorted names in a folder, [] where there is none."""
    if not exists(folder):
        return []
    listed = _gfile().listdir(folder) if is_remote(folder) else os.listdir(folder)
    return sorted(name.rstrip("/") for name in listed)


def matching(pattern):
    """The files that a glob matches."""
    if is_remote(pattern):
        return _gfile().glob(pattern)
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def make_folder(path):
    _gfile().makedirs(path) if is_remote(path) else os.makedirs(path, exist_ok=True)


def remove(path):
    _gfile().remove(path) if is_remote(path) else os.remove(path)


def sha256(path):
    digest = hashlib.sha256()
    with open_file(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def sole_user(folder):
    """Holds a folder of this machine for one process; UserError where another has it."""
    if is_remote(folder):
        yield
        return
    with open(pathlib.Path(folder) / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is at work there; wait for it, or stop it"
            ) from None
        yield


def is_remote(path):
    return "://" in str(path)


def _gfile():
    import tensorflow as tf

    return tf.io.gfile
