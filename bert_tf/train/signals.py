"""Ctrl-C and SIGTERM, deferred until the training loop has saved a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class Interrupted(KeyboardInterrupt):
    """Raised after the loop was asked to stop and has saved a checkpoint.

    Args:
        message: Where it stopped and how to resume.
        signum: Number of the signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


@contextlib.contextmanager
def defer_signals() -> Iterator[Callable[[], int | None]]:
    """Record SIGINT and SIGTERM instead of handling them.

    Outside of the main thread Python receives no signals, so none is recorded.

    Yields:
        Function that returns the number of the first signal received, or `None`.
    """
    arrived: list[int] = []
    with _handled_by(lambda signum, frame: arrived.append(signum)):
        yield lambda: arrived[0] if arrived else None


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once, and restore their handlers after the block.

    Python's own handlers do not run while C++ code blocks the main thread. A strategy of several
    workers also replaces that of SIGTERM, which then has no effect.
    """
    with _handled_by(signal.SIG_DFL):
        yield


@contextlib.contextmanager
def _handled_by(handler):
    """Handle SIGINT and SIGTERM by `handler`."""
    # signal.signal raises an error outside of the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)
