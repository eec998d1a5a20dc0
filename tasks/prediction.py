"""Writes a model's answers to the rows of a file."""

import itertools
import json

import numpy as np

from bert_tf.errors import UserError
from bert_tf.files import atomic_writer
from tasks.examples import as_tensor
from tasks.readers.glue import GLUE, check_submission, submission_lines
from tasks.readers.records import BadRow


def predict(trained, input_path, output_path, batch_size, log):
    """Answers each row of `input_path` in order, a JSON object a line; returns (rows, bad ones).

    Of the rows only a batch is in memory. Where they have an id it comes first; a bad one yields
    {"error": ...} in its place. The file appears once it is whole.
    """
    count = bad = 0
    with atomic_writer(output_path) as lines:
        for row, prediction in _predictions_of(trained, input_path, batch_size, log):
            lines.write(json.dumps(prediction or {"error": str(row)}, ensure_ascii=False) + "\n")
            count += 1
            bad += prediction is None
    return count, bad


def submit(trained, input_path, output_path, batch_size, log):
    """Answers a test file of GLUE as a submission's .tsv; returns the number of rows.

    Raises UserError at a bad row, and where the file is no test file or the task none of GLUE's.
    """
    task = trained.task
    file_format = getattr(task, "file_format", None)
    check_submission(output_path, file_format, trained.run.path)

    def labels_by_id():
        for row, prediction in _predictions_of(trained, input_path, batch_size, log):
            if prediction is None:
                raise UserError(f"{row}; a submission has to answer every row")
            if row.id is None:
                raise UserError(f"{row.location}: no index; a submission answers a test file")
            yield row.id, prediction["label" if GLUE[file_format].labels else "value"]

    count = -1  # The header is no row.
    with atomic_writer(output_path) as lines:
        for line in submission_lines(file_format, labels_by_id()):
            lines.write(line + "\n")
            count += 1
    return count


def _predictions_of(trained, path, batch_size, log):
    """Yields (row, the served model's answer as a dict of JSON's types; None to a bad row)."""
    function = trained.pipeline.signatures()["serving_default"]
    count = 0
    for batch in in_batches(trained.task.iter_examples(path, labelled=False), batch_size):
        predictions = iter(_predict_batch(trained.task, function, batch))
        for row in batch:
            yield row, None if isinstance(row, BadRow) else next(predictions)
        count += len(batch)
        log(f"{count} rows")


def in_batches(rows, size):
    """Yields lists of `size` rows, the last one maybe shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def _predict_batch(task, function, rows):
    """The served model's answer to each good row, as a dict of JSON's types, without padding."""
    good = [row for row in rows if not isinstance(row, BadRow)]
    if not good:
        return []
    texts = (as_tensor([row.texts[name] for row in good]) for name in task.input_names)
    fields = {name: jsonable(values) for name, values in function(*texts).items()}
    predictions = [
        task.strip_padding(dict(zip(fields, row, strict=True)))
        for row in zip(*fields.values(), strict=True)
    ]
    return [
        prediction if row.id is None else {"id": row.id, **prediction}
        for row, prediction in zip(good, predictions, strict=True)
    ]


def jsonable(tensor):
    """A tensor or array as nested lists of what JSON has; strings as text, bad UTF-8 as U+FFFD."""

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return text(np.asarray(tensor).tolist())
