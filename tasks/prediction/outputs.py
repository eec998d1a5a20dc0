"""Outputs of a model per row of files: one file, or shards that several workers write.

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
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

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
from bert_tf.runs.run import Run
from bert_tf.storage import files, format_versions, paths, strict_json
from bert_tf.storage.ownership import sole_writer
from bert_tf.storage.strict_json import field
from bert_tf.system.command import flag, import_tensorflow
from bert_tf.system.environment import has_visible_gpu
from bert_tf.system.progress import Progress
from bert_tf.system.versions import versions
from bert_tf.text.token_counts import TokenCounts
from bert_tf.weights import google, huggingface, sources
from bert_tf.weights.sentence_transformers import KIND
from tasks.base.task_types import TaskType, add_task_type, default_settings, read_rows_of
from tasks.data.readers.glue import GLUE, check_submission, submission_lines
from tasks.data.readers.rows import (
    BadRow,
    check_any_good,
    check_good,
    raise_bad_rows,
    read_rows,
    write_parquet,
)

if TYPE_CHECKING:
    from bert_tf.weights.sources import PretrainedWeights
    from tasks.graph.pipeline import Serving
    from tasks.model.task_model import TaskModel
    from tasks.types.similarity.text_embedder import TextEmbedder

_Row = TypeVar("_Row")
# Returns the output of each row of a batch by name, as JSON types; a vector may be an array. A row
# that the model can say nothing about has a `BadRow`.
Outputs = Callable[[list], Iterable[dict[str, Any] | BadRow]]
TakeCounts = Callable[[], TokenCounts]
FILE_FORMATS = ("jsonl", "parquet")
_FIELDS = ("complete", "rows", "bad_rows", "plan", "shards")


def predict(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> tuple[int, int]:
    """Write one JSON object per row of a file, in order, as `write_lines` does.

    A row's id, if it has one, is the first field. `input_path` is in a format of the task, and
    `output_path` a .jsonl file. Return the numbers of rows and of bad rows.
    """
    return write_lines(output_path, _outputs_of_file(model, input_path, batch_size, log))


def write_lines(path: str | os.PathLike, outputs: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Write the outputs of `outputs_with_progress` as JSON lines, atomically.

    That of a bad row is {"error": ...}. Return the numbers of rows and of bad rows.
    """
    count = bad = 0
    with files.atomic_writer(path) as lines:
        for _, output in outputs:
            is_bad = isinstance(output, BadRow)
            line = {"error": str(output)} if is_bad else output
            lines.write(_json_line(line))
            count += 1
            bad += is_bad
    return count, bad


def write_array(stream: Any, outputs: Iterable[tuple[Any, Any]], count: int) -> None:
    """Write the outputs of `outputs_with_progress`, a vector each, as the array of a .npy file.

    Args:
        stream: Binary stream that receives the file.
        outputs: Pairs of a row and {name: vector}.
        count: Their number, for the header.

    Raises:
        UserError: At a bad row, or if there is another number of rows.
    """
    written = 0
    for _, output in outputs:
        if isinstance(output, BadRow):
            raise UserError(str(output))
        (vector,) = output.values()
        vector = np.asarray(vector, np.float32)
        if not written:
            header = {
                "descr": np.lib.format.dtype_to_descr(vector.dtype),
                "fortran_order": False,
                "shape": (count, len(vector)),
            }
            np.lib.format.write_array_header_1_0(stream, header)
        stream.write(vector.tobytes())
        written += 1
    if written != count:
        raise UserError(f"read {written} rows, expected {count}: the input was changed; rerun")


def submit(
    model: TaskModel,
    input_path: str,
    output_path: str,
    batch_size: int,
    log: Callable[[str], None],
) -> int:
    """Write the predictions for a GLUE test file as a submission, .tsv; return the number of rows.

    Arguments as of `predict`.

    Raises:
        UserError: At a bad row, or if the file is not a test file or the task is not of GLUE.
    """
    file_format = getattr(model.task, "file_format", None) or ""
    check_submission(output_path, file_format, model.record["origin"])
    # Again, since a remote run was not read before.
    check_good(model.task.iter_examples(input_path, labelled=False))

    def labels_by_id():
        for row, prediction in _outputs_of_file(model, input_path, batch_size, log):
            if isinstance(prediction, BadRow):
                raise UserError(f"{prediction}; a submission requires a prediction for every row")
            if row.id is None:
                raise UserError(
                    f"{row.location}: expected a test file with the column index for a submission"
                )
            yield row.id, prediction["label" if GLUE[file_format].labels else "value"]

    count = -1  # The header is not a row.
    with files.atomic_writer(output_path) as lines:
        for line in submission_lines(file_format, labels_by_id()):
            lines.write(line + "\n")
            count += 1
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedderSettings:
    """Flags of the vectors of texts, which must be equal for vectors that are compared."""

    layers: str | None = flag(
        "encoder layers that the vectors are taken from; default: those of an embedder, else last",
        None,
        choices=("last", "second_to_last", "sum_last_4", "concat_last_4"),
    )
    pooling: str | None = flag(
        "vector of a text: that of [CLS], the mean or maximum over all tokens, including [CLS] and "
        "[SEP], or their sum divided by the square root of their number; default: as in an "
        "embedder, else mean",
        None,
        choices=("cls", "mean", "max", "mean_sqrt_len"),
    )
    max_seq_length: int | None = flag(
        "maximum length of a text or pair in tokens, including [CLS] and [SEP]; default: that of "
        "an embedder, else 128",
        None,
        bounds={">=": 4},
    )
    do_lower_case: bool | None = flag(
        "lower-casing of the text; by default as configured in the model", None
    )
    prompt: str | None = flag(
        "name of the embedder's prompt before single texts; default: its default prompt", None
    )

    def create_embedder(self, pretrained: PretrainedWeights, num_texts: int = 1) -> TextEmbedder:
        """Create the embedder that these flags describe; for pairs, `num_texts` is 2.

        Raises:
            UserError: If the encoder has too few layers, positions or segments, or there is no such
                prompt.
        """
        from bert_tf.train.distribution import use_precision
        from tasks.types.similarity.embedding_model import LAYERS
        from tasks.types.similarity.text_embedder import SimilarityTask, TextEmbedder, options_from

        flags = {name: getattr(self, name) for name in ("layers", "pooling", "max_seq_length")}
        given = {name: value for name, value in flags.items() if value is not None}
        options = {
            "max_seq_length": default_settings(KIND)["max_seq_length"],
            **options_from(pretrained, {**given, "pairs": num_texts == 2}),
        }
        max_seq_length, layers = options["max_seq_length"], options.get("layers", "last")
        config = pretrained.config
        for name, expected, available, what in (
            (f"--layers={layers}", LAYERS[layers][0], config.num_hidden_layers, "layers"),
            ("--max_seq_length", max_seq_length, config.max_position_embeddings, "positions"),
            ("--text_b_column", num_texts, config.type_vocab_size, "segments"),
        ):
            if expected > available:
                raise UserError(
                    f"{name}: requires {expected} {what}, but {pretrained.origin} has {available}"
                )
        task = SimilarityTask.from_options(**options)
        if self.prompt is not None:  # Checked here, since other messages name fields of the task.
            task.prompt_text(self.prompt, "--prompt")
            if num_texts == 2:
                raise UserError(f"--prompt={self.prompt!r:.80}: expected none with --text_b_column")
            task = dataclasses.replace(task, default_prompt=self.prompt)
        return TextEmbedder.from_weights(pretrained, task, dtype=use_precision("float32"))


def _outputs_of_file(model, path, batch_size, log):
    """Return the pairs of `outputs_of_rows` for the predictions of a file."""
    rows = functools.partial(model.task.iter_examples, path, labelled=False)
    check_any_good(rows())  # Again, since a remote run was not read before.
    outputs = functools.partial(predict_batch, model.serving)
    found = outputs_with_progress(rows, outputs, batch_size, log)
    return _with_warnings(found, model.serving, path, True, log)


def _with_warnings(outputs, serving, path, allows_unknown, log):
    """Yield all outputs of a file, then warn of what its tokens lack, before it is written."""
    yield from outputs
    for line in serving.take_token_counts().warnings(path, allows_unknown):
        log(f"warning: {line}")


def outputs_with_progress(
    rows: Callable[[], Iterable[Any]],
    outputs: Outputs,
    batch_size: int,
    log: Callable[[str], None],
) -> Iterator[tuple[Any, dict[str, Any] | BadRow]]:
    """Yield the pairs of `outputs_of_rows`; `rows` is called once more to count them."""
    with Progress(log, "rows", sum(1 for _ in rows())) as progress:
        for batch in outputs_of_rows(rows(), outputs, batch_size):
            yield from batch
            progress.update(progress.done + len(batch))


def outputs_of_rows(
    rows: Iterable[Any], outputs: Outputs, batch_size: int
) -> Iterator[list[tuple[Any, dict[str, Any] | BadRow]]]:
    """Yield the rows of each batch with their outputs. Only one batch is in memory.

    Args:
        rows: Rows of a reader, with their `location`, some of them `BadRow`s.
        outputs: Function that returns the output of each good row of a batch.
        batch_size: Rows per batch.

    Yields:
        Pairs of a row and its output. Instead of an output, the `BadRow` itself, or a new one if a
        number of the output is not finite.
    """
    for batch in in_batches(rows, batch_size):
        good = [row for row in batch if not isinstance(row, BadRow)]
        found = iter(outputs(good) if good else ())
        yield [
            (row, row if isinstance(row, BadRow) else _if_finite(row, next(found))) for row in batch
        ]


def _if_finite(row, output):
    """Return the output of a row, or a `BadRow`."""
    if isinstance(output, BadRow):
        return output
    is_finite = all(
        np.isfinite(value).all() if isinstance(value, np.ndarray) else strict_json.is_finite(value)
        for value in output.values()
    )
    return output if is_finite else BadRow(row.location, strict_json.NOT_FINITE)


def _json_line(output):
    return json.dumps(output, ensure_ascii=False, default=np.ndarray.tolist) + "\n"


def in_batches(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, size)):
        yield batch


def predict_batch(serving: Serving, rows: Sequence[Any]) -> list[dict[str, Any] | BadRow]:
    """Return the prediction per row as a dict of JSON types, without padding.

    If a prediction says nothing about its row, that is a `BadRow`.
    """
    # The served signature, so that predictions are those of the exported model.
    columns = {name: [row.texts[name] for row in rows] for name in serving.task.input_names}
    return [
        BadRow(row.location, error)
        if (error := serving.task.prediction_error(prediction))
        else (prediction if row.id is None else {"id": row.id, **prediction})
        for row, prediction in zip(rows, serving.predict_rows(columns, len(rows)), strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings(RunnerSettings):
    """Flags of a directory of output shards, which several workers write."""

    output_dir: str | None = flag(
        "directory of output shards, to create or to complete, instead of --output", None
    )
    num_shards: int = flag("number of files in --output_dir", 64)
    file_format: str = flag("format of the files in --output_dir", "jsonl", choices=FILE_FORMATS)

    @property
    def workers(self) -> int:
        """Maximum number of worker processes; by default one for a GPU, which they would share."""
        return super().workers if self.num_workers or not has_visible_gpu() else 1

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
        """Return the file, or with --output_dir the sorted files of a glob, but those in it.

        Raises:
            UserError: If the glob matches none.
        """
        return [pattern] if self.output_dir is None else input_files(pattern, self.output_dir)


def input_files(pattern: str, directory: str) -> list[str]:
    """Return the sorted files of a glob of --input, but those in a directory of shards.

    Raises:
        UserError: If the glob matches none.
    """
    found = files.glob_files(pattern)
    inputs = sorted(_outside(found, directory))
    if not inputs:
        others = f" other than those in {directory}" if found else ""
        raise UserError(f"--input={pattern}: no such file{others}")
    return inputs


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputJob(abc.ABC):
    """A model and what it computes for each row. It is pickled.

    Attributes:
        model: Path of the model, or its name.
        batch_size: Rows per batch.
        file_format: "jsonl" or "parquet"; of a model with one output, a vector, also "npy", which
            allows no bad rows.
    """

    model: str
    batch_size: int
    file_format: str

    name: ClassVar[str]  # First part of the names of the files.
    allows_unknown: ClassVar[bool] = False  # See `TokenCounts.warnings`.

    @property
    @abc.abstractmethod
    def model_files(self) -> list[str]:
        """Files whose content determines the outputs."""

    @abc.abstractmethod
    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file, some of them `BadRow`s, without importing TensorFlow."""

    @abc.abstractmethod
    def load(self) -> tuple[Outputs, Mapping[str, tuple[str, int]], TakeCounts]:
        """Load the model.

        Returns:
            What it computes; the name of the TensorFlow dtype, and the number of list levels, by
            name of the output; and a function that returns the counts of its tokens since the last
            call.
        """

    def open(self) -> WriteShard:
        """Load the model and return the function that writes a shard."""
        return functools.partial(self._write, *self.load())

    def _write(self, outputs, types, take_counts, number, path, spans):
        count = bad = 0

        def pairs() -> Iterator[tuple[Any, dict[str, Any] | BadRow]]:
            nonlocal count, bad
            for batch in outputs_of_rows(_rows_of(spans, self.rows), outputs, self.batch_size):
                for row, output in batch:
                    count += 1
                    bad += isinstance(output, BadRow)
                    yield row, output

        def lines() -> Iterator[dict[str, Any]]:
            for row, output in pairs():
                of_row = {"error": output.message} if isinstance(output, BadRow) else output
                yield {"row": row.location, **of_row}

        with files.atomic_bytes_writer(path) as stream:
            if self.file_format == "parquet":
                write_parquet(stream, path, lines(), types)
            elif self.file_format == "npy":
                write_array(stream, pairs(), sum(rows for *_, rows in spans))
            else:
                for line in lines():
                    stream.write(_json_line(line).encode())
        return {
            "file": os.path.basename(path),
            "rows": count,
            "bad_rows": bad,
            "bytes": files.stamp(path)[0],
            "sha256": files.sha256(path),
            **take_counts().to_entry(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionJob(OutputJob):
    """The predictions of a run, of a published version, or of a model of another library."""

    model: str  # Directory of the run or of the version, or id of the hub.
    task: Mapping[str, Any]  # Values of its task.json.
    checkpoint: str | None = None  # Name of the checkpoint of a run; `None` for other models.
    task_type: TaskType | None = None  # Added in workers that do not know it.

    name = "predictions"
    allows_unknown = True

    @property
    def model_files(self) -> list[str]:
        """The files that the predictions depend on."""
        return _files_of_model(self.model, self.checkpoint)

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file in a format of the task."""
        return read_rows_of(self.task, path, labelled=False)

    def load(self) -> tuple[Outputs, Mapping[str, tuple[str, int]], TakeCounts]:
        """Load the model; see `OutputJob`."""
        if self.task_type:
            add_task_type(self.task["kind"], self.task_type)
        import_tensorflow()
        from bert_tf.train.distribution import use_precision
        from tasks.graph.pipeline import PublishedModel
        from tasks.graph.published import is_saved_model
        from tasks.model.loading import load_model

        serving: Serving
        if is_saved_model(self.model):
            serving = PublishedModel(self.model)
        else:
            use_precision("float32")
            serving = load_model(self.model, checkpoint=self.checkpoint).serving
        outputs = functools.partial(predict_batch, serving)
        return outputs, serving.output_types(), serving.take_token_counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorJob(EmbedderSettings, OutputJob):
    """The vectors of a pretrained encoder, any source of weights (`bert_tf.weights.sources`)."""

    model: str
    columns: tuple[str, ...] = ("text",)
    per_token: bool = False
    checkpoint: str | None = None  # Name of the checkpoint, if the model is a run.

    name = "vectors"

    @property
    def model_files(self) -> list[str]:
        """The files that the vectors depend on."""
        return _files_of_model(self.model, self.checkpoint)

    def rows(self, path: str) -> Iterable[Any]:
        """Return the rows of a file with the columns."""
        return read_rows(path, self.columns)

    def embedder(self) -> TextEmbedder:
        """Load the encoder."""
        if self.checkpoint:
            run, lower = Run.open(self.model), self.do_lower_case
            pretrained = sources.read_checkpoint(run, self.checkpoint, lower)
        else:
            pretrained = sources.read_pretrained(self.model, self.do_lower_case)
        return self.create_embedder(pretrained, len(self.columns))

    def load(self) -> tuple[Outputs, Mapping[str, tuple[str, int]], TakeCounts]:
        """Load the encoder; see `OutputJob`."""
        import_tensorflow()
        embedder, types = self.embedder(), {"tokens": ("string", 1), "vectors": ("float32", 2)}
        return (
            functools.partial(self._outputs, embedder),
            types if self.per_token else {"vector": ("float32", 1)},
            embedder.serving.take_token_counts,
        )

    def _outputs(self, embedder, rows):
        """Return the vector of each row as an array, or its tokens and their vectors as lists."""
        in_order = [[row.texts[column] for row in rows] for column in self.columns]
        texts = dict(zip(embedder.task.input_names, in_order, strict=True))
        if not self.per_token:
            return [{"vector": vector_D} for vector_D in embedder.predict(texts, verbose=0)]
        return [
            {"tokens": tokens, "vectors": vectors_LD.tolist()}
            for tokens, vectors_LD in embedder.token_vectors(texts)
        ]

    def extract(
        self,
        embedder: TextEmbedder,
        input_path: str,
        output_path: str | os.PathLike,
        log: Callable[[str], None],
    ) -> tuple[int, int]:
        """Write the vectors of the rows of a file, in order, atomically.

        Args:
            embedder: The loaded encoder.
            input_path: .csv, .tsv or .jsonl file.
            output_path: A .npy file gets an array, float32 (rows, D); a .jsonl file gets one
                {"vector": [...]} or {"tokens": [...], "vectors": [[...], ...]} per line, or
                {"error": ...} for a bad row, and for one whose vector is not finite.
            log: Callable that takes log lines.

        Returns:
            Number of rows, and number of bad rows among them.

        Raises:
            UserError: A row is bad and the output is .npy, raised before any computation; or a
                vector for a .npy file is not finite; or the vocabulary knows no token.
        """
        rows = functools.partial(self.rows, input_path)
        outputs = functools.partial(self._outputs, embedder)
        found = outputs_with_progress(rows, outputs, self.batch_size, log)
        found = _with_warnings(found, embedder.serving, input_path, self.allows_unknown, log)
        if not str(output_path).endswith(".npy"):
            return write_lines(output_path, found)
        count = sum(1 for _ in raise_bad_rows(rows()))  # The header of .npy contains it.
        with files.atomic_bytes_writer(output_path) as stream:
            write_array(stream, found, count)
        return count, 0


def _all_files(directory):
    """Return the files in a directory and those below it, also linked ones, but no hidden ones."""
    found = []
    for name in files.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith("."):  # Such as .git, and .cache of a download.
            found += _all_files(path) if files.isdir(path) else [path]
    return sorted(found)


def _files_of_model(path, checkpoint):
    """Return the files of a model that outputs depend on.

    They are those of a run's checkpoint, with what its run has for it, of another directory, of a
    TensorFlow checkpoint, or of a model of the hub.
    """
    if checkpoint is not None:
        names = ("config.json", "task.json", "vocab.txt")
        return [
            *_all_files(os.path.join(path, "checkpoints", checkpoint)),
            *filter(files.exists, (os.path.join(path, name) for name in names)),
        ]
    if files.is_remote(path) or os.path.isdir(path):
        return _all_files(path)
    if location := google.find(pathlib.Path(path)):
        # --output_dir may begin with the same name.
        found = {*glob.glob(f"{glob.escape(path)}*"), *map(str, location[1:])}
        return sorted(filter(os.path.isfile, found))
    downloaded = huggingface.download(path)
    return _all_files(downloaded[0]) if downloaded else []


def _outside(paths, directory):
    """Return the paths that are not in a directory, such as one below the model that they are of.

    A rerun would otherwise take the shards of the first run for a part of the model or the input.
    """
    inner = os.path.join(os.path.realpath(directory), "")
    return [path for path in paths if not os.path.realpath(path).startswith(inner)]


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
    check_directory(directory)
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
        # A preset of keras-hub that is given by its name has no files here.
        "model": [files.sha256(path) for path in _outside(job.model_files, directory)]
        or [job.model],
        "input": [
            {"file": path, "rows": count, "sha256": files.sha256(path)} for path, count in counts
        ],
        "versions": versions(("bert_tf", "tensorflow", "tensorflow-text")),
    }
    num_shards = settings.num_shards
    manifest = OutputManifest.planned(directory, job.name, job.file_format, num_shards, plan)
    with sole_writer(directory):
        manifest.write_missing(
            job.open, lambda number: spans(counts, number, num_shards), stamps, settings, log
        )
    for line in manifest.token_counts.warnings(pattern, job.allows_unknown):
        log(f"warning: {line}")
    return sum(of["rows"] for of in manifest.shards), sum(of["bad_rows"] for of in manifest.shards)
