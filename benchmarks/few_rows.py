"""Time the matrix products of BERT-base alone, for the tokens of one text and of many.

    python benchmarks/few_rows.py

Each of the twelve layers has four products with their biases: queries, keys and values together,
the attention output, and the two of the feed-forward network. They are those of the served graph,
on two threads: on variables, packed (export/graph/served_encoder.py), in each precision. With
3,072 columns, the float32 export adds 16, since the rows of a weight would be a multiple of 4,096
bytes apart. Prints a Markdown table of milliseconds for the twelve layers, the median of fifteen
calls.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import serving_machine
import serving_report
import tensorflow as tf

from export.graph.served_encoder import FILLER, dense_weights, product

LAYERS, HIDDEN, INNER = 12, 768, 3072
ROWS = (8, 16, 20, 26, 32, 48, 64, 128, 256)
BACKENDS = {  # dtype of the kernels, columns added to the inner width, whether weights are packed.
    "float32, 3,072 columns": (tf.float32, 0, False),
    "float32": (tf.float32, FILLER, False),
    "float32, packed": (tf.float32, FILLER, True),
    "bfloat16": (tf.bfloat16, 0, False),
    "bfloat16, packed": (tf.bfloat16, 0, True),
    "int8": (tf.qint8, 0, True),
}
WARMUP_STEPS, COUNTED = 3, 15


def graph(dtype, filler, is_packed):
    """Return a function from `(rows, HIDDEN)` to the same shape, with small random weights."""
    rng = np.random.default_rng(0)

    def dense(input_dim, units, **padding):
        layer = keras.layers.Dense(units)
        layer.build((None, input_dim))
        layer.kernel.assign(rng.normal(0, 0.02, (input_dim, units)))
        # TensorFlow removes a bias of zeros.
        layer.bias.assign(rng.normal(0, 0.02, units))
        return dense_weights((layer,), dtype, **padding)

    layers = [
        (
            dense(HIDDEN, 3 * HIDDEN),
            dense(HIDDEN, HIDDEN),
            dense(HIDDEN, INNER, columns=filler),
            dense(INNER, HIDDEN, rows=filler),
        )
        for _ in range(LAYERS)
    ]

    @tf.function(input_signature=[tf.TensorSpec([None, HIDDEN])], autograph=False)
    def products(x):
        x = tf.cast(x, tf.bfloat16 if dtype == tf.bfloat16 else tf.float32)
        for projected, output, inner, outer in layers:
            context = product(x, projected, is_packed)[:, :HIDDEN]
            x = product(context, output, is_packed, residual=x)
            x = product(product(x, inner, is_packed, "GeluExact"), outer, is_packed, residual=x)
        return tf.cast(x, tf.float32)

    return products


def milliseconds(backends, rows):
    """Return milliseconds per backend. Calls alternate, so that other load affects all of them."""
    x = tf.random.stateless_normal([rows, HIDDEN], [1, 2])
    seconds = {backend: [] for backend in backends}
    for _ in range(WARMUP_STEPS + COUNTED):
        for backend, products in backends.items():
            start = time.perf_counter()
            products(x).numpy()
            seconds[backend].append(time.perf_counter() - start)
    return {
        backend: 1000 * statistics.median(taken[WARMUP_STEPS:])
        for backend, taken in seconds.items()
    }


def main():
    """Run the benchmark from the command line."""
    tf.config.threading.set_intra_op_parallelism_threads(2)
    print(serving_report.machine(serving_machine.describe()) + "\n")
    backends = {backend: graph(*options) for backend, options in BACKENDS.items()}
    print("| rows | " + " | ".join(backends) + " |")
    print("|---" * (1 + len(backends)) + "|")
    for rows in ROWS:
        cells = [f"{taken:.1f}" for taken in milliseconds(backends, rows).values()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
