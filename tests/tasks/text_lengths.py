"""A job of output shards without a model, so that its workers start fast."""

import functools

from tasks.data.readers.rows import read_rows
from tasks.prediction.output_shards import Loaded, OutputJob


def length_job(model, file_format="jsonl"):
    """Return the length of each text, and its words; the file `model` stands for the model."""
    rows = functools.partial(read_rows, columns=("text",))
    return OutputJob("lengths", [model], rows, _load, 2, file_format)


def vector_job(model):
    """Return the vector of length and number of words of each text, in .npy shards."""
    return length_job(model, "npy")._replace(name="vectors", load=_load_vectors)


def _load_vectors():
    return Loaded(_vectors, {"vector": ("float32", 1)})


def _vectors(rows):
    return [{"vector": [float(of["length"]), float(len(of["words"]))]} for of in _outputs(rows)]


def _load():
    return Loaded(_outputs, {"length": ("int32", 0), "words": ("string", 1)})


def _outputs(rows):
    texts = [row.texts["text"] for row in rows]
    return [{"length": len(text), "words": text.split()} for text in texts]
