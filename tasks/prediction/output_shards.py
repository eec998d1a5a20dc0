"""Output shards: one file of predictions or vectors per range of rows, written by workers.

The content of a shard depends only on its rows, the model and the settings, since its batches
contain no other rows: any process on any machine writes the same bytes.

DIR/predictions-00007-of-00064.jsonl     one shard; see `bert_tf.data.sharded_output`
DIR/manifest.json                        settings, model, input and the entries of all shards
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypedDict

from bert_tf.config import read_json_object
from bert_tf.data.jobs import RunnerSettings
from bert_tf.data.sharded_output import (
    NAME,
    ShardManifest,
    Span,
    WriteShard,
    check_directory,
    check_size,
    shard_names,
)
from bert_tf.errors import UserError
from bert_tf.storage import files, format_versions, paths
from bert_tf.storage.ownership import sole_writer
from bert_tf.storage.strict_json import field
from bert_tf.system.command import flag, import_tensorflow
from bert_tf.system.versions import versions
from tasks.base.task_types import row_reader
from tasks.data.readers.rows import BadRow, read_rows, write_parquet
from tasks.prediction.prediction_files import outputs_of_rows

if TYPE_CHECKING:
    from tasks.graph.serving_functions import Serving

FILE_FORMATS = ("jsonl", "parquet")
_FIELDS = ("complete", "rows", "bad_rows", "plan", "shards")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings(RunnerSettings):
    """Flags of a directory of output shards, which several workers write."""

    output_dir: str | None = flag(
        "directory of output shards, to create or to complete, instead of --output", None
    )
    num_shards: int = flag("number of files in --output_dir", 64)
    file_format: str = flag("format of the files in --output_dir", "jsonl", choices=FILE_FORMATS)

    def check_output(self, pattern: str, output: str | None, model: str, overwrite: bool) -> None:
        """Check --input, --output and --output_dir.

        Args:
            pattern: Value of --input: a file, or with --output_dir also a glob.
            output: Value of --output.
            model: Directory of the model, which is never overwritten.
            overwrite: Value of --overwrite.

        Raises:
            UserError: If they cannot be used.
        """
        if (output is None) == (self.output_dir is None):
            raise UserError("expected --output or --output_dir")
        if self.output_dir is None:
            for option in dataclasses.fields(OutputSettings):
                if getattr(self, option.name) != option.default:
                    raise UserError(f"--{option.name}: requires --output_dir")
            assert output is not None
            paths.check_local_file("input", pattern)
            paths.check_output(output, [pattern, model], overwrite)
            return
        if overwrite:
            raise UserError("--overwrite: expected --output; a directory of shards is completed")
        if not 1 <= self.num_shards <= 99_999:
            raise UserError(f"--num_shards={self.num_shards}: expected an integer in [1, 99999]")
        self.input_files(pattern)

    def input_files(self, pattern: str) -> list[str]:
        """Return the sorted files of a glob; raises UserError if there is none."""
        found = sorted(path for path in files.glob_files(pattern) if not files.isdir(path))
        if not found:
            raise UserError(f"--input={pattern}: no such file")
        return found


class OutputEntry(TypedDict):
    """Entry of a shard in the manifest.

    Attributes:
        file: File name.
        rows: Number of rows.
        bad_rows: Number of rows with an error instead of an output.
        bytes: Size of the file.
        sha256: SHA-256 of the file.
    """

    file: str
    rows: int
    bad_rows: int
    bytes: int
    sha256: str


class OutputManifest(ShardManifest[OutputEntry]):
    """Manifest of output shards, built by `planned` or `load`."""

    CONTENT: ClassVar[str] = "rows"
    UNIT: ClassVar[str] = "rows"

    def __init__(
        self, directory: str | os.PathLike, values: dict[str, Any], names: Sequence[str] = ()
    ) -> None:
        super().__init__(directory, values)
        self._names = list(names)

    @classmethod
    def planned(
        cls, directory: str, name: str, file_format: str, num_shards: int, plan: Mapping[str, Any]
    ) -> Self:
        """Build the manifest before any shard is written.

        Args:
            directory: The directory.
            name: First part of the file names, such as "predictions".
            file_format: "jsonl" or "parquet".
            num_shards: Number of shards.
            plan: All that determines the content of the shards, as JSON values by name:
                "settings", "model", "input" and "versions".
        """
        values = {"complete": False, "rows": 0, "bad_rows": 0, "plan": dict(plan), "shards": []}
        return cls(directory, values, shard_names(name, num_shards, file_format))

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Read the manifest of a directory; see `ShardManifest.load`."""
        path = os.path.join(directory, NAME)
        try:
            values = format_versions.without_version(read_json_object(path), path, _FIELDS)
            plan = field(values, "plan", dict, path)
            for name in ("settings", "versions"):
                field(plan, name, dict, path)
            for name in ("model", "input"):
                field(plan, name, list, path)
            field(values, "complete", bool, path)
            for entry in field(values, "shards", list, path):
                cls.check_entry(entry, path)
        except UserError as error:
            raise UserError(f"{error}; name a new --output_dir") from None
        return cls(directory, values)

    @property
    def shard_names(self) -> list[str]:
        """File names of all shards of a planned manifest."""
        return self._names

    @property
    def plan(self) -> dict[str, Any]:
        """All that determines the content of the shards."""
        return self._values["plan"]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that determine the content of the shards."""
        return self.plan["versions"]

    def check_same_plan(self, planned: Self) -> None:
        """Check that this manifest has the plan of another one; see `ShardManifest`."""
        before, now = self.plan, planned.plan
        format_versions.check_same_settings(self.directory, before["settings"], now["settings"], {})
        for name, what in (("model", "the model"), ("input", "--input: the rows")):
            if before[name] != now[name]:
                raise UserError(
                    f"{what}: not the same as when {self.directory} was created; name a new "
                    "--output_dir"
                )

    @staticmethod
    def check_entry(entry: Any, location: str) -> OutputEntry:
        """Check and return the entry of a shard; see `ShardManifest.check_entry`."""
        field(entry, "file", str, location)
        field(entry, "sha256", str, location)
        for name in ("rows", "bad_rows", "bytes"):
            check_size(entry, name, location)
        return entry

    def totals(self, shards: Iterable[OutputEntry]) -> dict[str, int]:
        """Return the numbers of rows and of bad rows."""
        shards = list(shards)
        return {name: sum(entry[name] for entry in shards) for name in ("rows", "bad_rows")}

    @property
    def total(self) -> int:
        """Number of rows of all shards."""
        return sum(of["rows"] for of in self.plan["input"])

    def size(self, entry: Mapping[str, Any]) -> int:
        """Return the number of rows of a shard."""
        return entry["rows"]

    @property
    def rows(self) -> tuple[int, int]:
        """(number of rows, number of bad rows) of complete shards."""
        return self._values["rows"], self._values["bad_rows"]


class Loaded(NamedTuple):
    """A loaded model, as its worker uses it.

    Attributes:
        outputs: Function that returns the output of each row of a batch, as JSON types by name.
        types: Name of the TensorFlow dtype, and number of list levels, by name of the output.
    """

    outputs: Callable[[list], Iterable[dict[str, Any]]]
    types: dict[str, tuple[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputJob(abc.ABC):
    """A model and what it computes for each row, as a `ShardJob`.

    Attributes:
        name: First part of the names of the files.
        batch_size: Rows per batch.
        file_format: "jsonl" or "parquet".
    """

    name: str
    batch_size: int
    file_format: str

    @property
    @abc.abstractmethod
    def model_files(self) -> list[str]:
        """Files whose content determines the outputs."""

    @abc.abstractmethod
    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file, some of them `BadRow`s, without importing TensorFlow."""

    @abc.abstractmethod
    def load(self) -> Loaded:
        """Load the model."""

    def open(self) -> WriteShard:
        """Load the model and return the function that writes a shard."""
        return functools.partial(self._write, self.load())

    def _write(self, loaded, number, path, spans):
        count = bad = 0

        def lines() -> Iterator[dict[str, Any]]:
            nonlocal count, bad
            rows = _rows_of(spans, self.rows)
            for batch in outputs_of_rows(rows, loaded.outputs, self.batch_size):
                for row, output in batch:
                    count += 1
                    if isinstance(output, BadRow):
                        output = {"error": output.message}
                        bad += 1
                    yield {"row": row.location, **output}

        with files.atomic_bytes_writer(path) as stream:
            if self.file_format == "parquet":
                write_parquet(stream, path, lines(), loaded.types)
            else:
                for line in lines():
                    stream.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        entry: OutputEntry = {
            "file": os.path.basename(path),
            "rows": count,
            "bad_rows": bad,
            "bytes": files.stamp(path)[0],
            "sha256": files.sha256(path),
        }
        return entry


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
        return Loaded(
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
            lambda rows: row_outputs(embedder, rows, self.columns, self.per_token),
            {"tokens": ("string", 1), "vectors": ("float32", 2)}
            if self.per_token
            else {"vector": ("float32", 1)},
        )


def _all_files(directory):
    return [
        os.path.join(directory, name) for name in sorted(files.walk(directory)) if name[-1] != "/"
    ]


def _rows_of(spans, rows):
    """Yield the rows of a shard. Rows before them in a file are read and skipped."""
    for path, first, expected in spans:
        found = 0
        for row in itertools.islice(rows(path), first, first + expected):
            found += 1
            yield row
        if found < expected:
            raise UserError(f"{path}: was changed while it was read; rerun the command")


def spans(counts: Sequence[tuple[str, int]], number: int, num_shards: int) -> list[Span]:
    """Return the rows of a shard: consecutive ones, in the order of the files.

    Args:
        counts: Path and number of rows of each file.
        number: The number of the shard, from 0.
        num_shards: The number of shards, whose sizes differ by at most one row.
    """
    total = sum(count for _, count in counts)
    begin, end = (total * index // num_shards for index in (number, number + 1))
    found, offset = [], 0
    for path, count in counts:
        first, last = max(begin - offset, 0), min(end - offset, count)
        if first < last:
            found.append((path, first, last - first))
        offset += count
    return found


def write_output_shards(
    job: OutputJob,
    settings: OutputSettings,
    pattern: str,
    recorded: dict[str, Any],
    log: Callable[[str], None],
) -> tuple[int, int]:
    """Write the output shards of a job, or those that are still missing.

    Args:
        job: The job.
        settings: Directory, number of shards, and where the workers run.
        pattern: Glob of the input files.
        recorded: Settings that determine the content of the shards, by flag.
        log: Receives lines of progress.

    Returns:
        (number of rows, number of bad rows).

    Raises:
        UserError: If the rows cannot be read, or if the directory contains other shards.
    """
    directory = settings.output_dir
    assert directory is not None
    stamps = {path: files.stamp(path) for path in settings.input_files(pattern)}
    log(f"counting the rows of {len(stamps)} files")
    counts = [(path, sum(1 for _ in job.rows(path))) for path in stamps]
    total = sum(count for _, count in counts)
    if settings.num_shards > total:
        raise UserError(
            f"--num_shards={settings.num_shards}: more than the {total} rows; use "
            f"--num_shards={total} or less"
        )
    plan = {
        "settings": {**recorded, "num_shards": settings.num_shards},
        "model": [files.sha256(path) for path in job.model_files],
        "input": [
            {"file": path, "rows": count, "sha256": files.sha256(path)} for path, count in counts
        ],
        "versions": versions(("bert_tf", "tensorflow", "tensorflow-text")),
    }
    num_shards = settings.num_shards
    manifest = OutputManifest.planned(directory, job.name, job.file_format, num_shards, plan)
    check_directory(directory)
    with sole_writer(directory):
        manifest.write_missing(
            job, lambda number: spans(counts, number, num_shards), stamps, settings, log
        )
    return manifest.rows
