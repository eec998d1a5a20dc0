"""Write shards in worker processes. Only these import TensorFlow, not their parent."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

from bert_tf.data.shard_jobs import Make, ShardJob
from bert_tf.errors import UserError
from bert_tf.system import cpus
from bert_tf.system.command import import_tensorflow


@contextlib.contextmanager
def run_local(job: ShardJob, num_workers: int) -> Iterator[Make]:
    """Start worker processes for the block. They end with this process, also if it is killed.

    Args:
        job: The job.
        num_workers: Number of processes, which share the processors.

    Yields:
        Function that writes the shards of an iterable of tasks.

    Raises:
        UserError: If a worker was killed, or from a worker.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        _start,
        (job, max(1, cpus.count() // num_workers)),
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
            f"{job.directory}: a worker process was killed (if out of memory, use "
            "more shards or fewer --num_workers); rerun the command to resume"
        ) from None
    finally:
        # At this point all tasks are done or the command is being aborted.
        for child in multiprocessing.active_children():
            child.kill()
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


def _start(job, num_threads):
    """Open the job in this worker, which uses some of the processors."""
    global _write, _user_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Text is prepared on processors.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(num_threads)
    os.environ["TF_NUM_INTEROP_THREADS"] = "1"
    try:
        import_tensorflow()
        _write = job.open()
    except UserError as error:  # The pool would only report that it is broken.
        _user_error = error


def _end_with_parent():
    # A parent that is killed cannot stop its workers, so each of them watches the parent.
    multiprocessing.parent_process().join()
    os._exit(1)


def _check_started():
    if _user_error is not None:
        raise _user_error


def _work(*task):
    return _write(*task)
