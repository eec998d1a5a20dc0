"""What the path in a flag has to be, looked at before any work. No TensorFlow.

A remote path (gs://, s3://, hdfs://, whatever TensorFlow reaches) is either refused here, or looked
for once TensorFlow is there.
"""

import os

from bert_tf import files
from bert_tf.errors import UserError


def check_local(flag, path):
    """Raises UserError for a remote path."""
    if files.is_remote(path):
        raise UserError(
            f"--{flag}={path}: wanted a path of this machine; copy between there and here"
        )


def check_local_file(flag, path):
    """Raises UserError where there is no such file on this machine."""
    check_local(flag, path)
    if not os.path.isfile(path):
        raise UserError(f"--{flag}={path}: no such file")


def check_output(path, inputs, overwrite=False):
    """Raises UserError unless a command that reads `inputs` may write a file at --output=`path`.

    It replaces a file only with `overwrite`, and never one that is, or lies in, one of `inputs`.
    """
    for source in inputs:
        if _is_in(path, source):
            raise UserError(
                f"--output={path}: is input, or part of it ({source}); name another --output"
            )
    if files.is_remote(path):
        return
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UserError(f"--output={path}: wanted a file in a folder that is there")
    if os.path.lexists(path) and not overwrite:
        raise UserError(
            f"--output={path}: is there already; name another --output, or give --overwrite"
        )


def _is_in(path, source):
    """True if a file that is there is `source`, under whatever name, or lies in it."""
    if files.is_remote(path) or files.is_remote(source):
        return f"{path}/".startswith(f"{str(source).rstrip('/')}/")
    if not os.path.lexists(path):
        return False
    inner, outer = os.path.realpath(path), os.path.realpath(source)
    is_same = os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source)
    return is_same or inner.startswith(os.path.join(outer, ""))
