"""Staging directory in which a version is written, under a name that servers ignore.

Its name contains the PID of the process, which holds the lock of the directory of versions.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

from bert_tf.storage import ownership

PREFIX = ".writing-"  # Followed by the PID.


@contextlib.contextmanager
def staging_directory(
    output_dir: pathlib.Path, log: Callable[[str], None]
) -> Iterator[pathlib.Path]:
    """Create an empty directory in `output_dir` for the block, and remove it afterwards.

    Directories of killed exports are removed if `output_dir` has a marker.

    Args:
        output_dir: Directory of versions. It is created if it does not exist.
        log: Receives one line per removed directory.

    Yields:
        The staging directory.

    Raises:
        UserError: If another process exports to `output_dir`.
    """
    is_marked = ownership.is_marked(output_dir)
    with ownership.sole_writer(output_dir) as made:
        for directory in made:
            os.chmod(directory, 0o755)  # The server may run as another user.
        path = output_dir / f"{PREFIX}{os.getpid()}"
        if is_marked:
            _remove_abandoned(output_dir, path, log)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(output_dir, own, log):
    for path in sorted(output_dir.glob(f"{PREFIX}*")):
        number = path.name.removeprefix(PREFIX)
        # Without locks in the file system, another process may be writing there.
        is_pid = number.isascii() and number.isdecimal()
        if is_pid and path.is_dir() and (path == own or not _lives(int(number))):
            shutil.rmtree(path, ignore_errors=True)
            log(f"{path}: removed, left by a killed export")


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # Another user's process, or a number beyond the range of PIDs.
    return True
