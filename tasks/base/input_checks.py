"""Checks of a command's inputs before TensorFlow is imported, which takes seconds.

A task is represented by the values of its task.json, or by the options that it is created with.
"""

from collections.abc import Mapping
from typing import Any

from bert_tf.runs.run import Run
from bert_tf.storage import files
from tasks.base.task_types import row_reader
from tasks.data.readers.rows import check_any_good, check_good


def check_rows(
    task: Mapping[str, Any] | None, path: str, labelled: bool, accepts_bad: bool = False
) -> None:
    """Check that the rows of a file have the format that a task requires.

    Args:
        task: The task's "kind" and the fields that its reader needs; None for a pretrained run.
        path: The file.
        labelled: Whether rows have labels. Their values are checked later, by the task.
        accepts_bad: Whether the command continues after a bad row, if not all rows are bad.

    Raises:
        UserError: A row is bad, or the file is.
    """
    task = task or {"kind": "pretrained"}
    rows = row_reader(task["kind"])(task, path, labelled)
    if accepts_bad:
        check_any_good(rows)
        return
    check_good(rows)


def check_run(path: str, checkpoint: str | None = None) -> Run | None:
    """Return a run that has a checkpoint of a name, or any; `None` for a remote path.

    A remote path cannot be read without TensorFlow. Raises UserError if there is none.
    """
    if files.is_remote(path):
        return None
    run = Run.open(path)
    run.checkpoints.step_of(checkpoint) if checkpoint else run.checkpoints.best_or_latest_step()
    return run
