"""The jobs of tasks.predict and tasks.extract that several workers share."""

from __future__ import annotations

import abc
import dataclasses
import glob
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bert_tf.storage import files
from bert_tf.system.command import import_tensorflow
from tasks.base.task_types import row_reader
from tasks.data.readers.tables import read_rows
from tasks.prediction.output_shards import Loaded, OutputJob

if TYPE_CHECKING:
    from tasks.graph.serving_functions import Serving


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionJob(OutputJob):
    """Predictions of a task.

    Attributes:
        task: Values of task.json.
    """

    name: str = "predictions"
    task: dict[str, Any]

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file of the task."""
        return row_reader(self.task["kind"])(self.task, path, False)

    def load(self) -> Loaded:
        """Load the model; see `OutputJob`."""
        import_tensorflow()
        from tasks.prediction.prediction_files import predict_batch

        serving = self.serving()
        reader = serving.task.reader
        return Loaded(
            lambda path: reader.iter_examples(path, labelled=False),
            lambda rows: predict_batch(serving, rows),
            serving.output_types(),
        )

    @abc.abstractmethod
    def serving(self) -> Serving:
        """Load the model and return its functions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunJob(PredictionJob):
    """Predictions of a run.

    Attributes:
        run: Run directory.
        checkpoint: Name of a checkpoint directory.
    """

    run: str
    checkpoint: str

    @property
    def model_files(self) -> list[str]:
        """The weights, and the files that describe the model."""
        weights = _all_files(os.path.join(self.run, "checkpoints", self.checkpoint))
        names = ("config.json", "task.json", "vocab.txt")
        paths = (os.path.join(self.run, name) for name in names)
        return [*weights, *filter(files.exists, paths)]

    def serving(self) -> Serving:
        """Load the checkpoint; see `PredictionJob`."""
        from bert_tf.train.distribution import use_precision
        from tasks.model.loading import load_model

        use_precision("float32")
        return load_model(self.run, checkpoint=self.checkpoint).serving


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedJob(PredictionJob):
    """Predictions of a published SavedModel.

    Attributes:
        version: Directory of one version.
    """

    version: str

    @property
    def model_files(self) -> list[str]:
        """All files of the SavedModel."""
        return _all_files(self.version)

    def serving(self) -> Serving:
        """Load the SavedModel; see `PredictionJob`."""
        from tasks.graph.serving_functions import PublishedModel

        return PublishedModel(self.version)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorJob(OutputJob):
    """Vectors of a pretrained encoder.

    Attributes:
        model: Any source of weights; see `bert_tf.weights.sources`.
        columns: Columns of the text or of both texts.
        unescape_html: Whether HTML character references are converted.
        layers: Value of --layers.
        pooling: Value of --pooling.
        per_token: Whether an output is the tokens and a vector per token.
        max_seq_length: Maximum tokens of a text or pair.
        do_lower_case: Lowercasing, or `None` for the model's own.
    """

    name: str = "vectors"
    model: str
    columns: tuple[str, ...]
    unescape_html: bool
    layers: str
    pooling: str
    per_token: bool
    max_seq_length: int
    do_lower_case: bool | None

    @property
    def model_files(self) -> list[str]:
        """All files of the source."""
        if os.path.isdir(self.model):
            return _all_files(self.model)
        return sorted(glob.glob(f"{glob.escape(self.model)}*"))  # A TensorFlow checkpoint's prefix.

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file."""
        return read_rows(path, self.columns, self.unescape_html)

    def load(self) -> Loaded:
        """Load the encoder; see `OutputJob`."""
        import_tensorflow()
        from bert_tf.weights.sources import read_pretrained
        from tasks.prediction.feature_extraction import create_embedder, row_outputs

        embedder = create_embedder(
            read_pretrained(self.model, self.do_lower_case),
            self.layers,
            self.pooling,
            self.max_seq_length,
            len(self.columns),
        )
        return Loaded(
            self.rows,
            lambda rows: row_outputs(embedder, rows, self.columns, self.per_token),
            {"tokens": ("string", 1), "vectors": ("float32", 2)}
            if self.per_token
            else {"vector": ("float32", 1)},
        )


def _all_files(directory):
    return [
        os.path.join(directory, name) for name in sorted(files.walk(directory)) if name[-1] != "/"
    ]
