"""Time the matrix products of BERT-base alone, for the tokens of one text and of many.

    python benchmarks/few_rows.py            (with and without TF_ENABLE_ONEDNN_OPTS=1)

Each of the twelve layers has four products with their biases: queries, keys and values together,
the attention output, and the two of the feed-forward network. They run in float32 on two threads.
The weights are variables, constants, or as exported: with 16 additional columns, since with 3,072
the rows of a weight are a multiple of 4,096 bytes apart. Prints a Markdown table of milliseconds
for the twelve layers, the median of fifteen calls.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

LAYERS, HIDDEN = 12, 768
ROWS = (10, 26, 50, 100, 200, 400)
BACKENDS = {
    "variables": (tf.Variable, 3072),
    "constants": (tf.constant, 3072),
    "variables, as exported": (tf.Variable, 3072 + 16),
}
WARMUP_STEPS, COUNTED = 3, 15


def graph(kind, inner_width):
    """Return a function from `(rows, HIDDEN)` to the same shape, with small random weights."""
    rng = np.random.default_rng(0)

    def weights(rows, columns):
        drawn = rng.normal(0, 0.02, (rows, columns)).astype(np.float32)
        return kind(drawn), kind(np.zeros(columns, np.float32))

    layers = [
        [
            weights(HIDDEN, 3 * HIDDEN),
            weights(HIDDEN, HIDDEN),
            weights(HIDDEN, inner_width),
            weights(inner_width, HIDDEN),
        ]
        for _ in range(LAYERS)
    ]

    @tf.function(input_signature=[tf.TensorSpec([None, HIDDEN])], autograph=False)
    def products(x):
        def dense(x, of):
            return tf.nn.bias_add(tf.matmul(x, of[0]), of[1])

        for projected, output, inner, outer in layers:
            x += dense(dense(x, projected)[:, :HIDDEN], output)
            x += dense(dense(x, inner), outer)
        return x

    return products


def milliseconds(backends, rows):
    """Return milliseconds per backend. Calls alternate, so that other load affects all of them."""
    x = tf.ones([rows, HIDDEN])
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
    backends = {
        backend: graph(kind, inner_width) for backend, (kind, inner_width) in BACKENDS.items()
    }
    print("| rows | " + " | ".join(backends) + " |")
    print("|---" * (1 + len(backends)) + "|")
    for rows in ROWS:
        cells = [f"{taken:.0f} ms" for taken in milliseconds(backends, rows).values()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
