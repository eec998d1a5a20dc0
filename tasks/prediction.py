"""Writes a model's answers to the rows of a file."""

import itertools
import json

import numpy as np

from bert_tf.errors import UserError
from bert_tf.files import atomic_writer
from tasks.examples import as_tensor
from tasks.forms.glue import GLUE, check_submission, submission_lines
from tasks.forms.records import BadRow


def predict(trained, input_path, output_path, rows_at_a_time, log):
    """Answers each row of `input_path` in order, a JSON object a line; returns (rows, bad ones).

    Of the rows only a batch is in memory. Where they have an id it comes first; a bad one yields
    {"error": ...} in its place. The file appears once it is whole.
    """
    count = bad = 0
    with atomic_writer(output_path) as lines:
        for row, answer in _answered(trained, input_path, rows_at_a_time, log):
            lines.write(json.dumps(answer or {"error": str(row)}, ensure_ascii=False) + "\n")
            count += 1
            bad += answer is None
    return count, bad


def submit(trained, input_path, output_path, rows_at_a_time, log):
    """Answers a test file of GLUE as a submission's .tsv; returns the number of rows.

    Raises UserError at a bad row, and where the file is no test file or the task none of GLUE's.
    """
    task = trained.task
    form = getattr(task, "form", None)
    check_submission(output_path, form, trained.run.path)

    def predictions():
        for row, answer in _answered(trained, input_path, rows_at_a_time, log):
            if answer is None:
                raise UserError(f"{row}; a submission has to answer every row")
            if row.id is None:
                raise UserError(f"{row.where}: no index; a submission answers a test file")
            yield row.id, answer["label" if GLUE[form].labels else "value"]

    count = -1  # The header is no row.
    with atomic_writer(output_path) as lines:
        for line in submission_lines(form, predictions()):
            lines.write(line + "\n")
            count += 1
    return count


def _answered(trained, path, rows_at_a_time, log):
    """Yields (row, the served model's answer as a dict of JSON's types; None to a bad row)."""
    answer = trained.pipeline.signatures()["serving_default"]
    count = 0
    for batch in in_batches(trained.task.rows(path, labelled=False), rows_at_a_time):
        answers = iter(_answers(trained.task, answer, batch))
        for row in batch:
            yield row, None if isinstance(row, BadRow) else next(answers)
        count += len(batch)
        log(f"{count} rows")


def in_batches(rows, size):
    """Yields lists of `size` rows, the last one maybe shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def _answers(task, answer, rows):
    """The served model's answer to each good row, as a dict of JSON's types, without padding."""
    good = [row for row in rows if not isinstance(row, BadRow)]
    if not good:
        return []
    texts = (as_tensor([row.texts[name] for row in good]) for name in task.input_names)
    fields = {name: jsonable(values) for name, values in answer(*texts).items()}
    answers = [
        task.trimmed(dict(zip(fields, row, strict=True)))
        for row in zip(*fields.values(), strict=True)
    ]
    return [
        answer if row.id is None else {"id": row.id, **answer}
        for row, answer in zip(good, answers, strict=True)
    ]


def jsonable(tensor):
    """A tensor or array as nested lists of what JSON has; strings as text, bad UTF-8 as U+FFFD."""

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return text(np.asarray(tensor).tolist())
