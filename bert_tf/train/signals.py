"""Ctrl-C and SIGTERM, held back until the loop has saved."""

import contextlib
import signal
import threading


class Interrupted(KeyboardInterrupt):
    """The loop was asked to stop and has saved; the message says where, and how to go on."""

    def __init__(self, message, signum):
        super().__init__(message)
        self.signum = signum


@contextlib.contextmanager
def defer_signals():
    """Yields a function that tells which signal came since, its number or None.

    Outside of the main thread, where Python takes no signals, none ever does.
    """
    arrived = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {
        signum: signal.signal(signum, lambda signum, frame: arrived.append(signum))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: arrived[0] if arrived else None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
