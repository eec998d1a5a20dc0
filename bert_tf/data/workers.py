"""Shards on this machine: worker processes that import TensorFlow, for a parent that does not."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading

from bert_tf.command import import_tensorflow
from bert_tf.errors import UserError


@contextlib.contextmanager
def run_local(settings, vocabulary, tokenizer, plan_sha256, num_tasks):
    """Starts the workers; gives a function: tasks (number, spans) -> entries as they are made.

    However this process ends, the workers end too.
    """
    num_workers = min(settings.workers, num_tasks)
    pool = concurrent.futures.ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        _start,
        (settings, vocabulary, tokenizer, plan_sha256),
    )
    try:
        for started in [pool.submit(_check_started) for _ in range(num_workers)]:
            started.result()
        yield lambda tasks: _made(pool, tasks, at_once=2 * num_workers)
    except concurrent.futures.BrokenExecutor:
        raise UserError(
            f"{settings.output_dir}: a worker process was killed (too little memory? use more "
            "shards, or fewer --num_workers); the same command goes on"
        ) from None
    finally:
        # Nothing is left to do, or no more shall be done.
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(cancel_futures=True)


def _made(pool, tasks, at_once):
    """Few tasks wait, since each lists its documents."""
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


_writer = _user_error = None  # Of a worker process.


def _start(*arguments):
    """Makes this worker's ShardWriter, on one thread."""
    global _writer, _user_error
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    import_tensorflow()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from bert_tf.data.shards import ShardWriter

    try:
        _writer = ShardWriter(*arguments)
    except UserError as error:  # The pool would only say that it is broken.
        _user_error = error


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _check_started():
    if _user_error is not None:
        raise _user_error


def _work(number, spans):
    return _writer.write(number, spans)
