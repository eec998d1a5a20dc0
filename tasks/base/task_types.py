"""The task types, and the datasets known by name.

A new task type is a module and an entry here. This module is free of TensorFlow, so that flags can
be checked before it is imported; tasks/base/task.py creates the tasks.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import BadRow, Example, FileRows, Source

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
        rows_path: "module:function" of the function that reads rows without TensorFlow, so that
            files are checked before it is imported. It takes the values of a task.json (or, before
            training, the options of the task), a file, and whether the rows have labels.
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
    "ranking": TaskType(
        "tasks.types.ranking:RankingTask",
        "tasks.data.readers.ranking:task_rows",
        defaults={"max_seq_length": 256, "global_batch_size": 8, "learning_rate": 2e-5},
    ),
    "anomaly": TaskType(
        "tasks.types.anomaly.anomaly_detector:AnomalyTask",
        "tasks.data.readers.rows:rows_with_optional_labels",
        needs_dev=True,
        has_teacher=False,
        defaults={"global_batch_size": 128, "epochs": 20, "learning_rate": 3e-3},
    ),
    "similarity": TaskType(
        "tasks.types.similarity.text_embedder:SimilarityTask",
        "tasks.data.readers.pairs:task_rows",
        defaults={"global_batch_size": 64, "epochs": 1},
    ),
}
# Task types without labelled rows; bert-tf finetune does not offer them.
UNLABELLED_TASK_TYPES = {
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


RowReader = Callable[[Mapping[str, Any], Source, bool], Iterable[Example | BadRow]]


def row_reader(kind: str) -> RowReader:
    """Import and return the function of `TaskType.rows_path`; raises UserError without a type."""
    return imported(task_type(kind, {**TASK_TYPES, **UNLABELLED_TASK_TYPES}).rows_path)


def read_file(task: Mapping[str, Any], path: str | os.PathLike, labelled: bool = True) -> FileRows:
    """Return the rows of a file that is opened once.

    `task` has the values of a task.json; or, before training, "kind" and the options of the task.
    """
    read = row_reader(task["kind"])
    return FileRows(path, lambda file: read(task, file, labelled))


def task_type(kind: str, task_types: Mapping[str, TaskType]) -> TaskType:
    """Return one of some task types by its name; raises UserError if it is unknown."""
    if kind not in task_types:
        raise UserError(f"task type {kind!r:.80}: expected one of {', '.join(TASK_TYPES)}")
    return task_types[kind]


def imported(path: str) -> Any:
    """Return an object by "module:name"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
