"""Tuned values: thresholds and temperatures, which belong to the checkpoint they were fitted to.

task.json describes the requested task and does not change. The values are in checkpoint.json,
written in one atomic write:

    "tuned": {"values": {field of the task: value}, "metrics": {name: value with the tuned values},
              "file": path of the dev file, "sha256": hash of that file, "warnings": [line]}

Earlier versions wrote the values to task.json; those belong to the best checkpoint.
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
    if tuned is None and step == run.checkpoints.best_or_latest_step():
        return _of_earlier_versions(run, step)
    return tuned


def task_at(run: Run, step: int) -> Task:
    """Return the run's task with the values tuned for the checkpoint at a step, if any."""
    task = task_from_dict(run.task or {})
    return task.with_tuned((tuned_at(run, step) or {}).get("values", {}))


def _of_earlier_versions(run, step):
    task = task_from_dict(run.task)
    values = {name: run.task[name] for name in task.tunable_fields}
    if not values or None in values.values():
        return None
    file, *_ = run.train.get("settings", {}).get("dev") or [None]
    # Earlier versions wrote the metrics of tuning to metrics.jsonl, with the prefix tuned_.
    metrics = {
        name.removeprefix("tuned_"): value
        for line in run.metrics()
        if line["step"] == step
        for name, value in line.items()
        if name.startswith("tuned_")
    }
    sha256 = (run.train.get("data") or {}).get(file)
    return {"values": values, "metrics": metrics, "file": file, "sha256": sha256, "warnings": []}
