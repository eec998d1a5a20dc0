"""Checks of a command's inputs before TensorFlow is imported, which takes seconds.

A task is described by the values of its task.json, or by the options that it will be made with.
"""

import itertools

from bert_tf import files
from bert_tf.run import Run
from tasks.readers.choices import read_choices
from tasks.readers.glue import GLUE, read_glue
from tasks.readers.records import raise_bad_rows
from tasks.readers.squad import read_questions
from tasks.readers.tables import read_rows
from tasks.readers.tagged import read_tagged


def check_rows(task: dict, path: str, labelled: bool, first_only: bool = False) -> None:
    """Raise UserError at the first row of a file that cannot be read in the form of a task.

    Args:
        task: "kind" of a task and what its reader takes; `None` for a run without a task.
        labelled: Whether rows have labels. What they are is looked at when the task reads them.
        first_only: Whether only the head of the file is looked at, as where bad rows are answered.
    """
    rows = _rows(task or {"kind": "pretrained"}, path, labelled)
    for _ in itertools.islice(rows, 1) if first_only else raise_bad_rows(rows):
        pass


def check_run(path: str, checkpoint: str | None = None) -> Run | None:
    """Return a run that can be opened at a checkpoint, or `None` where only TensorFlow reaches.

    Raises UserError if it is no run, or has no such checkpoint.
    """
    if files.is_remote(path):
        return None
    run = Run.open(path)
    run.checkpoints.step_of(checkpoint) if checkpoint else run.checkpoints.best_or_latest_step()
    return run


def _rows(task, path, labelled):
    kind, file_format = task["kind"], task.get("file_format", "rows")
    columns, label = tuple(task.get("text_columns", ("text",))), task.get("label_column")
    if kind == "span_qa":
        return read_questions(path, labelled)
    if kind == "multiple_choice":
        return read_choices(path, file_format, labelled)
    if kind == "tagging":
        return read_tagged(path, labelled, task.get("text_column", columns[0]))
    if file_format in GLUE:
        return read_glue(file_format, path, labelled)
    if labelled and kind == "anomaly":
        optional = () if label else ("label",)
        return read_rows(path, (*columns, *filter(None, [label])), optional=optional)
    label = label or "label"
    lists = (label,) if task.get("multi_label") else ()
    return read_rows(path, (*columns, *([label] if labelled else [])), lists=lists)
