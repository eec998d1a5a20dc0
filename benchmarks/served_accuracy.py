"""Measure the accuracy of a run's SavedModel in each precision.

    python benchmarks/served_accuracy.py --run=RUN --data=FILE [--precisions=float32,bfloat16]

RUN is a tagging run, or a classification run with one label per text. FILE contains labelled rows
in the format of its training file, such as the 3,080 test rows of banking77 or the test file of
WNUT17. Each precision is exported to a temporary directory. The SavedModel predicts all rows, 32
per request, in a process of its own without this project's code.

Prints a Markdown table with one row per precision: the metric that selects the run's best
checkpoint (accuracy, or F1 of entities), as tasks.evaluate computes it; its difference from that of
float32; the number of rows with another label or other entities; and the largest difference of a
probability, of all labels, or of the scores of the entities that both precisions find.

The entities of a text are converted back to tags. If an entity begins at a word, its tag is B-,
also if the model predicted I- there.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from bert_tf import UserError
from export.checks import isolated_runner
from export.checks.parity import TOLERANCES
from export.graph.saved_model import write_saved_model
from tasks.data.examples import Examples
from tasks.data.readers.memory import jsonable
from tasks.model.loading import load_model
from tasks.prediction.prediction_files import in_batches

ROWS_PER_REQUEST = 32
REFERENCE = "float32"


def main(run, data, precisions):
    """Print the table."""
    if unknown := sorted(set(precisions) - set(TOLERANCES)):
        raise UserError(f"--precisions: {unknown[0]!r}: expected some of {', '.join(TOLERANCES)}")
    model = load_model(run)
    task = model.task
    if task.kind not in KINDS or getattr(task, "multi_label", False):
        raise UserError(
            f"--run={run}: expected a tagging run, or a classification run with one label per text"
        )
    metric_inputs, prediction_of, probabilities_of = KINDS[task.kind]
    metric = task.best_metric
    encoded = model.encode(task.load_examples(data))
    print(f"{data}: {len(encoded.examples):,} rows")
    print(f"| precision | {metric}, % | difference | rows changed | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    expected = reference = None
    for precision in (REFERENCE, *(name for name in precisions if name != REFERENCE)):
        rows = served_rows(model, precision, encoded.examples)
        value = 100 * task.metrics(encoded, metric_inputs(encoded, rows))[metric]
        if expected is None:
            expected, reference = rows, value
        changed = sum(
            prediction_of(row) != prediction_of(other)
            for row, other in zip(rows, expected, strict=True)
        )
        largest = max(
            abs(probability - probabilities_of(other)[name])
            for row, other in zip(rows, expected, strict=True)
            for name, probability in probabilities_of(row).items()
            if name in probabilities_of(other)
        )
        print(
            f"| {precision} | {value:.2f} | {value - reference:+.2f} | {changed} | {largest:.1e} |",
            flush=True,
        )


def served_rows(model, precision, examples):
    """Return the predictions of the SavedModel in a precision, one dict per row."""
    columns = examples.texts
    cases = [
        {
            "signature": "serving_default",
            "inputs": {
                name: isolated_runner.encoded([texts[number] for number in numbers])
                for name, texts in columns.items()
            },
        }
        for numbers in in_batches(range(len(examples)), ROWS_PER_REQUEST)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        write_saved_model(model, directory / "model", precision)
        paths = directory / "model", directory / "cases.json", directory / "results.npz"
        paths[1].write_text(json.dumps(cases), encoding="ascii")
        subprocess.run([sys.executable, "-I", isolated_runner.__file__, *paths], check=True)
        results = isolated_runner.load(paths[2])
    rows = []
    for number in range(len(cases)):
        prefix = f"{number}/"
        outputs = {
            name.removeprefix(prefix): jsonable(values)
            for name, values in results.items()
            if name.startswith(prefix)
        }
        rows += [
            model.task.strip_padding(dict(zip(outputs, values, strict=True)))
            for values in zip(*outputs.values(), strict=True)
        ]
    return rows


def logits_of_labels(encoded, rows):
    """Return the logits that have the served probabilities, as the model's output."""
    task = encoded.task
    probabilities_NC = np.array([row["probabilities"] for row in rows], np.float32)
    logits_NC = np.log(np.maximum(probabilities_NC, np.finfo(np.float32).tiny))
    if task.is_binary:
        logits_NC = logits_NC[:, 1:] - logits_NC[:, :1]
    return {"label": logits_NC * (task.temperature or 1.0)}


def tags_of_entities(encoded, rows):
    """Return the tag of each token, `(W, L)`, with the served entities as labels."""
    texts = encoded.examples.texts
    labels = [list(entities_of(row)) for row in rows]
    targets, _ = encoded.task.targets(Examples(texts, labels), encoded.windows)
    return {"tag": targets["tag"].to_tensor()}


def probabilities_of_labels(row):
    """Return the probability of each label."""
    return dict(zip(row["labels"], row["probabilities"], strict=True))


def entities_of(row):
    """Return the score of each entity, a tuple of start, end and type."""
    names = ("entity_start", "entity_end", "entity_type")
    return dict(zip(zip(*map(row.get, names), strict=True), row["entity_score"], strict=True))


# By task type: the inputs of its metrics, the prediction of a row, and its probabilities.
KINDS = {
    "classification": (logits_of_labels, lambda row: row["label"], probabilities_of_labels),
    "tagging": (tags_of_entities, lambda row: list(entities_of(row)), entities_of),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precisions", default="float32,bfloat16")
    options = parser.parse_args()
    try:
        main(options.run, options.data, options.precisions.split(","))
    except UserError as error:
        sys.exit(str(error))
