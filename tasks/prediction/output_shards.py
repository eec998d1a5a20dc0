"""Output shards: one file of predictions or vectors per range of rows, written by workers.

The content of a shard depends only on its rows, the model and the settings, since its batches
contain no other rows: any process on any machine writes the same bytes.

DIR/predictions-00007-of-00064.jsonl     one shard; see `bert_tf.data.sharded_output`
DIR/manifest.json                        settings, model, input and the entries of all shards
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from bert_tf.config import read_json_object
from bert_tf.data.jobs import RunnerSettings
from bert_tf.data.sharded_output import (
    NAME,
    ShardManifest,
    Span,
    WriteShard,
    check_directory,
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
from tasks.prediction.prediction_files import (
    Outputs,
    outputs_of_rows,
    predict_batch,
    write_array_header,
)

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
        """Check --input, --output and --overwrite, and that the directory `model` is kept.

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
        """Return the file, or with --output_dir the sorted files of a glob.

        Raises:
            UserError: If the glob matches none.
        """
        if self.output_dir is None:
            return [pattern]
        found = sorted(path for path in files.glob_files(pattern) if not files.isdir(path))
        if not found:
            raise UserError(f"--input={pattern}: no such file")
        return found


class OutputManifest(ShardManifest):
    """Manifest of output shards, built by `planned` or `load`."""

    CONTENT: ClassVar[str] = "rows"
    UNIT: ClassVar[str] = "rows"
    # A bad row has an error instead of an output.
    SIZES: ClassVar[tuple[str, ...]] = ("rows", "bad_rows", "bytes")
    TOTALS: ClassVar[tuple[str, ...]] = ("rows", "bad_rows")

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

        The names of the files begin with `name`, such as "predictions". `plan` is all that
        determines the content of the shards, as JSON values: "settings", "model", "input" and
        "versions".
        """
        values = {"complete": False, "rows": 0, "bad_rows": 0, "plan": dict(plan), "shards": []}
        return cls(directory, values, shard_names(name, num_shards, file_format))

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Read the manifest of a directory to write to; see `ShardManifest.load`."""
        try:
            return cls.read(directory)
        except UserError as error:
            raise UserError(f"{error}; name a new --output_dir") from None

    @classmethod
    def read(cls, directory: str | os.PathLike) -> Self:
        """Read the manifest of a directory.

        Raises:
            UserError: If it is not a manifest of output shards.
        """
        path = os.path.join(directory, NAME)
        values = format_versions.without_version(read_json_object(path), path, _FIELDS)
        plan = field(values, "plan", dict, path)
        for name in ("settings", "versions"):
            field(plan, name, dict, path)
        for name in ("model", "input"):
            field(plan, name, list, path)
        field(values, "complete", bool, path)
        for entry in field(values, "shards", list, path):
            cls.check_entry(entry, path)
        return cls(directory, values)

    @property
    def shard_names(self) -> list[str]:
        """File names of all shards of a planned manifest."""
        return self._names

    @property
    def _planned(self):
        return self._values["plan"]

    def check_same_plan(self, planned: Self) -> None:
        """Check settings, model and rows; see `ShardManifest.check_same_plan`."""
        before, now = self.plan, planned.plan
        format_versions.check_same_settings(self.directory, before["settings"], now["settings"], {})
        for name, what in (("model", "the model"), ("input", "--input: the rows")):
            if before[name] != now[name]:
                raise UserError(
                    f"{what}: not the same as when {self.directory} was created; name a new "
                    "--output_dir"
                )

    @property
    def total(self) -> int:
        """Number of rows of all shards."""
        return sum(of["rows"] for of in self.plan["input"])


class Loaded(NamedTuple):
    """A loaded model, as its worker uses it.

    Attributes:
        outputs: What it computes.
        types: Name of the TensorFlow dtype, and number of list levels, by name of the output.
    """

    outputs: Outputs
    types: Mapping[str, tuple[str, int]]


class OutputJob(NamedTuple):
    """A model and what it computes for each row. It is pickled, and so are its functions.

    Attributes:
        name: First part of the names of the files.
        model_files: Files whose content determines the outputs.
        rows: Returns the rows of a file, some of them `BadRow`s, without importing TensorFlow.
        load: Loads the model.
        batch_size: Rows per batch.
        file_format: "jsonl" or "parquet"; of a model with one output, a vector, also "npy", which
            allows no bad rows.
    """

    name: str
    model_files: Sequence[str]
    rows: Callable[[str], Iterable[Any]]
    load: Callable[[], Loaded]
    batch_size: int
    file_format: str

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
            elif self.file_format == "npy":
                (name,) = loaded.types
                _write_array(stream, lines(), name, sum(rows for *_, rows in spans))
            else:
                for line in lines():
                    stream.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        return {
            "file": os.path.basename(path),
            "rows": count,
            "bad_rows": bad,
            "bytes": files.stamp(path)[0],
            "sha256": files.sha256(path),
        }


def _write_array(stream, lines, name, num_rows):
    """Write the vector of each line, float32 (rows, size)."""
    for number, line in enumerate(lines):
        if "error" in line:
            raise UserError(f"{line['row']}: {line['error']}")
        vector = np.asarray(line[name], np.float32)
        if number == 0:
            write_array_header(stream, num_rows, len(vector))
        stream.write(vector.tobytes())


def run_job(run: str, checkpoint: str, task: Mapping[str, Any], **options: Any) -> OutputJob:
    """Return the job of the predictions of a run with the values of task.json."""
    weights = _all_files(os.path.join(run, "checkpoints", checkpoint))
    paths = (os.path.join(run, name) for name in ("config.json", "task.json", "vocab.txt"))
    model_files = [*weights, *filter(files.exists, paths)]
    return _prediction_job(task, model_files, functools.partial(_run, run, checkpoint), options)


def published_job(version: str, task: Mapping[str, Any], **options: Any) -> OutputJob:
    """Return the job of the predictions of a version of a SavedModel; see `run_job`."""
    load = functools.partial(_published, version)
    return _prediction_job(task, _all_files(version), load, options)


def _prediction_job(task, model_files, load_serving, options):
    rows = functools.partial(_rows_of_task, task)
    load = functools.partial(_load_predictions, load_serving)
    return OutputJob("predictions", model_files, rows, load, **options)


def _rows_of_task(task, path):
    return row_reader(task["kind"])(task, path, False)


def _load_predictions(load_serving):
    import_tensorflow()
    serving = load_serving()
    return Loaded(functools.partial(predict_batch, serving), serving.output_types())


def _run(run, checkpoint):
    """Return the `Serving` of a run."""
    from bert_tf.train.distribution import use_precision
    from tasks.model.loading import load_model

    use_precision("float32")
    return load_model(run, checkpoint=checkpoint).serving


def _published(version):
    """Return the `Serving` of a SavedModel."""
    from tasks.graph.serving_functions import PublishedModel

    return PublishedModel(version)


def vector_job(
    model: str,
    columns: tuple[str, ...],
    *,
    unescape_html: bool,
    layers: str | None,
    pooling: str | None,
    per_token: bool,
    max_seq_length: int | None,
    do_lower_case: bool | None,
    prompt: str | None,
    **options: Any,
) -> OutputJob:
    """Return the job of the vectors of a pretrained encoder.

    `model` is any source of weights (`bert_tf.weights.sources`); the other arguments are values of
    the flags of bert-tf extract.
    """
    # A TensorFlow checkpoint is the prefix of its files.
    is_directory = os.path.isdir(model)
    model_files = _all_files(model) if is_directory else sorted(glob.glob(f"{glob.escape(model)}*"))
    rows = functools.partial(read_rows, columns=columns, unescape_html=unescape_html)
    chosen = (layers, pooling, max_seq_length, len(columns), prompt)
    load = functools.partial(_load_vectors, model, do_lower_case, chosen, columns, per_token)
    return OutputJob("vectors", model_files, rows, load, **options)


def _load_vectors(model, do_lower_case, chosen, columns, per_token):
    import_tensorflow()
    from bert_tf.weights.sources import read_pretrained
    from tasks.prediction.feature_extraction import create_embedder, row_outputs

    embedder = create_embedder(read_pretrained(model, do_lower_case), *chosen)
    return Loaded(
        lambda rows: row_outputs(embedder, rows, columns, per_token),
        {"tokens": ("string", 1), "vectors": ("float32", 2)}
        if per_token
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

    The sizes of shards differ by at most one row. `counts` are path and number of rows of each
    file; shards are numbered from 0.
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
            job.open, lambda number: spans(counts, number, num_shards), stamps, settings, log
        )
    return sum(of["rows"] for of in manifest.shards), sum(of["bad_rows"] for of in manifest.shards)
