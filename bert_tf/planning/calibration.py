"""Measured rates of this machine's processor."""

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.planning.devices import Device, processor

MAX_ROWS = 2048  # Products of more rows reach the same rate.
ROUNDS = 20
_COPIED_BYTES = 1 << 28


def measure_processor(config: BertConfig, tokens: int, precision: str) -> Device:
    """Measure the matrix products of a feed-forward layer and the speed of copying memory.

    Args:
        config: Model, whose widths the products have.
        tokens: Tokens per step.
        precision: "float32", "tf32" or "bfloat16".

    Returns:
        The processor, with the memory of this machine.
    """
    dtype = tf.bfloat16 if precision == "bfloat16" else tf.float32
    rows = min(tokens, MAX_ROWS)
    x = tf.ones([rows, config.hidden_size], dtype)
    kernel = tf.ones([config.hidden_size, config.intermediate_size], dtype)
    upstream = tf.ones([rows, config.intermediate_size], dtype)

    def products():
        # Forward pass, and the gradients of inputs and kernel.
        tf.matmul(x, kernel)
        tf.matmul(upstream, kernel, transpose_b=True)
        tf.matmul(x, upstream, transpose_a=True)

    flops = 3 * 2 * rows * config.hidden_size * config.intermediate_size
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    copied = 2 * _COPIED_BYTES / _seconds(lambda: np.copyto(target, source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return processor(memory, flops / _seconds(products), copied)


def _seconds(function: Callable[[], None]) -> float:
    """Return the median time of a call, after one that is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
