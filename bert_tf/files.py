"""Files that are there whole or not at all."""

import os
import pathlib


def sync(path):
    """Asks the disk to have a file or folder before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path, text):
    """Writes a text file so that a reader sees the old content or the new, never a part."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
