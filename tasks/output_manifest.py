"""Manifest of a directory of output shards, by which an interrupted command is resumed.

DIR/predictions-00007-of-00064.jsonl     one shard
DIR/.predictions-00007-of-00064.json     its entry, until the manifest is complete
DIR/manifest.json                        settings, model, input and the entries of all shards
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, TypedDict

from bert_tf import files
from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.ownership import MARKER

NAME = "manifest.json"


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
        self.directory, self.num_shards, self.plan = directory, num_shards, dict(plan)
        self._name, self._file_format = name, file_format

    @property
    def plan_sha256(self) -> str:
        """SHA-256 of the plan, which identifies the entry files."""
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    def shard_path(self, number: int) -> str:
        """Return the path of a shard."""
        name = f"{self._name}-{number:05d}-of-{self.num_shards:05d}.{self._file_format}"
        return os.path.join(self.directory, name)

    def save_entry(self, number: int, entry: OutputEntry) -> None:
        """Write the entry file of a complete shard atomically."""
        values = {**entry, "plan": self.plan_sha256}
        files.atomic_write_text(self._entry_path(number), json.dumps(values))

    def finished(self) -> dict[int, OutputEntry]:
        """Return the entries of complete shards, and remove temporary files of killed processes.

        Raises:
            UserError: If the directory contains other files, or shards of another plan.
        """
        names = set(files.listdir(self.directory))
        if NAME not in names:
            if names - {MARKER}:
                raise UserError(f"{self.directory}: contains other files; name a new --output_dir")
            return {}
        for name in filter(files.is_temporary, names):
            files.remove(os.path.join(self.directory, name))
        on_disk = read_json_object(os.path.join(self.directory, NAME))
        self._check_plan(on_disk.get("plan"))
        known = {entry["file"]: entry for entry in on_disk.get("shards", [])}
        found = {}
        for number in range(self.num_shards):
            path = self.shard_path(number)
            entry = known.get(os.path.basename(path)) or self._saved_entry(number, names)
            # Comparing sizes is enough: shards are renamed only when complete.
            if entry and files.size(path) == entry["bytes"]:
                found[number] = entry
        return found

    def save(self, finished: Mapping[int, OutputEntry]) -> None:
        """Write the manifest atomically. A complete one replaces the entry files."""
        is_complete = len(finished) == self.num_shards
        shards = [finished[number] for number in sorted(finished)]
        values = {
            "complete": is_complete,
            "rows": sum(entry["rows"] for entry in shards),
            "bad_rows": sum(entry["bad_rows"] for entry in shards),
            "plan": self.plan,
            "shards": shards,
        }
        text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
        files.atomic_write_text(os.path.join(self.directory, NAME), text)
        if is_complete:
            for number in range(self.num_shards):
                if files.exists(self._entry_path(number)):
                    files.remove(self._entry_path(number))

    def _entry_path(self, number):
        directory, name = os.path.split(self.shard_path(number))
        return os.path.join(directory, f".{os.path.splitext(name)[0]}.json")

    def _saved_entry(self, number, names):
        path = self._entry_path(number)
        if os.path.basename(path) not in names:
            return None
        try:
            values = read_json_object(path)
        except UserError:
            return None
        return values if values.pop("plan", None) == self.plan_sha256 else None

    def _check_plan(self, before):
        if not isinstance(before, dict) or not isinstance(before.get("settings"), dict):
            raise UserError(f"{self.directory}/{NAME}: damaged; name a new --output_dir")
        for name, value in self.plan["settings"].items():
            if before["settings"].get(name) != value:
                raise UserError(
                    f"--{name}: was {before['settings'].get(name)!r} when {self.directory} was "
                    f"created, is now {value!r}; pass the old value, or name a new --output_dir"
                )
        for name, what in (
            ("model", "the model"),
            ("input", "--input: the rows"),
            ("versions", "the versions of the packages"),
        ):
            if before.get(name) != self.plan[name]:
                raise UserError(
                    f"{what}: not the same as when {self.directory} was created; name a new "
                    "--output_dir"
                )
