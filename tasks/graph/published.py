"""Published SavedModels on disk, without TensorFlow. `tasks.graph.pipeline` loads them."""

from __future__ import annotations

import os
import re
from typing import Any

from bert_tf.config import read_json_object
from bert_tf.errors import UserError
from bert_tf.runs.run import Run, read_task
from bert_tf.storage import files, format_versions, strict_json

TASK_OF_VERSION = "assets.extra/task.json"
EXPORT_OF_VERSION = "assets.extra/export.json"
MAX_VERSION = 2**63 - 1  # The highest that TensorFlow Serving reads.
_VERSION = re.compile("[0-9]+")


def version_directories(path: str | os.PathLike[str]) -> dict[int, str]:
    """Return the directories of versions at a path by their numbers, oldest first.

    Names are read as in TensorFlow Serving: 007 is version 7, unless there is a 7. Directories of
    other names, such as other digits than ASCII or numbers above `MAX_VERSION`, are no versions.

    Args:
        path: Existing directory.
    """
    names = sorted(filter(_VERSION.fullmatch, os.listdir(path)), key=len, reverse=True)
    found = {int(name): os.path.join(path, name) for name in names}
    return {
        number: found[number]
        for number in sorted(found)
        if number <= MAX_VERSION and files.isdir(found[number])
    }


def check_versions(path: str) -> None:
    """Raise UserError unless --output_dir is, or may become, a directory of versions."""
    if not files.isdir(path) and os.path.lexists(path):
        raise UserError(f"--output_dir={path}: expected a directory, received a file")
    if is_saved_model(path):
        raise UserError(
            f"--output_dir={path}: is a version itself; name the directory of versions, "
            f"{os.path.dirname(os.path.abspath(path))}"
        )
    if Run.exists(path):
        raise UserError(f"--output_dir={path}: is a run directory; choose another directory")


def is_saved_model(path: str) -> bool:
    """Return whether a directory is a SavedModel, such as a published version."""
    return files.exists(os.path.join(path, "saved_model.pb"))


def published_version(path: str) -> str | None:
    """Return the SavedModel at a path, or in its directory of the newest version, or `None`."""
    if files.is_remote(path) or not os.path.isdir(path):
        return None
    if is_saved_model(path):
        return path
    found = list(filter(is_saved_model, version_directories(path).values()))
    return found[-1] if found else None


def published_device(version: str | os.PathLike[str]) -> str | None:
    """Return "cpu" or "gpu", for which a SavedModel was published; `None` if it is another one."""
    path = os.path.join(version, EXPORT_OF_VERSION)
    if not files.exists(path):
        return None
    values = format_versions.without_version(read_json_object(path), path)
    return strict_json.field(values, "device", str, path)


def published_task(version: str) -> dict[str, Any]:
    """Return the values of the task.json in a published version."""
    path = os.path.join(version, TASK_OF_VERSION)
    if not files.exists(path):
        raise UserError(f"{path}: no such file; expected a version that bert_tf published")
    return read_task(path)
