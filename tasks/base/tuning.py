"""Tuned values: thresholds and temperatures, which belong to the checkpoint they were fitted to.

task.json describes the requested task and does not change. The values are in checkpoint.json,
written in one atomic write:

    "tuned": {"values": {field of the task: value}, "metrics": {name: value with the tuned values},
              "file": path of the dev file, "sha256": hash of that file, "warnings": [line]}

Weights converted from another program have one checkpoint; task.json has their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.base.registry import task_from_dict

if TYPE_CHECKING:
    from bert_tf.runs.run import Run
    from tasks.base.task import Task


def tuned_at(run: Run, step: int) -> dict[str, Any] | None:
    """Return what was tuned for the checkpoint at a step, or `None`."""
    tuned = run.checkpoints.info(step).get("tuned")
    if tuned is None and "settings" not in run.train:
        return _of_converted_weights(run)
    return tuned


def task_at(run: Run, step: int) -> Task:
    """Return the run's task with the values tuned for the checkpoint at a step, if any."""
    task = task_from_dict(run.task or {})
    return task.with_tuned((tuned_at(run, step) or {}).get("values", {}))


def _of_converted_weights(run):
    task = task_from_dict(run.task)
    values = {name: getattr(task, name) for name in task.tunable_fields}
    return {"values": values, "metrics": {}} if values and not task.untuned_fields else None
