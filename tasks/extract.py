"""Extract features: write one vector of a pretrained BERT per row of a file, in order.

    bert-tf extract --model=DIR --input=rows.csv --output=vectors.npy --layers=concat_last_4

A .npy file holds a float32 array (rows, size); a .jsonl file holds one {"vector": [...]} per line,
with --per_token {"tokens": [...], "vectors": [[...], ...]}, or {"error": ...} for a bad row. With
--output_dir, several processes write shards of .jsonl, .parquet or .npy, also on a cluster, and an
interrupted command continues where it stopped.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage.ownership import sole_output
from bert_tf.system import command
from bert_tf.weights import sources
from tasks.base.task_types import check_unlabelled
from tasks.prediction.outputs import (
    FILE_FORMATS,
    EmbedderSettings,
    OutputSettings,
    VectorJob,
    write_output_shards,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractSettings(EmbedderSettings, OutputSettings):
    """Flags of the command."""

    model: str = command.flag(
        "id of the Hugging Face hub, run, Hugging Face or sentence-transformers directory, Google "
        "release or keras-hub preset"
    )
    input: str = command.flag(
        "rows: .csv, .tsv or .jsonl, also .gz, or .parquet; with --output_dir also a glob"
    )
    output: str | None = command.flag("output file, .npy or .jsonl", None)
    text_column: str = command.flag("column of the text", "text")
    text_b_column: str | None = command.flag("column of the second text of a pair", None)
    per_token: bool = command.flag(
        "tokens and a vector per token, instead of one vector per text", False
    )
    batch_size: int = command.flag("rows per batch", 64, bounds={">=": 1})
    overwrite: bool = command.flag("replacement of an existing --output file", False)
    file_format: str = command.flag(
        "format of the files in --output_dir", "jsonl", choices=(*FILE_FORMATS, "npy")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_output(self.input, self.output, self.model, self.overwrite)
        if self.output is None:
            if self.per_token and self.file_format == "npy":
                raise UserError("--file_format=npy: expected jsonl or parquet with --per_token")
            return
        if not self.output.endswith((".npy", ".jsonl")):
            raise UserError(f"--output={self.output}: expected a .npy or .jsonl file")
        if self.per_token and not self.output.endswith(".jsonl"):
            raise UserError(f"--output={self.output}: expected a .jsonl file with --per_token")

    @property
    def columns(self) -> list[str]:
        """Columns of the text or of both texts of a pair."""
        return [self.text_column, *filter(None, [self.text_b_column])]

    def check(self) -> None:
        """Check the input file and the model without TensorFlow; raises UserError."""
        rows = {"kind": "pretrained", "text_columns": self.columns}
        # An array has no entry for a bad row.
        is_array = self.file_format == "npy" or str(self.output).endswith(".npy")
        for path in self.input_files(self.input):
            check_unlabelled(rows, path, accepts_bad=not is_array)
        sources.check(self.model, as_embedder=True)


def main(settings: ExtractSettings) -> None:
    """Write the output file, or the directory of output shards."""
    names = "layers pooling per_token max_seq_length do_lower_case prompt batch_size file_format"
    common = {name: getattr(settings, name) for name in names.split()}
    checkpoint = None
    if Run.exists(settings.model):
        # Chosen once for all workers: a training that continues saves others.
        checkpoints = Run.open(settings.model).checkpoints
        checkpoint = os.path.basename(checkpoints.path(checkpoints.best_or_latest_step()))
    job = VectorJob(
        model=settings.model,
        columns=tuple(settings.columns),
        checkpoint=checkpoint,
        **common,
    )
    if settings.output_dir:
        columns = {"text_column": settings.text_column, "text_b_column": settings.text_b_column}
        recorded = {**common, **columns}
        count, bad = write_output_shards(job, settings, settings.input, recorded, command.log)
        size = ""
    else:
        assert settings.output
        with sole_output(settings.output, settings.overwrite):
            embedder = job.embedder()
            count, bad = job.extract(embedder, settings.input, settings.output, command.log)
        size = f" of {embedder.vector_size} numbers, {embedder.record['origin']}"
    errors = f", {bad} bad rows with an error instead" if bad else ""
    command.log(f"{settings.output_dir or settings.output}: {count} rows{size}{errors}")


if __name__ == "__main__":
    command.run_main(main, ExtractSettings, __doc__)
