"""Files that outlive the version of bert_tf that wrote them: their format version and new fields.

task.json, train.json, checkpoint.json and manifest.json have the key "format_version". A field that
a file does not have, because it is older, has the value that reproduces what was done then: its
default. A field that nothing is known about is ignored, or refused by name if the file is newer.

In files without the key, such as tasks that other formats hold, the version is the current one.
"""

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any

from bert_tf.errors import UserError

KEY = "format_version"
VERSION = 1  # Raised when a field is added.
# Fields and flags of earlier versions, with the value that stands for what is done now. Files with
# this value are read; with another one they are refused.
REMOVED: dict[str, Any] = {"unescape_html": False, "prior_bias": False}


def with_version(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file: the values and the format version."""
    return {KEY: VERSION, **values}


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field without those that `REMOVED` has."""
    return {name: value for name, value in values.items() if (name, value) not in REMOVED.items()}


def without_version(
    values: Mapping[str, Any], location: str, fields: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return the values of a file's content; by default unknown `fields` are not refused.

    Raises:
        UserError: A newer version has written a field that is not known here, or the format version
            is none.
    """
    rest = dict(values)
    version = rest.pop(KEY, VERSION)
    if type(version) is not int or version < 1:
        raise UserError(f'{location}: "{KEY}" is {version!r:.40}; expected an integer >= 1')
    unknown = sorted(rest.keys() - set(fields)) if fields is not None else []
    if unknown and version > VERSION:
        raise UserError(
            f"{location}: unknown field {', '.join(unknown):.200} of format {version}; a newer "
            f"version of bert_tf wrote it, this one reads up to format {VERSION}; update bert_tf"
        )
    return rest


def check_same_settings(
    directory: str,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    defaults: Mapping[str, Any],
    may_change: Set[str] = frozenset(),
) -> None:
    """Check that a command is run with the settings that a directory was created with.

    All are settings by flag; `before` are those of the directory, as in a file. `defaults`, and
    `REMOVED`, are for what one side does not have. Flags in `may_change` may differ.

    Raises:
        UserError: If they differ. The message names the first flag.
    """
    now, defaults = json.loads(json.dumps([dict(now), dict(defaults)]))  # Tuples become lists.
    of_missing = {**REMOVED, **defaults}
    for name in sorted((set(before) | set(now)) - may_change):
        was, value = (of.get(name, of_missing.get(name)) for of in (before, now))
        if was == value:
            continue
        if name not in {**now, **defaults}:
            raise UserError(
                f"{directory}: was created with --{name}={was!r:.80}, which this version of "
                "bert_tf does not have; update bert_tf, or name a new --output_dir"
            )
        raise UserError(
            f"--{name}: was {_as_flag(was)} when {directory} was created, is now "
            f"{_as_flag(value)}; pass the old value to resume, or a new --output_dir"
        )


def _as_flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else repr(value)
