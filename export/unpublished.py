"""The folder in which a version is written, by a name that no server reads.

It is named after its process, which holds the directory of versions meanwhile.
"""

import contextlib
import os
import shutil

from bert_tf import ownership

PREFIX = ".writing-"  # And the number of the process.


@contextlib.contextmanager
def folder(output_dir, say):
    """An empty folder below `output_dir` for the block, after which it is gone, or has moved.

    Raises UserError where another process exports to the same directory. What killed ones left is
    removed, if the directory is known to be ours.
    """
    is_ours = ownership.is_ours(output_dir)
    with ownership.sole_writer(output_dir) as made:
        for path in made:
            os.chmod(path, 0o755)  # A server is another user.
        path = output_dir / f"{PREFIX}{os.getpid()}"
        if is_ours:
            _remove_abandoned(output_dir, path, say)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(output_dir, own, say):
    for path in sorted(output_dir.glob(f"{PREFIX}*")):
        number = path.name.removeprefix(PREFIX)
        # Where the file system has no locks, another process may be at work.
        if number.isdecimal() and path.is_dir() and (path == own or not _lives(int(number))):
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
