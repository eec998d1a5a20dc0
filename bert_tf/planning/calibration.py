"""Measured rates of this machine's processor."""

import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.planning.devices import Device, machine_memory, processor

MAX_ROWS = 2048  # Products of more rows reach the same rate.
ROUNDS, SECONDS = 20, 1.0  # At least. The first calls of a process are up to 30% slower.
_READ_BYTES = 1 << 28


def measure_processor(
    config: BertConfig, tokens: int, precision: str, training: bool = True
) -> Device:
    """Measure the matrix products of a feed-forward layer and the speed of reading memory.

    The products are those of a step or request of `tokens` tokens, in training also those of the
    backward pass. Returns the processor with the rate of this precision, "int8" included.
    """
    dtype = tf.bfloat16 if precision == "bfloat16" else tf.float32
    rows = max(1, min(tokens, MAX_ROWS))
    x = tf.ones([rows, config.hidden_size], dtype)
    kernel = tf.ones([config.hidden_size, config.intermediate_size], dtype)
    upstream = tf.ones([rows, config.intermediate_size], dtype)

    def forward():
        tf.matmul(x, kernel)

    def step():
        # Forward pass, and the gradients of inputs and kernel.
        tf.matmul(x, kernel)
        tf.matmul(upstream, kernel, transpose_b=True)
        tf.matmul(x, upstream, transpose_a=True)

    flops = 2 * rows * config.hidden_size * config.intermediate_size
    rate = 3 * flops / _seconds(step) if training else flops / _seconds(forward)
    memory = tf.ones([_READ_BYTES // 4])
    bandwidth = _READ_BYTES / _seconds(lambda: tf.reduce_sum(memory))
    # The rate of int8 is derived from that of float32.
    measured = "float32" if precision == "int8" else precision
    return processor(machine_memory(), {measured: rate}, bandwidth)


def _seconds(function: Callable[[], None]) -> float:
    """Return the median time of a call, after one that is not counted."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) <= ROUNDS or time.perf_counter() - start < SECONDS:
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
