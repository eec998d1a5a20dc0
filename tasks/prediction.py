"""Writes a model's answers to the rows of a file."""

import json

from bert_tf.files import replace_file


def predict(trained, input_path, output_path, rows_at_a_time, say):
    """Answers each row of `input_path` in order, a JSON object a line; returns their number.

    The file appears once it is whole.
    """
    examples = trained.task.read(input_path, labelled=False)
    answer = trained.pipeline.signatures()["serving_default"]
    lines = []
    for texts in examples.slices(rows_at_a_time):
        fields = {name: jsonable(values) for name, values in answer(*texts.values()).items()}
        lines += [
            json.dumps(dict(zip(fields, row, strict=True)), ensure_ascii=False)
            for row in zip(*fields.values(), strict=True)
        ]
        say(f"{len(lines)}/{len(examples)} rows")
    replace_file(output_path, "".join(line + "\n" for line in lines))
    return len(lines)


def jsonable(tensor):
    """A tensor as nested lists of what JSON has; strings as text."""

    def text(value):
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode("utf-8") if isinstance(value, bytes) else value

    return text(tensor.numpy().tolist())
