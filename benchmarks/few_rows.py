"""Times the matrix products of BERT-base alone, for the rows of one text and of many.

    python benchmarks/few_rows.py            (with and without TF_ENABLE_ONEDNN_OPTS=1)

Twelve layers, one behind the other, of each: queries, keys and values in one product, the output,
and the two of the feed-forward part, with their biases, in float32 on two threads; weights as
variables and as constants. What is left of a served request beside this is not the products'.
Prints a Markdown table: ms for the twelve layers, the median of fifteen.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

LAYERS, HIDDEN, INNER = 12, 768, 3072
ROWS = (10, 26, 50, 400)
KINDS = {"variables": tf.Variable, "constants": tf.constant}
UNCOUNTED, COUNTED = 3, 15


def graph(kind):
    """A function [rows, HIDDEN] -> the same, of random weights that keep numbers small."""
    rng = np.random.default_rng(0)

    def weights(rows, columns):
        drawn = rng.normal(0, 0.02, (rows, columns)).astype(np.float32)
        return KINDS[kind](drawn), KINDS[kind](np.zeros(columns, np.float32))

    layers = [
        [
            weights(HIDDEN, 3 * HIDDEN),
            weights(HIDDEN, HIDDEN),
            weights(HIDDEN, INNER),
            weights(INNER, HIDDEN),
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


def milliseconds(products, rows):
    x = tf.ones([rows, HIDDEN])
    seconds = []
    for _ in range(UNCOUNTED + COUNTED):
        start = time.perf_counter()
        products(x).numpy()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[UNCOUNTED:])


def main():
    tf.config.threading.set_intra_op_parallelism_threads(2)
    print("| weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("|---" * (1 + len(ROWS)) + "|")
    for kind in KINDS:
        products = graph(kind)
        cells = [f"{milliseconds(products, rows):.0f} ms" for rows in ROWS]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
