"""Compare the predictions of a run's SavedModel in bfloat16 with those in float32.

    python benchmarks/precision.py --run=RUN --rows=FILE

RUN is a classification run with one label per text, FILE contains labelled rows in the format of
its training file. Both SavedModels are written as by the export and predict all rows, 32 per
request. Prints a JSON line: the number of rows, the largest and the mean difference of their
probabilities, the number of rows with another label, and both accuracies.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from bert_tf import UserError
from export.saved_model import write_saved_model
from tasks.examples import as_tensor
from tasks.loading import load_model

BATCH = 32


def main(run, path):
    """Print how much the predictions of both precisions differ."""
    trained = load_model(run)
    task = trained.task
    if task.kind != "classification" or task.multi_label:
        raise UserError(f"--run={run}: expected a classification run with one label per text")
    examples = task.reader.load_examples(path)
    labels = np.array(task.labels)[examples.labels]
    predictions = {}
    for precision in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch) / precision
            write_saved_model(trained, directory, precision)
            predictions[precision] = ask(directory, examples.texts, len(labels))
    (of_float32, expected), (of_bfloat16, actual) = predictions.values()
    differences = np.abs(of_float32 - of_bfloat16)
    print(
        json.dumps(
            {
                "run": run,
                "rows": len(labels),
                "max_difference": float(f"{differences.max():.3g}"),
                "mean_difference": float(f"{differences.mean():.3g}"),
                "different_labels": int((expected != actual).sum()),
                "accuracy_float32": round(float((expected == labels).mean()), 4),
                "accuracy_bfloat16": round(float((actual == labels).mean()), 4),
            }
        )
    )


def ask(directory, texts, count):
    """Return probabilities `(N, C)` and labels `(N,)` as text."""
    served = tf.saved_model.load(str(directory)).signatures["serving_default"]
    probabilities, labels = [], []
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        prediction = served(**{name: as_tensor(values[part]) for name, values in texts.items()})
        probabilities.append(prediction["probabilities"].numpy())
        labels += [label.decode() for label in prediction["label"].numpy()]
    return np.concatenate(probabilities), np.array(labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True)
    parser.add_argument("--rows", required=True)
    options = parser.parse_args()
    try:
        main(options.run, options.rows)
    except UserError as error:
        sys.exit(str(error))
