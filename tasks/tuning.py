"""Tuned values: thresholds and temperatures, which belong to the checkpoint they were fitted to.

task.json holds what was asked for and does not change. The values are in checkpoint.json, written
at once with all that is said of them:

    "tuned": {"values": {field of the task: value}, "metrics": {name: value, measured with them},
              "file": path of the dev file, "sha256": of that file, "warnings": [line]}

Earlier versions wrote the values to task.json; there they belong to the best checkpoint.
"""

from tasks.registry import task_from_dict


def tuned_at(run, step):
    """Return what was tuned for a checkpoint, as the module's docstring has it, or `None`."""
    tuned = run.checkpoints.info(step).get("tuned")
    if tuned is None and step == run.checkpoints.best_or_latest_step():
        return _of_earlier_versions(run, step)
    return tuned


def task_at(run, step):
    """Return the task of a run with the values that were tuned for a checkpoint, or without any."""
    task = task_from_dict(run.task)
    return task.with_tuned((tuned_at(run, step) or {}).get("values", {}))


def _of_earlier_versions(run, step):
    task = task_from_dict(run.task)
    values = {name: run.task[name] for name in task.tunable_fields}
    if not values or None in values.values():
        return None
    file, *_ = run.train.get("settings", {}).get("dev") or [None]
    metrics = {
        name.removeprefix("tuned_"): value
        for record in run.metrics()
        if record["step"] == step
        for name, value in record.items()
        if name.startswith("tuned_")
    }
    sha256 = (run.train.get("data") or {}).get(file)
    return {"values": values, "metrics": metrics, "file": file, "sha256": sha256, "warnings": []}
