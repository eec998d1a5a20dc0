"""Create tasks by the names of their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bert_tf.storage.strict_json import field
from tasks.base.task_types import TASK_TYPES, UNLABELLED_TASK_TYPES, imported, task_type

if TYPE_CHECKING:
    from tasks.base.task import Task


def task_class(kind: str) -> type[Task]:
    """Import and return the class of a task type that is trained on labelled rows.

    Raises:
        UserError: If the task type is unknown.
    """
    return imported(task_type(kind, TASK_TYPES).class_path)


def task_from_dict(values: Mapping[str, Any]) -> Task:
    """Create the task of any type from the values of a run's task.json.

    Raises:
        UserError: If a value is missing, unknown or of a wrong type.
    """
    values = dict(values)
    kind = field(values, "kind", str, "task.json")
    del values["kind"]
    of_kind = task_type(kind, {**TASK_TYPES, **UNLABELLED_TASK_TYPES})
    return imported(of_kind.class_path).from_dict(values)
