"""Manifest entries of shards, each in an entry file until the manifest is complete.

SHARDS/examples-00007-of-00064.tfrecord      one shard
SHARDS/.examples-00007-of-00064.json         its entry
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, TypeVar

from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.storage.strict_json import field

MAX_NAME_LENGTH = 255

_Entry = TypeVar("_Entry", bound=Mapping[str, Any])


class ShardEntry(TypedDict):
    """Entry of a shard in manifest.json.

    Attributes:
        file: File name.
        records: Number of TFRecord records, one per example.
        bytes: Size of the file.
        sha256: SHA-256 of the file.
        documents: Number of documents. Absent for shards of other programs.
        tokens: Number of tokens without padding.
        random_next: Number of examples with a random next segment.
    """

    file: str
    records: int
    bytes: int
    sha256: str
    documents: NotRequired[int]
    tokens: int
    random_next: int


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name of a shard."""
    return f"examples-{number:05d}-of-{num_shards:05d}.tfrecord"


def entry_name(shard: str) -> str:
    """Return the file name of the entry of a shard, from that of the shard."""
    return f".{os.path.splitext(shard)[0]}.json"


def save(directory: str, entry: Mapping[str, Any], plan_sha256: str) -> None:
    """Write the entry file of a complete shard atomically.

    Args:
        directory: Directory of the shard.
        entry: The entry, with the name of the shard as "file".
        plan_sha256: Digest of the plan in the manifest.
    """
    path = os.path.join(directory, entry_name(entry["file"]))
    files.atomic_write_text(path, json.dumps({**entry, "plan": plan_sha256}))


def finished(
    directory: str,
    shards: Sequence[str],
    recorded: Iterable[_Entry],
    plan_sha256: str,
    check: Callable[[Any, str], _Entry],
) -> dict[int, _Entry]:
    """Return the entries of complete shards by number, and remove unusable entry files.

    Args:
        directory: Directory of the shards.
        shards: File names of all shards.
        recorded: Entries in the manifest, which is saved when a command starts. Workers write
            entry files after their shards.
        plan_sha256: Digest of the plan in the manifest.
        check: Function that checks and returns an entry; see `check_entry`.
    """
    names, found = set(files.listdir(directory)), {}
    known = {entry["file"]: entry for entry in recorded}
    for number, name in enumerate(shards):
        own = entry_name(name)
        if own in names:
            entry = _load(os.path.join(directory, own), plan_sha256, check)
            if entry is None:
                files.remove(os.path.join(directory, own))
            else:
                known[name] = entry
        # Comparing sizes is enough here: shards are renamed only when complete.
        if name in known and files.size(os.path.join(directory, name)) == known[name]["bytes"]:
            found[number] = known[name]
    return found


def appeared(directory: str, known: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the entries whose files are new in a directory.

    Args:
        directory: Directory of the shards.
        known: Names of files that are not new. Those of the yielded entries are added.
    """
    for name in files.listdir(directory):
        is_entry = name.startswith(".") and name.endswith(".json") and not files.is_temporary(name)
        if is_entry and name not in known:
            known.add(name)
            yield read_json_object(os.path.join(directory, name))


def check_all(directory: str, finished: Mapping[int, Any], num_shards: int) -> None:
    """Check that the workers wrote all shards; a runner that lost them may end without an error.

    Raises:
        UserError: If a shard is missing.
    """
    if len(finished) < num_shards:
        raise UserError(
            f"{directory}: {len(finished)}/{num_shards} shards complete, but the workers were "
            "lost; rerun the command to resume"
        )


def remove_all(directory: str, shards: Iterable[str]) -> None:
    """Remove the entry files of shards whose entries are in a complete manifest."""
    for name in sorted(set(map(entry_name, shards)).intersection(files.listdir(directory))):
        files.remove(os.path.join(directory, name))


def remove_temporary(directory: str) -> None:
    """Remove temporary files of killed processes."""
    for name in filter(files.is_temporary, files.listdir(directory)):
        files.remove(os.path.join(directory, name))


def _load(path, plan_sha256, check):
    """Return the entry in an entry file, or `None` if it is damaged or of another plan."""
    try:
        values = read_json_object(path)
        entry = check(values, path)
        return entry if values.pop("plan", None) == plan_sha256 else None
    except UserError:
        return None


def check_entry(entry: Any, location: str) -> ShardEntry:
    """Check and return the manifest entry of a shard.

    Args:
        entry: A parsed JSON value.
        location: File and key, for the error message.

    Raises:
        UserError: If a value is missing or invalid.
    """
    name = field(entry, "file", str, location)
    if name != os.path.basename(name) or "tfrecord" not in name or len(name) > MAX_NAME_LENGTH:
        raise UserError(f"{location}: file is {name!r:.40}; expected the name of a TFRecord file")
    field(entry, "sha256", str, location)
    for size in ("records", "bytes", "tokens", "random_next"):
        check_size(entry, size, location)
    return entry


def check_size(
    node: Mapping[str, Any], name: str, location: str, minimum: int = 0, maximum: int = 1 << 62
) -> None:
    """Check an integer of a JSON object.

    Args:
        node: The object.
        name: Key of the integer.
        location: File and position of the object, for the error message.
        minimum: Lowest valid value.
        maximum: Highest valid value.

    Raises:
        UserError: If it is missing or not in the range.
    """
    size = field(node, name, int, location)
    if not minimum <= size <= maximum:
        raise UserError(
            f"{location}: {name} is {size!r:.40}; expected an integer in [{minimum}, {maximum}]"
        )
