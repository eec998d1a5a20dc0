"""Sharded output: files that workers write into a directory, and that a rerun completes.

DIR/NAME-00007-of-00064.EXT      one shard
DIR/.NAME-00007-of-00064.json    its entry, until the manifest is complete
DIR/manifest.json                what determines the shards, and the entries of all shards
"""

import abc
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from bert_tf.config import read_json_object
from bert_tf.data import jobs
from bert_tf.errors import UserError
from bert_tf.storage import files, format_versions
from bert_tf.storage.strict_json import field
from bert_tf.system.progress import Progress
from bert_tf.text.token_counts import TokenCounts

NAME = "manifest.json"
Span = tuple[str, int, int]  # A part of a file: path, and two numbers that say where.
# Of a shard in the manifest: "file", "sha256", "bytes" and other numbers.
Entry = dict[str, Any]
# Writes a shard atomically from its number (from 0), its path and what it is made from.
WriteShard = Callable[[int, str, Iterable[Span]], Entry]
# Imports TensorFlow and returns a `WriteShard`. It is pickled, and each worker calls it once.
OpenShardWriter = Callable[[], WriteShard]


class ShardManifest(abc.ABC):
    """Manifest of a directory of shards: what determines them, and the entries of complete ones."""

    CONTENT: ClassVar[str]  # What the shards are made from, such as "rows", for messages.
    UNIT: ClassVar[str] = "shards"  # Of progress; "shards", or a key of the entries.
    SIZES: ClassVar[tuple[str, ...]]  # Keys of the numbers that each entry has.
    TOTALS: ClassVar[tuple[str, ...]] = ()  # Those whose sums are in manifest.json.

    def __init__(self, directory: str | os.PathLike, values: dict[str, Any]) -> None:
        self.directory, self._values = str(directory), values

    @classmethod
    @abc.abstractmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Read the manifest of a directory; raises UserError if it is missing or damaged."""

    @property
    @abc.abstractmethod
    def shard_names(self) -> list[str]:
        """File names of all shards."""

    @abc.abstractmethod
    def check_same_plan(self, planned: Self) -> None:
        """Raise UserError with the first difference to another plan, except for versions."""

    @classmethod
    def check_entry(cls, entry: Any, location: str) -> Entry:
        """Return the entry of a shard, a parsed JSON value; raises UserError if it is none."""
        for name in ("file", "sha256"):
            field(entry, name, str, location)
        for name in cls.SIZES:
            check_size(entry, name, location)
        TokenCounts.from_entry(entry, location)
        return entry

    @property
    def _planned(self):
        """Values that determine the shards, such as "settings" and "versions", by name."""
        return self._values

    @property
    def plan(self) -> Any:
        """JSON values of all that determines the content of the shards."""
        return self._planned

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the command that determine the content of the shards."""
        return self._planned["settings"]

    @property
    def plan_sha256(self) -> str:
        """SHA-256 of the plan, which identifies entry files."""
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether no shard is missing."""
        return self._values["complete"]

    @property
    def shards(self) -> list[Entry]:
        """Entries of the shards; of the complete ones if some are missing."""
        return self._values.get("shards", [])

    @property
    def token_counts(self) -> TokenCounts:
        """Counts of the tokens of the shards; zeros if they are not recorded."""
        entries = (TokenCounts.from_entry(entry, self.path(NAME)) for entry in self.shards)
        return sum(entries, start=TokenCounts())

    def path(self, name: str) -> str:
        """Return the path of a file in the directory."""
        return os.path.join(self.directory, name)

    def finished(self) -> dict[int, Entry]:
        """Return the entries of complete shards by number, and remove what killed processes left.

        Raises:
            UserError: If the directory contains shards of another plan.
        """
        on_disk = self.load(self.directory) if files.exists(self.path(NAME)) else None
        if on_disk:
            on_disk.check_same_plan(self)
        for name in filter(files.is_temporary, files.listdir(self.directory)):
            files.remove(self.path(name))
        if not on_disk:
            return {}
        found = on_disk._finished(self.shard_names)
        # Complete shards remain usable with other versions, but cannot be mixed with new ones.
        if len(found) < len(self.shard_names):
            for name, now in self._planned["versions"].items():
                before = on_disk._planned["versions"].get(name)
                if before != now:
                    raise UserError(
                        f"{self.directory}: created with {name} {before}, now {now}, which may "
                        "write other shards; install the former, or name a new --output_dir"
                    )
        return found

    def _finished(self, shard_names):
        """Return the entries of complete shards by number, and remove unusable entry files."""
        # The manifest is saved when a command starts. Workers write entry files after their shards.
        known = {entry["file"]: entry for entry in self.shards}
        names, plan_sha256, found = set(files.listdir(self.directory)), self.plan_sha256, {}
        for number, name in enumerate(shard_names):
            if _entry_name(name) in names:
                entry = self._read_entry(self.path(_entry_name(name)), plan_sha256)
                if entry is None:
                    files.remove(self.path(_entry_name(name)))
                else:
                    known[name] = entry
            # Comparing sizes is enough here: shards are renamed only when complete.
            if name in known and files.size(self.path(name)) == known[name]["bytes"]:
                found[number] = known[name]
        return found

    def _read_entry(self, path, plan_sha256):
        """Return the entry in an entry file, or `None` if it is damaged or of another plan."""
        try:
            values = read_json_object(path)
            entry = self.check_entry(values, path)
            return entry if values.pop("plan", None) == plan_sha256 else None
        except UserError:
            return None

    def save(self, finished: Mapping[int, Entry]) -> None:
        """Save the manifest with the entries of complete shards by number.

        If all are complete, it replaces the entry files. A complete one is not written again.
        """
        names = self.shard_names
        is_complete = len(finished) == len(names)
        shards = [finished[number] for number in sorted(finished)]
        totals = {name: sum(entry[name] for entry in shards) for name in self.TOTALS}
        self._values |= {"complete": is_complete, **totals, "shards": shards}
        if not (is_complete and self.load(self.directory).is_complete):
            self.save_values()
        if is_complete:
            for name in {_entry_name(name) for name in names} & set(files.listdir(self.directory)):
                files.remove(self.path(name))

    def save_values(self) -> None:
        """Write manifest.json atomically."""
        values = format_versions.with_version(self._values)
        text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
        files.atomic_write_text(self.path(NAME), text)

    @property
    def total(self) -> int:
        """Number of units of progress of all shards."""
        return len(self.shard_names)

    def write_missing(
        self,
        open_writer: OpenShardWriter,
        spans_of: Callable[[int], Iterable[Span]],
        stamps: Mapping[str, Any],
        settings: jobs.RunnerSettings,
        log: Callable[[str], None],
    ) -> bool:
        """Write the shards that are missing in the directory, and the complete manifest.

        The caller holds the lock of the directory. `spans_of` returns what the shard of a number is
        made from. `stamps` are `files.stamp` of each input file by path, from before its content
        was planned: workers read the files again, so they must not change until the end.

        Returns:
            Whether shards were missing.

        Raises:
            UserError: If the directory contains shards of another plan, or shards are missing.
        """
        finished, names = self.finished(), self.shard_names
        missing = [number for number in range(len(names)) if number not in finished]
        self.save(finished)
        if not missing:
            log(f"{self.directory}: already complete, nothing to do")
            return False
        if finished:
            log(f"{self.directory}: resuming: {len(finished)}/{len(names)} shards complete")
        tasks = ((number, self.path(names[number]), spans_of(number)) for number in missing)
        open_task_writer = functools.partial(
            _open_task_writer, open_writer, self.directory, self.plan_sha256
        )
        began = time.monotonic()

        def size(entry):
            return entry.get(self.UNIT, 1)

        try:
            with jobs.run(settings, open_task_writer, self.directory, len(missing)) as make:
                log(f"workers ready after {time.monotonic() - began:.1f} s")
                done = sum(map(size, finished.values()))
                with Progress(log, self.UNIT, self.total, done) as progress:
                    make(tasks, lambda entry: progress.update(progress.done + size(entry)))
        except (KeyboardInterrupt, SystemExit):
            log(f"stopped: complete shards remain in {self.directory}; rerun the command to resume")
            raise
        for path, stamp in stamps.items():
            if files.stamp(path) != stamp:
                raise UserError(
                    f"{path}: was changed while it was read; name a new --output_dir, since shards "
                    f"in {self.directory} may contain the old or the new {self.CONTENT}"
                )
        finished = self.finished()
        if len(finished) < len(names):  # A runner that lost its workers may end without an error.
            raise UserError(
                f"{self.directory}: {len(finished)}/{len(names)} shards complete, but the workers "
                "were lost; rerun the command to resume"
            )
        self.save(finished)
        return True


def check_directory(directory: str) -> None:
    """Raise `UserError` if a directory contains files, but no manifest."""
    names = files.listdir(directory)
    if NAME not in names and any(not name.startswith(".") for name in names):
        raise UserError(f"{directory}: contains other files; name a new --output_dir")


def shard_names(name: str, num_shards: int, suffix: str) -> list[str]:
    """Return the file names of shards, such as examples-00000-of-00064.tfrecord."""
    return [f"{name}-{number:05d}-of-{num_shards:05d}.{suffix}" for number in range(num_shards)]


def save_entry(directory: str, entry: Mapping[str, Any], plan_sha256: str) -> None:
    """Write the entry file of a complete shard atomically."""
    path = os.path.join(directory, _entry_name(entry["file"]))
    files.atomic_write_text(path, json.dumps({**entry, "plan": plan_sha256}))


def _entry_name(shard):
    """Return the file name of the entry of a shard, from that of the shard."""
    return f".{os.path.splitext(shard)[0]}.json"


def _open_task_writer(open_writer, directory, plan_sha256):
    """Return the `jobs.WriteTask` that writes a shard and its entry file."""
    write = open_writer()

    def write_task(number, path, spans):
        entry = write(number, path, spans)
        save_entry(directory, entry, plan_sha256)
        return entry

    return write_task


def check_size(
    node: Mapping[str, Any], name: str, location: str, minimum: int = 0, maximum: int = 1 << 62
) -> None:
    """Raise UserError, which begins with `location`, unless node[name] is such an integer."""
    size = field(node, name, int, location)
    if not minimum <= size <= maximum:
        raise UserError(
            f"{location}: {name} is {size!r:.40}; expected an integer in [{minimum}, {maximum}]"
        )
