"""A process: its processors, and limits of TensorFlow in it (Keras, forks, calls in threads)."""

import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from bert_tf.errors import UserError

# Of cgroups in version 2 and 1, in the file system of a container: the time of all processors that
# it may use in a period, or no number, and the period.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def count_processors() -> int:
    """Return the number of processors that this process may use, at least 1.

    The quota of a container counts as processors, rounded up. On macOS, which binds no process to
    processors, all those of the machine.
    """
    is_bound = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if is_bound else os.cpu_count() or 1
    return min([count, *processor_quotas()])


def processor_quotas() -> list[int]:
    """Return the limits of a container to the time of processors, in processors, rounded up."""
    limits = []
    for paths in _QUOTAS:
        if all(map(os.path.exists, paths)):
            quota, period = "".join(map(_read, paths)).split()
            if quota.isdecimal():
                limits.append(math.ceil(int(quota) / int(period)))
    return limits


def _read(path):
    with open(path) as stream:
        return stream.read()


def check_backend() -> None:
    """Raise UserError if the environment asks for another Keras than that on TensorFlow."""
    keras = sys.modules.get("keras")
    backend = getattr(keras, "config", None)
    name = backend.backend() if backend else os.environ.get("KERAS_BACKEND", "tensorflow")
    if name != "tensorflow":
        raise UserError(
            f"KERAS_BACKEND={name}: expected tensorflow; set it before Keras is imported, or unset "
            "it"
        )
    # Read by TensorFlow; TF Text then imports the former Keras.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "")
    if legacy.lower() in ("1", "true") and importlib.util.find_spec("tf_keras") is None:
        raise UserError(
            f"TF_USE_LEGACY_KERAS={legacy}: requires tf_keras, which is not installed; unset it"
        )


def check_not_forked(process: int) -> None:
    """Raise UserError in a process that was forked from the one that a model was created in."""
    if os.getpid() != process:
        raise UserError(
            "the model was created before this process was forked, without TensorFlow's threads, "
            "so that it would hang; load the model here, or use multiprocessing's 'spawn'"
        )


class FirstCalls:
    """Lets one thread make the first call of a graph, for which the others wait.

    TensorFlow prepares a graph at its first call, in each of the threads that call it by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def call(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a graph, known by its name, returns for the arguments."""
        if name not in self._names:
            with self._lock:
                if name not in self._names:
                    result = function(*args, **kwargs)
                    self._names.add(name)
                    return result
        return function(*args, **kwargs)
