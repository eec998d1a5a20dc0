"""Number of processors of this process."""

import os


def count() -> int:
    """Return the number of processors that this process may use, at least 1.

    On macOS, which binds no process to processors, all those of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
