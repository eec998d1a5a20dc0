"""Registry of task types and of datasets known by name.

A new task type is a module and an entry here. The registry is free of TensorFlow, so that flags can
be checked before it is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bert_tf.errors import UserError
from bert_tf.storage.strict_json import field

if TYPE_CHECKING:
    from tasks.base.task import Task


# Settings whose defaults depend on the task type; those of training are google-research/bert's
# (Devlin et al. 2019, A.3).
DEFAULTS: dict[str, Any] = {
    "max_seq_length": 128,
    "global_batch_size": 32,
    "epochs": 3,
    "learning_rate": 5e-5,
}


@dataclasses.dataclass(frozen=True)
class TaskType:
    """A task type. Its flags are the fields of `FinetuneSettings` that name it.

    Attributes:
        class_path: "module:class".
        rows_path: "module:function" of the function that reads rows without TensorFlow, to check
            files before it is imported. It takes the values of a task.json (or, before training,
            the options of the task), a path, and whether the rows have labels.
        needs_dev: Whether it always has a field to tune on dev data.
        has_teacher: Whether a teacher's outputs can be learned.
        defaults: Settings that differ from `DEFAULTS`.
    """

    class_path: str
    rows_path: str = "tasks.data.readers.glue:task_rows"
    needs_dev: bool = False
    has_teacher: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


TASK_TYPES = {
    "classification": TaskType("tasks.types.classification.text_classifier:ClassificationTask"),
    "regression": TaskType("tasks.types.regression:RegressionTask"),
    "tagging": TaskType(
        "tasks.types.tagging.token_classifier:TaggingTask", "tasks.data.readers.tagged:task_rows"
    ),
    "span_qa": TaskType(
        "tasks.types.question_answering.question_answerer:QuestionAnsweringTask",
        "tasks.data.readers.squad:task_rows",
        defaults={"max_seq_length": 384},
    ),
    "multiple_choice": TaskType(
        "tasks.types.multiple_choice:MultipleChoiceTask", "tasks.data.readers.choices:task_rows"
    ),
    "anomaly": TaskType(
        "tasks.types.anomaly.anomaly_detector:AnomalyTask",
        "tasks.data.readers.tables:rows_with_optional_labels",
        needs_dev=True,
        has_teacher=False,
        defaults={"global_batch_size": 128, "epochs": 20, "learning_rate": 3e-3},
    ),
}
# Task types without labelled rows; tasks.finetune does not offer them.
UNLABELLED_TASK_TYPES = {
    "embedding": TaskType("tasks.types.embedding:EmbeddingTask"),
    "pretrained": TaskType("tasks.types.masked_lm:MaskedLmTask", defaults={"max_seq_length": 512}),
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
    # GLUE (Wang et al. 2019): columns, labels and metrics are in tasks/data/readers/glue.py.
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


def default_settings(kind: str) -> dict[str, Any]:
    """Return `DEFAULTS` for a task type, which need not be known."""
    task_type = {**TASK_TYPES, **UNLABELLED_TASK_TYPES}.get(kind)
    return {**DEFAULTS, **(task_type.defaults if task_type else {})}


def task_class(kind: str) -> type[Task]:
    """Import and return the class of a task type that is trained on labelled rows.

    Raises:
        UserError: If the task type is unknown.
    """
    return _imported(_task_type(kind, TASK_TYPES).class_path)


def task_from_dict(values: Mapping[str, Any]) -> Task:
    """Create the task of any type from the values of a run's task.json.

    Raises:
        UserError: If a value is missing, unknown or of a wrong type.
    """
    values = dict(values)
    kind = field(values, "kind", str, "task.json")
    del values["kind"]
    task_type = _task_type(kind, {**TASK_TYPES, **UNLABELLED_TASK_TYPES})
    return _imported(task_type.class_path).from_dict(values)


def row_reader(kind: str) -> Callable[[Mapping[str, Any], str, bool], Iterable[Any]]:
    """Import and return the function of a task type's `TaskType.rows_path`.

    Raises:
        UserError: If the task type is unknown.
    """
    return _imported(_task_type(kind, {**TASK_TYPES, **UNLABELLED_TASK_TYPES}).rows_path)


def _task_type(kind, task_types):
    if kind not in task_types:
        raise UserError(f"task type {kind!r:.80}: expected one of {', '.join(TASK_TYPES)}")
    return task_types[kind]


def _imported(path):
    """Return an object by "module:name"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
