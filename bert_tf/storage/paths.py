"""Checks of the paths in flags, made before any work and without TensorFlow.

Remote paths (gs://, s3://, hdfs:// and others) are either rejected here or checked later, when
TensorFlow is imported.
"""

import os
from collections.abc import Iterable
from typing import Any

from bert_tf.errors import UserError
from bert_tf.storage import files


def path_argument(name: str, value: Any, expected: str = "a directory") -> str:
    """Return an argument of the Python API as a path; raise `UserError` if it is none, or empty."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:  # pathlib takes "" for the working directory.
        raise UserError(f"{name}: expected {expected}, received {value!r:.80}")
    return path


def check_local(flag: str, path: str) -> None:
    """Raise `UserError` if the path of a flag is remote."""
    if files.is_remote(path):
        raise UserError(
            f"--{flag}={path}: expected a local path; copy the files to or from this machine"
        )


def check_published(flag: str, path: str) -> None:
    """Raise `UserError` unless model servers can read SavedModels in the path of a flag."""
    check_local(flag, path)
    if files.has_pattern(path):
        raise UserError(
            f"--{flag}={path}: expected a path without * ? [ and \\, since TensorFlow takes the "
            "path of a SavedModel for a pattern; name another directory"
        )


def check_local_file(flag: str, path: str) -> None:
    """Raise `UserError` unless the path of a flag is an existing local file."""
    check_local(flag, path)
    files.check_is_file(path, f"--{flag}={path}")


def check_output(path: str, inputs: Iterable[str], overwrite: bool = False) -> None:
    """Raise UserError unless a command may write its file of --output.

    Args:
        path: The file of --output.
        inputs: Files and directories that the command reads. They are never replaced.
        overwrite: Whether another existing file may be replaced.
    """
    for source in inputs:
        if _is_in(path, source):
            raise UserError(
                f"--output={path}: is part of the input {source}; name another --output"
            )
    if files.is_remote(path):
        return
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"--output={path}: expected a file in an existing directory")
    if os.path.lexists(path) and not overwrite:
        raise UserError(
            f"--output={path}: already exists; name another --output, or pass --overwrite"
        )


def _is_in(path, source):
    """Return True if an existing file is `source`, also by a link, or is inside it."""
    if files.is_remote(path) or files.is_remote(source):
        return f"{path}/".startswith(f"{str(source).rstrip('/')}/")
    if not os.path.lexists(path):
        return False
    inner, outer = os.path.realpath(path), os.path.realpath(source)
    is_same = os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source)
    return is_same or inner.startswith(os.path.join(outer, ""))
