"""Compare a published model's predictions with those of tasks.predict, and time requests.

    python benchmarks/served_predictions.py --run=RUN --model_dir=MODELS/name --data=FILE [--rows=N]

The pipeline predicts the rows in order, in batches of 64. The published model predicts them in
random order, in batches of 17, so that the rows of a batch differ. Prints a JSON line: the number
of rows, the number of predictions that differ (strings and integers at all, other numbers by more
than 1e-5), rows per second of the published model in batches of 32, and milliseconds of single
rows, for up to 300 rows.
"""

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from export.clients.local_client import LocalClient
from tasks.data.examples import as_tensor
from tasks.data.readers.memory import jsonable
from tasks.data.readers.rows import BadRow
from tasks.model.loading import load_model
from tasks.prediction.prediction_files import in_batches

TOLERANCE = 1e-5


def main(run, model_dir, data, num_rows):
    """Compare and time the predictions, and print a JSON line."""
    trained, served = load_model(run), LocalClient(model_dir)
    rows = [
        row
        for row in trained.task.iter_examples(data, labelled=False)
        if not isinstance(row, BadRow)
    ]
    rows = rows[:num_rows]
    prediction = trained.serving.pipeline.signatures["serving_default"]
    predicted = []
    for batch in in_batches(rows, 64):
        texts = texts_of(batch, trained.task)
        outputs = prediction(*(as_tensor(values) for values in texts.values()))
        predicted += by_rows({name: jsonable(values) for name, values in outputs.items()})

    order = np.random.default_rng(0).permutation(len(rows))
    different = []
    for batch in in_batches(order, 17):
        texts = texts_of([rows[number] for number in batch], trained.task)
        for number, row in zip(batch, by_rows(served.predict(texts)), strict=True):
            if not is_same(
                trained.task.strip_padding(row),
                trained.task.strip_padding(predicted[number]),
            ):
                different.append(int(number))

    begin = time.perf_counter()
    for batch in in_batches(rows, 32):
        served.predict(texts_of(batch, trained.task))
    seconds = time.perf_counter() - begin
    alone = []
    for row in [rows[number] for number in order[:300]]:
        begin = time.perf_counter()
        served.predict(texts_of([row], trained.task))
        alone.append(1000 * (time.perf_counter() - begin))
    print(
        json.dumps(
            {
                "task": trained.task.kind,
                "rows": len(rows),
                "different": len(different),
                "first_different": rows[different[0]].location if different else None,
                "rows_per_second": round(len(rows) / seconds, 1),
                "p50_ms": round(float(np.percentile(alone, 50)), 1),
                "p99_ms": round(float(np.percentile(alone, 99)), 1),
            }
        )
    )


def texts_of(rows, task):
    """Return {input: values} of rows."""
    return {name: [row.texts[name] for row in rows] for name in task.input_names}


def by_rows(prediction):
    """Convert {output: values} to one dict per row."""
    return [
        dict(zip(prediction, values, strict=True))
        for values in zip(*prediction.values(), strict=True)
    ]


def is_same(row, other):
    """Return whether two predictions without padding are equal."""
    for name, value in other.items():
        actual = np.asarray(row[name])
        expected = np.asarray(value)
        if expected.dtype.kind == "f":
            size = min(actual.shape[-1:], expected.shape[-1:])  # Choices are padded per batch.
            actual, expected = (
                array[..., : size[0]] if size else array for array in (actual, expected)
            )
            if not np.allclose(
                actual, expected, rtol=0, atol=TOLERANCE * max(1, np.abs(expected).max(initial=0))
            ):
                return False
        elif actual.tolist() != expected.tolist():
            return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int)
    options = parser.parse_args()
    main(options.run, options.model_dir, options.data, options.rows)
