"""A job of output shards without a model, so that its workers start fast."""

import functools

from tasks.data.readers.rows import read_rows
from tasks.prediction.output_shards import Loaded, OutputJob


def length_job(model, file_format="jsonl"):
    """Return the length of each text, and its words; the file `model` stands for the model."""
    rows = functools.partial(read_rows, columns=("text",))
    return OutputJob("lengths", [model], rows, _load, 2, file_format)


def _load():
    return Loaded(_outputs, {"length": ("int32", 0), "words": ("string", 1)})


def _outputs(rows):
    texts = [row.texts["text"] for row in rows]
    return [{"length": len(text), "words": text.split()} for text in texts]
