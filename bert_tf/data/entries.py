"""Manifest entries of shards, each in an entry file until the manifest is complete.

SHARDS/examples-00007-of-00064.tfrecord      one shard
SHARDS/.examples-00007-of-00064.json         its entry
"""

import json
import os
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from bert_tf import files
from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.strict_json import field

MAX_NAME_LENGTH = 255


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


def entry_name(number: int, num_shards: int) -> str:
    """Return the file name of a shard's entry."""
    return f".{shard_name(number, num_shards).removesuffix('.tfrecord')}.json"


def save(path: str, entry: ShardEntry, plan_sha256: str) -> None:
    """Write an entry file atomically.

    Args:
        path: The entry file.
        entry: The entry.
        plan_sha256: Digest of the plan in the manifest.
    """
    files.atomic_write_text(path, json.dumps({**entry, "plan": plan_sha256}))


def load(path: str, plan_sha256: str) -> ShardEntry | None:
    """Return the entry in an entry file, or `None` if it is damaged or of another plan."""
    try:
        values = read_json_object(path)
        entry = check(values, path)
        return entry if values.pop("plan", None) == plan_sha256 else None
    except UserError:
        return None


def check(entry: Any, location: str) -> ShardEntry:
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
