"""Published SavedModels on disk, without TensorFlow. `tasks.serving` loads them."""

from __future__ import annotations

import os
from typing import Any

from bert_tf import files
from bert_tf.config import read_json_object
from bert_tf.errors import UserError

_GRAPH = "saved_model.pb"


def published_version(path: str) -> str | None:
    """Return the directory of the SavedModel at a path, or of its newest version.

    Args:
        path: Directory of one version, or of versions. For any other the result is `None`.
    """
    if files.is_remote(path) or not os.path.isdir(path):
        return None
    if files.exists(os.path.join(path, _GRAPH)):
        return path
    found = [name for name in os.listdir(path) if name.isdigit()]
    found = [name for name in found if files.exists(os.path.join(path, name, _GRAPH))]
    return os.path.join(path, max(found, key=int)) if found else None


def published_task(version: str) -> dict[str, Any]:
    """Return the values of the task.json in a published version."""
    path = os.path.join(version, "assets.extra", "task.json")
    if not files.exists(path):
        raise UserError(f"{path}: no such file; expected a version that bert_tf published")
    return read_json_object(path)
