"""Variables of the environment that TensorFlow and Keras read when they are imported."""

import os
import platform

NVIDIA_DEVICE = "/dev/nvidiactl"  # Of the driver of NVIDIA's GPUs.


def set_defaults() -> None:
    """Set the variables that the environment does not have.

    This has no effect on a TensorFlow that was imported before.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # TensorFlow takes all memory of all GPUs otherwise, also for a process that exports or
    # tokenizes.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if platform.machine() == "x86_64" and not os.path.exists(NVIDIA_DEVICE):
        # TensorFlow's default on AVX2 is its own products, which are slower and take more memory.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
