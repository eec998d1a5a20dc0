"""Flags of commands that write one output file or a directory of shards."""

from __future__ import annotations

import dataclasses

from bert_tf.data.shard_jobs import RunnerSettings
from bert_tf.errors import UserError
from bert_tf.storage import files, paths
from bert_tf.system.command import flag

FILE_FORMATS = ("jsonl", "parquet")


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
            for field in dataclasses.fields(OutputSettings):
                if getattr(self, field.name) != field.default:
                    raise UserError(f"--{field.name}: requires --output_dir")
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
