"""Jobs for workers, in a module of their own, since they import what it imports."""

import os
import signal
import sys

from bert_tf import UserError
from bert_tf.system.command import import_tensorflow

PACKAGES = ("keras", "matplotlib", "pandas", "scipy", "sklearn")


def open_writer():
    """Return a function that lists the packages that its worker has imported."""
    import_tensorflow()
    return lambda: [name for name in PACKAGES if name in sys.modules]


def open_environment():
    """Return a function that returns which GPUs the environment of its worker names."""
    return lambda: os.environ["CUDA_VISIBLE_DEVICES"]


def open_uneven():
    """Return a function that fails or never returns."""

    def write(fails):
        if fails:
            raise UserError("a.txt: cannot be read")
        signal.pause()

    return write
