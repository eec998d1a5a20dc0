"""Variables of the environment that TensorFlow and Keras read when they are imported."""

import contextlib
import os
import platform
import re
from collections.abc import Iterator

from bert_tf.system.processes import count_processors, processor_quotas

# Of the driver of NVIDIA's GPUs, on Linux and in WSL2, which has no such device.
_DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def set_defaults() -> None:
    """Set the variables that the environment does not have.

    This has no effect on a TensorFlow that was imported before.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # TensorFlow takes all memory of all GPUs otherwise, also for a process that exports or
    # tokenizes.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if platform.machine() == "x86_64" and not _has_driver():
        # TensorFlow's default on AVX2 is its own products, which are slower and take more memory.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if processor_quotas():
        # TensorFlow starts a thread per processor that the process is bound to, whatever its quota.
        for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            os.environ.setdefault(name, str(count_processors()))


def has_visible_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that the environment does not hide."""
    # CUDA hides the GPUs from the first entry on that names none, such as "-1" or "NoDevFiles".
    is_visible = re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get(_VISIBLE, "0")) is not None
    return is_visible and _has_driver()


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Hide all GPUs from a TensorFlow that is imported in the block; it never sees them."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = "-1"
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if before is not None:
            os.environ[_VISIBLE] = before


def _has_driver():
    return any(map(os.path.exists, _DRIVER_FILES))
