"""Jobs that write one shard per task, in processes of this machine or on a cluster.

Workers write a shard and then its entry file, .NAME.json. On a cluster they read the input and
write the shards themselves, so all machines need access to the input and output paths.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import io
import logging
import multiprocessing.connection
import os
import shlex
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system.command import check_bounds, flag
from bert_tf.system.processes import count_processors

# Writes the shard of a task, and its entry file. It is called with the values of the task and
# returns the entry.
WriteTask = Callable[..., Any]
# Imports TensorFlow and returns a `WriteTask`. It is pickled, and each worker calls it once.
OpenWriter = Callable[[], WriteTask]
OnEntry = Callable[[Mapping[str, Any]], None]
Make = Callable[[Iterable[tuple], OnEntry], None]
# Runs in this process. Beam's default runner would download a program first.
_DEFAULT_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
SECONDS_BETWEEN_LISTINGS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """Flags of commands that write shards: where their workers run; UserErrors name the flag."""

    num_workers: int | None = flag(
        "number of processes; default: one per processor, or one if predict or extract see a GPU",
        None,
        bounds={">=": 1},
    )
    runner: str = flag(
        "local: processes on this machine; beam: Apache Beam",
        "local",
        choices=("local", "beam"),
    )
    beam_args: str = flag("options of Apache Beam, as on its command line", "")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.beam_args and self.runner == "local":
            raise UserError(f"--beam_args={self.beam_args}: requires --runner=beam")
        if self.runner == "beam" and importlib.util.find_spec("apache_beam") is None:
            raise UserError(
                "--runner=beam: apache_beam is not installed; pip install 'bert_tf[beam]'"
            )

    @property
    def workers(self) -> int:
        """Maximum number of worker processes."""
        return self.num_workers or count_processors()


def run(
    settings: RunnerSettings, open_writer: OpenWriter, directory: str, num_tasks: int
) -> contextlib.AbstractContextManager[Make]:
    """Start workers for a block, to write `num_tasks` shards into a directory.

    Returns:
        Context manager of the function that writes the shards of an iterable of tasks. It passes
        the entry of each to its second argument, in order of completion.
    """
    if settings.runner == "local":
        return run_local(open_writer, directory, min(settings.workers, num_tasks))
    return run_on_beam(open_writer, directory, settings.beam_args)


@contextlib.contextmanager
def run_local(open_writer: OpenWriter, directory: str, num_workers: int) -> Iterator[Make]:
    """Start worker processes for the block. They end with this process, also if it is killed.

    Only they import TensorFlow, not their parent. They share the processors.

    Raises:
        UserError: If a worker was killed, or from a worker.
    """
    context = multiprocessing.get_context("spawn")
    end, sender = context.Pipe(duplex=False)
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        context,
        _start,
        (open_writer, max(1, count_processors() // num_workers), end),
    )
    try:
        # Wait for all workers, so that an error in their setup is raised before any task.
        for started in [pool.submit(_check_started) for _ in range(num_workers)]:
            started.result()

        def make(tasks, on_entry):
            for entry in _made(pool, tasks, at_once=2 * num_workers):
                on_entry(entry)

        yield make
    except concurrent.futures.BrokenExecutor:
        raise UserError(
            f"{directory}: a worker process was killed (if out of memory, use "
            "more shards or fewer --num_workers); rerun the command to resume"
        ) from None
    finally:
        # At this point all tasks are done or the command is being aborted. Nobody reads the
        # message, so all workers see it. The caller may have child processes of its own.
        sender.send(None)
        pool.shutdown(cancel_futures=True)


def _made(pool, tasks, at_once):
    """Yield the entries of tasks. Few are queued, since each lists all its documents."""
    waiting = set()
    for task in tasks:
        waiting.add(pool.submit(_work, *task))
        if len(waiting) >= at_once:
            done, waiting = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            yield from (future.result() for future in done)
    for future in concurrent.futures.as_completed(waiting):
        yield future.result()


_write = _user_error = None  # State of a worker process.


def _start(open_writer, num_threads, end):
    """Open the writer in this worker, which uses some of the processors, until `end` says so."""
    global _write, _user_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    threading.Thread(target=_exit_at, args=(end,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(num_threads)
    os.environ["TF_NUM_INTEROP_THREADS"] = "1"
    try:
        _write = open_writer()
    except UserError as error:  # The pool would only report that it is broken.
        _user_error = error


def _exit_at(end):
    # Without a message too if the parent is killed, since nobody else has the other end.
    multiprocessing.connection.wait([end])
    os._exit(1)


def _check_started():
    if _user_error is not None:
        raise _user_error


def _work(*task):
    return _write(*task)


@contextlib.contextmanager
def run_on_beam(open_writer: OpenWriter, directory: str, beam_args: str) -> Iterator[Make]:
    """Configure a Beam runner for the block.

    Raises:
        UserError: If `beam_args` is invalid or a task fails.
    """
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    from apache_beam.runners.runner import create_runner

    # It logs every failure four times; it is raised as well.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as captured:
            options = PipelineOptions(shlex.split(beam_args))
            standard = options.view_as(StandardOptions)
            standard.runner = standard.runner or _DEFAULT_RUNNER
            runner = create_runner(standard.runner)  # It may define options.
            known = options.get_all_options()
            given = options.get_all_options(retain_unknown_options=True)
    except (ValueError, ImportError, AttributeError, SystemExit) as error:
        lines = (captured.getvalue() or str(error)).strip().splitlines()
        raise UserError(f"--beam_args={beam_args}: {lines[-1]}") from None
    if unknown := sorted(given.keys() - known.keys()):
        warnings.warn(
            f"--beam_args={beam_args}: Beam has no option --{', --'.join(unknown)}; only a runner "
            "in another language may read it",
            stacklevel=2,
        )

    def make(tasks, on_entry):
        try:
            with (
                _entries_passed_to(on_entry, directory),
                beam.Pipeline(runner=runner, options=options) as pipeline,
            ):
                (
                    pipeline
                    | "Tasks" >> beam.Create(list(tasks))
                    | "Spread" >> beam.Reshuffle()
                    | "Write" >> beam.FlatMap(_write_element, uuid.uuid4().hex, open_writer)
                )
        except Exception as error:
            # Each runner wraps the exception of a worker, or of a signal, in its own way.
            cause: BaseException = error
            while cause.__cause__ or cause.__context__:
                cause = cause.__cause__ or cause.__context__
            if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                raise cause from None
            lines = [line for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
            reason = lines[-1].strip()
            raise UserError(f"--runner=beam: {reason}; rerun the command to resume") from error

    yield make


@contextlib.contextmanager
def _entries_passed_to(on_entry, directory):
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
                for entry in appeared(directory, known):
                    on_entry(entry)

    thread = threading.Thread(target=list_directory, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def appeared(directory: str, known: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the entries whose files are new in a directory, and add their names to `known`."""
    for name in files.listdir(directory):
        is_entry = name.startswith(".") and name.endswith(".json") and not files.is_temporary(name)
        if is_entry and name not in known:
            known.add(name)
            yield read_json_object(os.path.join(directory, name))


_lock = threading.Lock()
_opened: dict[str, WriteTask] = {}  # By command, the writer that is open in this process.


def _write_element(task, command, open_writer):
    """Write the shard of an element. The writer is opened once per process."""
    with _lock:  # Some runners have several threads.
        if command not in _opened:
            _opened.clear()
            _opened[command] = open_writer()
    _opened[command](*task)
    return ()
