"""Manifest of a directory of output shards, by which an interrupted command is resumed.

DIR/predictions-00007-of-00064.jsonl     one shard
DIR/.predictions-00007-of-00064.json     its entry, until the manifest is complete
DIR/manifest.json                        settings, model, input and the entries of all shards
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, TypedDict

from bert_tf.config import read_json_object
from bert_tf.data import entries, plans
from bert_tf.errors import UserError
from bert_tf.storage import files, format_versions
from bert_tf.storage.ownership import MARKER
from bert_tf.storage.strict_json import field

NAME = "manifest.json"
_FIELDS = ("complete", "rows", "bad_rows", "plan", "shards")


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


class OutputManifest:
    """The plan of all shards, and the entries of those that are complete.

    Args:
        directory: The directory.
        name: First part of the file names, such as "predictions".
        file_format: "jsonl" or "parquet".
        num_shards: Number of shards.
        plan: All that determines the content of the shards, as JSON values by name: "settings",
            "model", "input" and "versions".
    """

    def __init__(
        self, directory: str, name: str, file_format: str, num_shards: int, plan: Mapping[str, Any]
    ) -> None:
        self.directory, self.plan = directory, dict(plan)
        self.shard_names = [
            f"{name}-{number:05d}-of-{num_shards:05d}.{file_format}" for number in range(num_shards)
        ]

    def shard_path(self, number: int) -> str:
        """Return the path of a shard."""
        return os.path.join(self.directory, self.shard_names[number])

    def save_entry(self, entry: OutputEntry) -> None:
        """Write the entry file of a complete shard atomically."""
        entries.save(self.directory, entry, plans.digest(self.plan))

    def check_directory(self) -> None:
        """Raise `UserError` if the directory contains files, but no manifest."""
        names = set(files.listdir(self.directory))
        others = (name for name in names - {MARKER} if not files.is_temporary(name))
        if NAME not in names and any(others):
            raise UserError(f"{self.directory}: contains other files; name a new --output_dir")

    def finished(self) -> dict[int, OutputEntry]:
        """Return the entries of complete shards, and remove temporary files of killed processes.

        Raises:
            UserError: If the directory contains other files, or shards of another plan.
        """
        self.check_directory()
        if not files.exists(os.path.join(self.directory, NAME)):
            entries.remove_temporary(self.directory)
            return {}
        on_disk = self._read()
        before, now = on_disk["plan"], self.plan
        format_versions.check_same_settings(self.directory, before["settings"], now["settings"], {})
        for name, what in (("model", "the model"), ("input", "--input: the rows")):
            if before[name] != now[name]:
                raise UserError(
                    f"{what}: not the same as when {self.directory} was created; name a new "
                    "--output_dir"
                )
        entries.remove_temporary(self.directory)
        found = entries.finished(
            self.directory, self.shard_names, on_disk["shards"], plans.digest(before), _check_entry
        )
        # Complete shards remain usable with other versions, but cannot be mixed with new ones.
        if len(found) < len(self.shard_names):
            plans.check_same_versions(self.directory, before["versions"], now["versions"])
        return found

    def save(self, finished: Mapping[int, OutputEntry]) -> None:
        """Write the manifest atomically. A complete one replaces the entry files."""
        is_complete = len(finished) == len(self.shard_names)
        shards = [finished[number] for number in sorted(finished)]
        values = {
            "complete": is_complete,
            "rows": sum(entry["rows"] for entry in shards),
            "bad_rows": sum(entry["bad_rows"] for entry in shards),
            "plan": self.plan,
            "shards": shards,
        }
        text = json.dumps(format_versions.with_version(values), indent=1, ensure_ascii=False) + "\n"
        files.atomic_write_text(os.path.join(self.directory, NAME), text)
        if is_complete:
            entries.remove_all(self.directory, self.shard_names)

    def _read(self):
        path = os.path.join(self.directory, NAME)
        try:
            values = format_versions.without_version(read_json_object(path), path, _FIELDS)
            plan = field(values, "plan", dict, path)
            for name in ("settings", "versions"):
                field(plan, name, dict, path)
            for name in ("model", "input"):
                field(plan, name, list, path)
            for entry in field(values, "shards", list, path):
                _check_entry(entry, path)
        except UserError as error:
            raise UserError(f"{error}; name a new --output_dir") from None
        return values


def _check_entry(entry, location):
    field(entry, "file", str, location)
    field(entry, "sha256", str, location)
    for name in ("rows", "bad_rows", "bytes"):
        entries.check_size(entry, name, location)
    return entry
