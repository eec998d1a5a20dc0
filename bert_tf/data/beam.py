"""Write shards with Apache Beam, on several machines.

Workers read the input and write the shards themselves, so all of them need access to the input and
output paths.
"""

import contextlib
import io
import logging
import os
import shlex
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.runner import create_runner

from bert_tf.data import entries
from bert_tf.data.shard_jobs import Make, OnEntry, ShardJob
from bert_tf.errors import UserError
from bert_tf.storage import files

# Runs in this process. Beam's default runner would download a program first.
DEFAULT_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
SECONDS_BETWEEN_LISTINGS = 2.0


@contextlib.contextmanager
def run_on_beam(job: ShardJob, beam_args: str, flag: str) -> Iterator[Make]:
    """Configure a Beam runner for the block.

    Args:
        job: The job.
        beam_args: Options of Beam, such as "--runner=FlinkRunner".
        flag: The flag that selects the runner, for error messages.

    Yields:
        Function that writes the shards of an iterable of tasks.

    Raises:
        UserError: If `beam_args` is invalid or a task fails.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()) as captured:
            options = PipelineOptions(shlex.split(beam_args))
            standard = options.view_as(StandardOptions)
            standard.runner = standard.runner or DEFAULT_RUNNER
            runner = create_runner(standard.runner)
    except (ValueError, ImportError, AttributeError, SystemExit) as error:
        lines = (captured.getvalue() or str(error)).strip().splitlines()
        raise UserError(f"--beam_args={beam_args}: {lines[-1]}") from None
    # They log every failure, Beam four times; it is raised as well.
    for name in ("apache_beam", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def make(tasks, on_entry):
        try:
            with (
                _entries_passed_to(on_entry, job.directory),
                beam.Pipeline(runner=runner, options=options) as pipeline,
            ):
                (
                    pipeline
                    | "Tasks" >> beam.Create(list(tasks))
                    | "Spread" >> beam.Reshuffle()
                    | "Write" >> beam.ParDo(_WriteShard(job))
                )
        except Exception as error:
            # Each runner wraps the exception of a worker, or of a signal, in its own way.
            cause = _innermost(error)
            if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                raise cause from None
            raise UserError(f"{flag}: {_last_line(cause)}; rerun the command to resume") from error

    yield make


@contextlib.contextmanager
def _entries_passed_to(on_entry: OnEntry, directory: str) -> Iterator[None]:
    """Pass the entries of shards that appear in the directory during the block to `on_entry`.

    Runners of Beam report no progress. The pipeline stays in the main thread, which receives the
    signals.
    """
    known, ended = set(files.listdir(directory)), threading.Event()

    def list_directory():
        is_last = False
        while not is_last:
            is_last = ended.wait(SECONDS_BETWEEN_LISTINGS)
            # The shards are listed again at the end, where errors are raised.
            with contextlib.suppress(UserError, OSError):
                for entry in entries.appeared(directory, known):
                    on_entry(entry)

    thread = threading.Thread(target=list_directory, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _innermost(error):
    """Return the innermost cause of an exception: the error of the worker."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


def _last_line(error):
    """Return the last nonblank line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1].strip()


_lock = threading.Lock()
_opened: dict[str, Callable[..., Any]] = {}  # By command, what its job opened in this process.


class _WriteShard(beam.DoFn):
    """Write one shard per element. The job is opened once per process."""

    def __init__(self, job):
        self._job, self._key = job, uuid.uuid4().hex

    def setup(self):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Workers share a machine; a GPU has one owner.
        # Some runners call this for each bundle, and in several threads.
        with _lock:
            if self._key not in _opened:
                _opened.clear()
                _opened[self._key] = self._job.open()
            self._write = _opened[self._key]

    def process(self, task):
        self._write(*task)
        return []
