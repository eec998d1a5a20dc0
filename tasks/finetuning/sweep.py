"""Sweeps: fine-tuning with several seeds and learning rates, and a report of the results.

Results on small datasets vary by seed, and occasionally a run learns nothing (Devlin et al. 2019,
4.1; Mosbach et al. 2021), so one run says little.

    SWEEP/seed-1/                       a run, or with several learning rates
    SWEEP/learning_rate-2e-5-seed-1/
    SWEEP/sweep.json                    the report, written after the last run
    SWEEP/.bert_tf.lock                 lock of the writing process, while it runs
"""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bert_tf.errors import DivergenceError, UserError
from bert_tf.storage import files, ownership
from bert_tf.train.distribution import is_chief, make_strategy, names_lost_worker
from tasks.base.task import task_from_dict
from tasks.finetuning.recipe import finetune
from tasks.training.settings import format_number

if TYPE_CHECKING:
    import tensorflow as tf

    from tasks.finetuning.settings import DataRows, FinetuneSettings


@names_lost_worker
def sweep(
    settings: FinetuneSettings,
    log: Callable[[str], None] = lambda line: None,
    strategy: tf.distribute.Strategy | None = None,
    data: DataRows | None = None,
) -> dict[str, Any]:
    """Fine-tune one run after the other; write sweep.json and return its content, in worker 0.

    A second call resumes: finished runs are kept, others continue. A run that diverges is reported
    as failed and the sweep continues. A run that learned nothing ("degenerate") counts like any
    other, and is reported.

    Arguments as of `finetune`, with the settings and the strategy of all runs.

    Raises:
        UserError: If the output directory contains something else, and as `finetune`.
    """
    settings.check_is_no_run()
    # One strategy for all runs, since those of a process share the keys of their reductions.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu, log=log)
    # Only the chief writes; the other processes take part in training.
    if not is_chief(strategy):
        return _sweep(settings, log, strategy, data)
    _check_free(settings)
    with ownership.sole_writer(settings.output_dir):
        return _sweep(settings, log, strategy, data)


def _check_free(settings):
    """Raise UserError unless a sweep can start or resume in the output directory."""
    directory = settings.output_dir
    if files.exists(directory) and not files.isdir(directory):
        raise UserError(f"--output_dir={directory}: expected a directory, received a file")
    found = [name for name in files.listdir(directory) if name != ownership.LOCK]
    if found and not {"sweep.json", *settings.runs()} & {*found}:
        raise UserError(
            f"--output_dir={directory}: expected a sweep or no directory, received "
            f"{', '.join(found[:3])}; choose a new directory"
        )


def _sweep(settings, log, strategy, data):
    """Run the sweep; the caller holds the lock of its directory."""
    chief = is_chief(strategy)
    log_on_chief = log if chief else lambda line: None
    runs, results, metric = settings.runs(), {}, None
    data = data or settings.read_data()
    for number, (name, of_run) in enumerate(runs.items(), start=1):
        log_on_chief(f"sweep: run {number} of {len(runs)}, {of_run.output_dir}")
        try:
            # Finished runs are found as such and not trained again.
            run = finetune(of_run, log, strategy, data)
            metric = of_run.best_metric or task_from_dict(run.task).best_metric
            # The others may see the evaluation late, and log nothing.
            results[name] = _result(run) if chief else {}
        except DivergenceError as error:
            results[name] = {"failed": str(error)}
            log_on_chief(f"sweep: {of_run.output_dir} failed: {error}")
        run = None
        # Models and graphs are in reference cycles; without this each run's would stay in memory.
        gc.collect()
    report = _report(runs, results, metric)
    path = os.path.join(settings.output_dir, "sweep.json")
    if chief:
        files.atomic_write_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    for line in _table(report, settings.output_dir):
        log_on_chief(line)
    log_on_chief(f"finished: {path}")
    return report


def _result(run):
    """Return the score of a run's best checkpoint on the first dev file."""
    step = run.checkpoints.best_step()
    info = run.checkpoints.info(step)
    return {
        "step": step,
        "score": info["score"],
        "degenerate": info["metrics"].get("dev_degenerate") == 1.0,
        "metrics": info["metrics"],
    }


def _report(runs, results, metric):
    """Return the content of sweep.json."""
    rates = dict.fromkeys(settings.learning_rate for settings in runs.values())
    settings = [
        _setting(rate, {name: results[name] for name in runs if runs[name].learning_rate == rate})
        for rate in rates
    ]
    return {"metric": metric, "best": _best(results), "settings": settings, "runs": results}


def _setting(rate, results):
    """Summarize the runs of one learning rate; failed runs have no score and are not counted."""
    scores = [result["score"] for result in results.values() if "score" in result]
    return {
        "learning_rate": rate,
        "mean": statistics.fmean(scores) if scores else None,
        "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "best": _best(results),
        "degenerate": [name for name, result in results.items() if result.get("degenerate")],
        "failed": [name for name, result in results.items() if "failed" in result],
        "runs": list(results),
    }


def _best(results):
    """Return the name of the run with the highest score, the first of equals, or None."""
    scores = {name: result["score"] for name, result in results.items() if "score" in result}
    return max(scores, key=scores.get, default=None)


def _table(report, output_dir):
    """Yield one line per learning rate."""
    for setting in report["settings"]:
        rate = f"learning rate {format_number(setting['learning_rate'])}"
        count = len(setting["runs"])
        if setting["best"] is None:
            yield f"{rate}: failed: {', '.join(setting['failed'])}"
            continue
        best = report["runs"][setting["best"]]["score"]
        deviation = setting["standard_deviation"]
        parts = [
            f"{rate}: {report['metric']} mean {setting['mean']:.4f}",
            "" if deviation is None else f"standard deviation {deviation:.4f}",
            f"of {count - len(setting['failed'])} run{'s' * (count > 1)}",
            f"best {best:.4f} in {os.path.join(output_dir, setting['best'])}",
            *(
                f"{what}: {', '.join(setting[what])}"
                for what in ("degenerate", "failed")
                if setting[what]
            ),
        ]
        yield "  ".join(part for part in parts if part)
