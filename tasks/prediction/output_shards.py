"""Output shards: one file of predictions or vectors per range of rows, written by workers.

The content of a shard depends only on its rows, the model and the settings, since its batches
contain no other rows: any process on any machine writes the same bytes.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_tf.data import entries, shard_jobs
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.storage.ownership import sole_writer
from bert_tf.system.progress import Progress
from bert_tf.system.versions import versions
from tasks.data.readers.parquet import write_parquet
from tasks.data.readers.rows import BadRow
from tasks.prediction.output_manifest import OutputEntry, OutputManifest
from tasks.prediction.output_settings import OutputSettings
from tasks.prediction.prediction_files import outputs_of_rows

Span = tuple[str, int, int]  # File, first row and number of rows.


class Loaded(NamedTuple):
    """A loaded model, as its worker uses it.

    Attributes:
        rows: Function that reads the rows of a file.
        outputs: Function that returns the output of each row of a batch, as JSON types by name.
        types: Name of the TensorFlow dtype, and number of list levels, by name of the output.
    """

    rows: Callable[[str], Iterable[Any]]
    outputs: Callable[[list], Iterable[dict[str, Any]]]
    types: dict[str, tuple[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputJob(abc.ABC):
    """A model and what it computes for each row, as a `ShardJob`.

    Attributes:
        name: First part of the names of the files.
        batch_size: Rows per batch.
        file_format: "jsonl" or "parquet".
        manifest: The plan of the shards; set when they are written.
    """

    name: str
    batch_size: int
    file_format: str
    manifest: OutputManifest | None = None

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

    @property
    def directory(self) -> str:
        """Directory of the shards."""
        assert self.manifest is not None
        return self.manifest.directory

    def open(self) -> Callable[[int, Sequence[Span]], OutputEntry]:
        """Load the model and return the function that writes a shard."""
        loaded = self.load()
        return lambda number, spans: self._write(number, spans, loaded)

    def _write(self, number, spans, loaded):
        assert self.manifest is not None
        path, count, bad = self.manifest.shard_path(number), 0, 0

        def lines() -> Iterator[dict[str, Any]]:
            nonlocal count, bad
            rows = _rows_of(spans, loaded.rows)
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
        self.manifest.save_entry(entry)
        return entry


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
    paths = settings.input_files(pattern)
    log(f"counting the rows of {len(paths)} files")
    # Workers read the rows again, so files must not change until the end.
    stamps = [files.stamp(path) for path in paths]
    counts = [(path, sum(1 for _ in job.rows(path))) for path in paths]
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
    manifest = OutputManifest(directory, job.name, job.file_format, settings.num_shards, plan)
    manifest.check_directory()
    with sole_writer(directory):
        finished = manifest.finished()
        missing = [number for number in range(settings.num_shards) if number not in finished]
        if finished:
            log(f"{directory}: resuming: {len(finished)}/{settings.num_shards} shards complete")
        manifest.save(finished)
        if missing:
            tasks = ((number, spans(counts, number, settings.num_shards)) for number in missing)
            job = dataclasses.replace(job, manifest=manifest)
            with (
                shard_jobs.run(settings, job, len(missing)) as make,
                Progress(log, "rows", total, _num_rows(finished)) as progress,
            ):
                make(tasks, lambda entry: progress.update(progress.done + entry["rows"]))
            for path, stamp in zip(paths, stamps, strict=True):
                if files.stamp(path) != stamp:
                    raise UserError(
                        f"{path}: was changed while it was read; name a new --output_dir, since "
                        f"shards in {directory} may contain the old or the new rows"
                    )
            finished = manifest.finished()
            entries.check_all(directory, finished, settings.num_shards)
            manifest.save(finished)
    return _num_rows(finished), sum(entry["bad_rows"] for entry in finished.values())


def _num_rows(finished):
    return sum(entry["rows"] for entry in finished.values())
