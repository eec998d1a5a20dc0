"""The jobs of tasks.predict and tasks.extract that several workers share."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Iterable
from typing import Any

from bert_tf import files
from bert_tf.command import import_tensorflow
from bert_tf.errors import UserError
from bert_tf.run import Run
from tasks.output_shards import OutputJob
from tasks.readers.tables import read_rows
from tasks.registry import row_reader

GRAPH = "saved_model.pb"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunJob(OutputJob):
    """Predictions of a run.

    Attributes:
        run: Run directory.
        checkpoint: Name of a checkpoint directory.
    """

    name: str = "predictions"
    run: str
    checkpoint: str

    @property
    def model_files(self) -> list[str]:
        """The weights, and the files that describe the model."""
        weights = _all_files(os.path.join(self.run, "checkpoints", self.checkpoint))
        names = ("config.json", "task.json", "vocab.txt")
        paths = (os.path.join(self.run, name) for name in names)
        return [*weights, *filter(files.exists, paths)]

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file of the task."""
        task = Run.open(self.run).task or {"kind": "pretrained"}
        return row_reader(task["kind"])(task, path, False)

    def load(self) -> Any:
        """Load the model; see `OutputJob`."""
        import_tensorflow()
        from tasks.loading import load_model
        from tasks.prediction import predict_batch

        model = load_model(self.run, checkpoint=self.checkpoint)
        reader = model.task.reader
        return (
            lambda path: reader.iter_examples(path, labelled=False),
            lambda rows: predict_batch(model, rows),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModelJob(OutputJob):
    """Responses of a published model. The rows have the inputs of its signature as columns.

    Attributes:
        directory_of_model: Directory of one version.
    """

    name: str = "predictions"
    directory_of_model: str

    @property
    def model_files(self) -> list[str]:
        """All files of the SavedModel."""
        return _all_files(self.directory_of_model)

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file, without columns."""
        return read_rows(path, ())

    def load(self) -> Any:
        """Load the model; see `OutputJob`."""
        import_tensorflow()
        import tensorflow as tf
        import tensorflow_text  # noqa: F401  Registers the operations of the tokenizer.

        from tasks.examples import as_tensor
        from tasks.prediction import jsonable

        try:
            loaded = tf.saved_model.load(self.directory_of_model)
            signature = loaded.signatures["serving_default"]
        except (OSError, KeyError, tf.errors.OpError) as error:
            raise UserError(f"{self.directory_of_model}: not a published model: {error}") from None
        specs = signature.structured_input_signature[1]
        lists = [name for name, spec in specs.items() if spec.shape.rank == 2]

        def outputs(rows):
            columns = {
                name: as_tensor([row.values[name] for row in rows], spec.shape.rank)
                for name, spec in specs.items()
            }
            # Kept, since the signature does not keep the variables alive.
            assert loaded is not None
            found = {name: jsonable(values) for name, values in signature(**columns).items()}
            return [
                dict(zip(sorted(found), values, strict=True))
                for values in zip(*(found[name] for name in sorted(found)), strict=True)
            ]

        return lambda path: read_rows(path, sorted(specs), lists=lists), outputs


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

    def load(self) -> Any:
        """Load the encoder; see `OutputJob`."""
        import_tensorflow()
        from bert_tf.weights.sources import read_pretrained
        from tasks.feature_extraction import create_embedder, row_outputs

        embedder = create_embedder(
            read_pretrained(self.model, self.do_lower_case),
            self.layers,
            self.pooling,
            self.max_seq_length,
            len(self.columns),
        )
        return self.rows, lambda rows: row_outputs(embedder, rows, self.columns, self.per_token)


def published_version(path: str) -> str | None:
    """Return the directory of the SavedModel at a path, or of its newest version.

    Args:
        path: Directory of one version, or of versions. For any other the result is `None`.
    """
    if files.is_remote(path) or not os.path.isdir(path):
        return None
    if files.exists(os.path.join(path, GRAPH)):
        return path
    found = [name for name in os.listdir(path) if name.isdigit()]
    found = [name for name in found if files.exists(os.path.join(path, name, GRAPH))]
    return os.path.join(path, max(found, key=int)) if found else None


def _all_files(directory):
    return [
        os.path.join(directory, name) for name in sorted(files.walk(directory)) if name[-1] != "/"
    ]
