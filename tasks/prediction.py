"""Writes a model's answers to the rows of a file."""

import itertools
import json

from bert_tf.files import replacing
from tasks.examples import as_tensor
from tasks.forms.records import BadRow


def predict(trained, input_path, output_path, rows_at_a_time, say):
    """Answers each row of `input_path` in order, a JSON object a line; returns (rows, bad ones).

    Of the rows only some batches are in memory. A bad one yields {"error": ...} in its place. The
    file appears once it is whole.
    """
    answer = trained.pipeline.signatures()["serving_default"]
    count = bad = 0
    with replacing(output_path) as lines:
        for rows in in_batches(trained.task.rows(input_path, labelled=False), rows_at_a_time):
            answers = iter(_answers(trained.task, answer, rows))
            for row in rows:
                is_bad = isinstance(row, BadRow)
                bad += is_bad
                line = {"error": f"{row.where}: {row.message}"} if is_bad else next(answers)
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += len(rows)
            say(f"{count} rows")
    return count, bad


def in_batches(rows, size):
    """Yields lists of `size` rows, the last one maybe shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def _answers(task, answer, rows):
    """The served model's answer to each good row, as a dict of JSON's types."""
    good = [row for row in rows if not isinstance(row, BadRow)]
    if not good:
        return []
    texts = (as_tensor([row.texts[name] for row in good]) for name in task.input_names)
    fields = {name: jsonable(values) for name, values in answer(*texts).items()}
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]


def jsonable(tensor):
    """A tensor as nested lists of what JSON has; strings as text."""

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8") if isinstance(value, bytes) else value

    return text(tensor.numpy().tolist())
