"""Plans of shard directories: all that determines the shards, so that a changed one is named."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bert_tf.errors import UserError


def digest(plan: Any) -> str:
    """Return the SHA-256 of a plan, as JSON. Entry files of shards contain it."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def check_same_versions(directory: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that missing shards will be written with the versions of the others.

    Args:
        directory: The directory, for messages.
        before: Versions by package that it was created with.
        now: The installed ones.

    Raises:
        UserError: If they differ. The message names the first package.
    """
    for name in now:
        if before.get(name) != now[name]:
            raise UserError(
                f"{directory}: created with {name} {before.get(name)}, now {now[name]}, "
                "which may write other shards; install the former, or name a new --output_dir"
            )
