"""The task types, and the datasets known by name.

A new task type is a module and an entry here. This module is free of TensorFlow, so that flags and
the inputs of commands can be checked before it is imported; tasks/base/task.py creates the tasks.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.weights import sources
from tasks.data.readers.glue import GLUE
from tasks.data.readers.rows import (
    BadRow,
    Example,
    FileRows,
    Source,
    check_any_good,
    check_good,
)

# Settings whose defaults depend on the task type; those of training are google-research/bert's
# (Devlin et al. 2019, A.3).
DEFAULTS: dict[str, Any] = {
    "max_seq_length": 128,
    "global_batch_size": 32,
    "epochs": 3,
    "learning_rate": 5e-5,
}
# Peak rate of a classifier with a new head on the mean of the tokens (docs/few-rows.md).
MEAN_POOLING_RATE = 3e-4


@dataclasses.dataclass(frozen=True)
class TaskType:
    """A task type. Its flags are the fields of `FinetuneSettings` that name it.

    Attributes:
        class_path: "module:class".
        rows_path: "module:function" of the function that reads rows without TensorFlow, so that
            files are checked before it is imported. It takes a file, whether the rows have labels,
            and as keyword arguments the values of a task.json, or, before training, the options of
            the task. The published files of GLUE have their own one.
        needs_dev: Whether it always has a field to tune on dev data, and predicts nothing before.
        has_teacher: Whether a teacher's outputs can be learned.
        defaults: Settings that differ from `DEFAULTS`.
    """

    class_path: str
    rows_path: str = "tasks.data.readers.rows:read_texts"
    needs_dev: bool = False
    has_teacher: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


TASK_TYPES = {
    "classification": TaskType("tasks.types.classification.text_classifier:ClassificationTask"),
    "regression": TaskType("tasks.types.regression:RegressionTask"),
    "tagging": TaskType("tasks.types.tagging:TaggingTask", "tasks.data.readers.tagged:read_tagged"),
    "span_qa": TaskType(
        "tasks.types.question_answering:QuestionAnsweringTask",
        "tasks.data.readers.squad:read_questions",
        defaults={"max_seq_length": 384},
    ),
    "multiple_choice": TaskType(
        "tasks.types.multiple_choice:MultipleChoiceTask", "tasks.data.readers.choices:read_choices"
    ),
    "ranking": TaskType(
        "tasks.types.ranking:RankingTask",
        "tasks.data.readers.ranking:read_rankings",
        defaults={"max_seq_length": 256, "global_batch_size": 8, "learning_rate": 2e-5},
    ),
    "anomaly": TaskType(
        "tasks.types.anomaly:AnomalyTask",
        "tasks.data.readers.rows:read_texts_with_optional_labels",
        needs_dev=True,
        has_teacher=False,
        defaults={"global_batch_size": 128, "epochs": 20, "learning_rate": 3e-3},
    ),
    "similarity": TaskType(
        "tasks.types.similarity.text_embedder:SimilarityTask",
        "tasks.data.readers.pairs:read_pairs",
        defaults={"global_batch_size": 64, "epochs": 1},
    ),
}
_GLUE_ROWS = "tasks.data.readers.glue:read_glue"
# Task types without labelled rows; bert-tf finetune does not offer them.
UNLABELLED_TASK_TYPES = {
    "pretrained": TaskType("tasks.types.masked_lm:MaskedLmTask", defaults={"max_seq_length": 512}),
}
_ALL = collections.ChainMap(TASK_TYPES, UNLABELLED_TASK_TYPES)  # With later entries of both.


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
    **{name: Dataset(task.kind, {"file_format": name}) for name, task in GLUE.items()},
    "conll": Dataset("tagging", {}),
    "squad": Dataset("span_qa", {"may_be_impossible": False}),
    "squad2": Dataset("span_qa", {"may_be_impossible": True}),
    "swag": Dataset("multiple_choice", {"file_format": "swag"}),
    "arc": Dataset("multiple_choice", {"file_format": "arc"}),
}


def default_settings(kind: str) -> dict[str, Any]:
    """Return `DEFAULTS` for a task type, which need not be known."""
    return {**DEFAULTS, **(_ALL[kind].defaults if kind in _ALL else {})}


def read_rows_of(
    task: Mapping[str, Any], source: Source, labelled: bool = True
) -> Iterable[Example | BadRow]:
    """Return the rows of a file, which is not read at once.

    Args:
        task: Values of a task.json; or, before training, "kind" and the options of the task.
        source: A file in a format of the task.
        labelled: Whether the rows have labels. Of rows that are neither labelled nor read
            "for_training", no bad row is known: each needs a prediction.

    Raises:
        UserError: If the task type is unknown, and in an iteration what its reader raises.
    """
    path = task_type(task["kind"]).rows_path
    if path == TaskType.rows_path and task.get("file_format") in GLUE:
        path = _GLUE_ROWS
    rows = imported(path)(source, labelled, **task)
    return rows if labelled or task.get("for_training") else map(_unknown, rows)


def _unknown(row):
    return dataclasses.replace(row, is_known=False) if isinstance(row, BadRow) else row


def read_file(task: Mapping[str, Any], path: str | os.PathLike, labelled: bool = True) -> FileRows:
    """Return the rows of a file that is opened once; arguments as of `read_rows_of`."""
    task_type(task["kind"])  # Before the file is opened.
    return FileRows(path, lambda file: read_rows_of(task, file, labelled))


def check_unlabelled(task: Mapping[str, Any], path: str, accepts_bad: bool = False) -> None:
    """Check that the rows of a file have the format of a task, apart from labels.

    Args:
        task: As of `read_rows_of`.
        path: The file.
        accepts_bad: Whether the command continues after a bad row, if not all rows are bad.

    Raises:
        UserError: A row is bad, or the file is.
    """
    check = check_any_good if accepts_bad else check_good
    check(read_rows_of(task, path, labelled=False))


def check_run(path: str, checkpoint: str | None = None) -> Run | None:
    """Return a run that has a checkpoint of a name, or any; `None` for another model.

    That may be the one at a remote path, which cannot be read without TensorFlow. Raises UserError
    if there is none.
    """
    if files.is_remote(path):
        return None
    if checkpoint is None and not Run.exists(path):
        sources.check(path, as_embedder=True)
        return None
    run = Run.open(path)
    run.checkpoints.step_of(checkpoint) if checkpoint else run.checkpoints.best_or_latest_step()
    return run


def task_type(kind: str, task_types: Mapping[str, TaskType] = _ALL) -> TaskType:
    """Return one of some task types by its name; raises UserError if it is unknown."""
    if kind not in task_types:
        raise UserError(
            f"task type {kind!r:.80}: expected one of {', '.join(TASK_TYPES)}; one of your own has "
            "to be registered first (docs/own-head.md)"
        )
    return task_types[kind]


def add_task_type(kind: str, task_type: TaskType) -> None:
    """Add a task type, unless there is one of this name."""
    _ALL.setdefault(kind, task_type)


def imported(path: str) -> Any:
    """Return an object by "module:name"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
