"""Registry of task types and of datasets known by name.

A new task type is a module and an entry here. The registry is free of TensorFlow, so that flags can
be checked before it is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bert_tf.errors import UserError
from bert_tf.strict_json import field

if TYPE_CHECKING:
    from tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TaskType:
    """A task type. Its flags are the fields of `tasks.settings.FinetuneSettings` that name it.

    Attributes:
        class_path: "module:class".
        needs_dev: Whether it always has a field to tune on dev data.
    """

    class_path: str
    needs_dev: bool = False


TASK_TYPES = {
    "classification": TaskType("tasks.classification:Classification"),
    "regression": TaskType("tasks.regression:Regression"),
    "tagging": TaskType("tasks.tagging:Tagging"),
    "span_qa": TaskType("tasks.span_qa:SpanQA"),
    "multiple_choice": TaskType("tasks.multiple_choice:MultipleChoiceTask"),
    "anomaly": TaskType("tasks.anomaly:Anomaly", needs_dev=True),
}
# Task types without labelled rows; tasks.finetune does not offer them.
UNLABELLED_TASK_TYPES = {
    "embedding": TaskType("tasks.embedding:Embedding"),
    "pretrained": TaskType("tasks.masked_lm:MaskedLm"),
}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A published dataset.

    Attributes:
        kind: Name of its task type.
        options: Fields of the task that its file format defines.
    """

    kind: str
    options: dict[str, Any]


DATASETS = {
    # GLUE (Wang et al. 2019): columns, labels and metrics are in tasks/readers/glue.py.
    **{
        name: Dataset("classification", {"file_format": name})
        for name in ("cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli")
    },
    "stsb": Dataset("regression", {"file_format": "stsb"}),
    "conll": Dataset("tagging", {}),
    "squad": Dataset("span_qa", {"may_be_impossible": False}),
    "squad2": Dataset("span_qa", {"may_be_impossible": True}),
    "swag": Dataset("multiple_choice", {"file_format": "swag"}),
    "arc": Dataset("multiple_choice", {"file_format": "arc"}),
}
NAMES = (*TASK_TYPES, *DATASETS)


def task_class(kind: str) -> type[Task]:
    """Import and return the class of a task type that is trained on labelled rows.

    Raises:
        UserError: If the task type is unknown.
    """
    return _import_class(kind, TASK_TYPES)


def task_from_dict(values: Mapping[str, Any]) -> Task:
    """Create the task of any type from the values of a run's task.json.

    Raises:
        UserError: If a value is missing, unknown or of a wrong type.
    """
    values = dict(values)
    kind = field(values, "kind", str, "task.json")
    del values["kind"]
    return _import_class(kind, {**TASK_TYPES, **UNLABELLED_TASK_TYPES}).from_dict(values)


def _import_class(kind, task_types):
    if kind not in task_types:
        raise UserError(f"task type {kind!r:.80}: expected one of {', '.join(TASK_TYPES)}")
    module, name = task_types[kind].class_path.split(":")
    return getattr(importlib.import_module(module), name)
