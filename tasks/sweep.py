"""A sweep: one fine-tuning with several seeds and learning rates, and what came of each.

Results on small data sets differ by seed, and now and then a run learns nothing at all (Devlin et
al. 2019, 4.1; Mosbach et al. 2021): one run says little.

    SWEEP/seed-1/                       a run, or with several learning rates
    SWEEP/learning_rate-2e-5-seed-1/
    SWEEP/sweep.json                    written once all runs are over
    SWEEP/.bert_tf.lock                 marker, and lock of the writing process
"""

import gc
import json
import os
import statistics

from bert_tf import files, ownership
from bert_tf.errors import DivergenceError, UserError
from bert_tf.run import Run
from bert_tf.train.distribution import is_chief, make_strategy, names_lost_worker
from tasks.finetuning import finetune
from tasks.registry import task_from_dict
from tasks.settings import rate_name


@names_lost_worker
def sweep(settings, log=lambda line: None, strategy=None):
    """Fine-tunes what SweepSettings say, run after run; returns what sweep.json holds.

    Called again it goes on: each run is resumed, or found finished. A run that diverges counts as
    failed and the others go on; one that learned nothing ("degenerate") counts as any other, and
    is named. Otherwise as `finetune`.
    """
    settings.check_is_no_run()
    # One for all: strategies of one process share the keys of their reductions.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu)
    if not is_chief(strategy):
        return _sweep(settings, log, strategy)
    _check_free(settings)
    with ownership.sole_writer(settings.output_dir):
        return _sweep(settings, log, strategy)


def _check_free(settings):
    """Raise UserError unless a sweep can start or resume here."""
    directory = settings.output_dir
    if files.exists(directory) and not files.isdir(directory):
        raise UserError(f"--output_dir={directory}: is a file; expected a directory")
    found = files.listdir(directory)
    if found and not ownership.is_ours(directory):  # Sweeps of earlier versions have no marker.
        if not any(Run.exists(run.output_dir) for run in settings.runs().values()):
            raise UserError(
                f"--output_dir={directory}: there is something else there; name a new directory "
                f"(found {', '.join(found[:3])}, but no sweep)"
            )


def _sweep(settings, log, strategy):
    """Run the sweep; the caller holds its directory."""
    chief = is_chief(strategy)
    tell = log if chief else lambda line: None
    runs, results, metric = settings.runs(), {}, None
    for number, (name, of_run) in enumerate(runs.items(), start=1):
        tell(f"sweep: run {number} of {len(runs)}, {of_run.output_dir}")
        try:
            run = finetune(of_run, log, strategy)
            metric = task_from_dict(run.task).best_metric
            results[name] = _result(run)
        except DivergenceError as error:
            results[name] = {"failed": str(error)}
            tell(f"sweep: {of_run.output_dir} failed: {error}")
        run = None
        gc.collect()  # Models and graphs hold themselves: without it each run's would stay.
    report = _report(runs, results, metric)
    path = os.path.join(settings.output_dir, "sweep.json")
    if chief:
        files.atomic_write_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    for line in _table(report, settings.output_dir):
        tell(line)
    tell(f"finished: {path}")
    return report


def _result(run):
    """What the best checkpoint of a run scored on the first dev file."""
    step = run.checkpoints.best_step()
    info = run.checkpoints.info(step)
    return {
        "step": step,
        "score": info["score"],
        "degenerate": info["metrics"].get("dev_degenerate") == 1.0,
        "metrics": info["metrics"],
    }


def _report(runs, results, metric):
    """{"metric", "best": a run's name, "settings": a dict for each learning rate}."""
    rates = dict.fromkeys(settings.learning_rate for settings in runs.values())
    settings = [
        _setting(rate, {name: results[name] for name in runs if runs[name].learning_rate == rate})
        for rate in rates
    ]
    return {"metric": metric, "best": _best(results), "settings": settings, "runs": results}


def _setting(rate, results):
    """The runs of one learning rate together; those that failed have no score to count."""
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
    """The name of the run of the highest score, the first of equals; None if all failed."""
    scores = {name: result["score"] for name, result in results.items() if "score" in result}
    return max(scores, key=scores.get, default=None)


def _table(report, output_dir):
    """A line for each learning rate."""
    for setting in report["settings"]:
        rate = f"learning rate {rate_name(setting['learning_rate'])}"
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
