"""Files that worker 0 writes and the other workers read, on storage that may show them late.

A network file system caches names: a file of another machine may be missing, short or old for up
to a minute. Only worker 0 lists a run directory and decides what is read. The others wait until
they see the same files.
"""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.runs.run import FILES, Run
from bert_tf.storage import files
from bert_tf.train.distribution import barrier, from_chief, is_chief, is_multi_worker

SECONDS_TO_WAIT = 120.0  # NFS caches the absence of a name for up to 60 s by default.
_SECONDS_BETWEEN_LOOKS = 0.5
_FIRST_BYTES = 1 << 20


def open_run(
    strategy: tf.distribute.Strategy, path: str | os.PathLike, log: Callable[[str], None]
) -> Run:
    """Open a run that worker 0 sees, in all workers; only worker 0 writes to it.

    Raises:
        UserError: If it is not a run, or `wait_for_files` fails.
    """
    wait_for_files(strategy, path, FILES, log)
    return Run.open(path, is_writer=is_chief(strategy))


def wait_for_files(
    strategy: tf.distribute.Strategy,
    directory: str | os.PathLike,
    names: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Wait in all workers until each sees the files as worker 0 does, or sees that one is missing.

    Sizes and the first MiB are compared. Worker 0 does not return before all others have seen the
    files, so it may then replace them.

    Args:
        strategy: Distribution strategy. Without other workers nothing is compared.
        directory: The directory.
        names: Names in the directory, the same ones in all workers.
        log: Receives two lines per file that is waited for, in the worker that waits.

    Raises:
        UserError: If this worker does not see a file within `SECONDS_TO_WAIT`.
    """
    if not is_multi_worker(strategy):
        return
    for path in (os.path.join(directory, name) for name in names):
        expected = from_chief(strategy, functools.partial(_fingerprint, path))
        if not is_chief(strategy):
            _wait(path, expected, f"worker {strategy.cluster_resolver.task_id}", log)
    barrier(strategy)


def _wait(path, expected, worker, log):
    """Return once the fingerprint of a file is the expected one."""
    start, is_logged = time.monotonic(), False
    while _fingerprint(path) != expected:
        if not is_logged:
            limit = f"{SECONDS_TO_WAIT:.0f} s"
            log(f"{worker}: waiting for {path} as worker 0 sees it, {limit} at most")
            is_logged = True
        seconds = time.monotonic() - start
        if seconds > SECONDS_TO_WAIT:
            there = "is not the same here" if files.exists(path) else "does not exist here"
            raise UserError(
                f"{worker}: {path}: worker 0 sees this file, which {there} after {seconds:.0f} s; "
                "expected one --output_dir for all workers, on shared storage"
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if is_logged:
        log(f"{worker}: {path} has arrived after {time.monotonic() - start:.1f} s")


def _fingerprint(path):
    """Return 48 bits of a hash of size and first bytes, 1 for a directory, 0 if nothing is seen."""
    try:
        if files.isdir(path):
            return 1
        with files.open_file(path) as stream:
            content = f"{files.size(path)} ".encode() + stream.read(_FIRST_BYTES)
    except OSError:  # Missing, or being replaced.
        return 0
    return int(hashlib.sha256(content).hexdigest()[:12], 16)
