"""Jobs of output shards without a model, so that their workers start fast."""

import dataclasses

from bert_tf.text.token_counts import TokenCounts
from tasks.data.readers.rows import read_rows
from tasks.prediction.outputs import OutputJob


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthJob(OutputJob):
    """The length of each text, and its words; the file `model` stands for the model."""

    model: str
    batch_size: int = 2
    file_format: str = "jsonl"

    name = "lengths"

    @property
    def model_files(self):
        return [self.model]

    def rows(self, path):
        return read_rows(path, columns=("text",))

    def load(self):
        return _outputs, {"length": ("int32", 0), "words": ("string", 1)}, TokenCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorJob(LengthJob):
    """The vector of length and number of words of each text, in .npy shards."""

    file_format: str = "npy"

    name = "vectors"

    def load(self):
        return _vectors, {"vector": ("float32", 1)}, TokenCounts


def _vectors(rows):
    return [{"vector": [float(of["length"]), float(len(of["words"]))]} for of in _outputs(rows)]


def _outputs(rows):
    texts = [row.texts["text"] for row in rows]
    return [{"length": len(text), "words": text.split()} for text in texts]
