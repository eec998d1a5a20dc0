"""Write shards in worker processes. Only these import TensorFlow, not their parent."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from bert_tf.command import import_tensorflow
from bert_tf.data.entries import ShardEntry
from bert_tf.data.settings import WriterArguments
from bert_tf.errors import UserError


@contextlib.contextmanager
def run_local(
    arguments: WriterArguments, num_tasks: int
) -> Iterator[Callable[[Iterable[tuple[int, list]]], Iterator[ShardEntry]]]:
    """Start worker processes for the block. They end with this process, also if it is killed.

    Args:
        arguments: Arguments of the `ShardWriter`; `settings.workers` is the maximum number of
            processes.
        num_tasks: Number of shards to write.

    Yields:
        Function that writes the shards of an iterable of tasks (shard number, spans). It yields
        their manifest entries in order of completion.

    Raises:
        UserError: If a worker was killed, or from a worker.
    """
    num_workers = min(arguments.settings.workers, num_tasks)
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        _start,
        arguments,
    )
    try:
        # Wait for all workers, so that an error in their setup is raised before any task.
        for started in [pool.submit(_check_started) for _ in range(num_workers)]:
            started.result()
        yield lambda tasks: _made(pool, tasks, at_once=2 * num_workers)
    except concurrent.futures.BrokenExecutor:
        raise UserError(
            f"{arguments.settings.output_dir}: a worker process was killed (if out of memory, use "
            "more shards or fewer --num_workers); rerun the command to resume"
        ) from None
    finally:
        # At this point all tasks are done or the command is being aborted.
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(cancel_futures=True)


def _made(pool, tasks, at_once):
    """Yield the results of tasks. Few are queued, since each lists all its documents."""
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


_writer = _user_error = None  # State of a worker process.


def _start(*arguments):
    """Build the `ShardWriter` of this worker, which uses one thread."""
    global _writer, _user_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    import_tensorflow()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from bert_tf.data.shards import ShardWriter

    try:
        _writer = ShardWriter(*arguments)
    except UserError as error:  # The pool would only report that it is broken.
        _user_error = error


def _end_with_parent():
    # A parent that is killed cannot stop its workers, so each of them watches the parent.
    multiprocessing.parent_process().join()
    os._exit(1)


def _check_started():
    if _user_error is not None:
        raise _user_error


def _work(number, spans):
    return _writer.write(number, spans)
