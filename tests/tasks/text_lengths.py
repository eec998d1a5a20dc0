"""A job of output shards without a model, so that its workers start fast."""

import dataclasses

from tasks.data.readers.rows import read_rows
from tasks.prediction.output_shards import Loaded, OutputJob


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthJob(OutputJob):
    """The length of each text, and its words.

    Attributes:
        model: File that stands for the model.
    """

    name: str = "lengths"
    batch_size: int = 2
    file_format: str = "jsonl"
    model: str

    @property
    def model_files(self):
        return [self.model]

    def rows(self, path):
        return read_rows(path, ("text",))

    def load(self):
        return Loaded(_outputs, {"length": ("int32", 0), "words": ("string", 1)})


def _outputs(rows):
    texts = [row.texts["text"] for row in rows]
    return [{"length": len(text), "words": text.split()} for text in texts]
