"""Sweeps: several seeds and learning rates, run one after the other, and their summary."""

import dataclasses
import gc
import json
import os
import signal
import statistics
import weakref

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.runs.checkpoints import read
from bert_tf.runs.run import Run
from bert_tf.storage import ownership
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.signals import Interrupted
from tasks.finetuning import sweep as sweep_module
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.finetuning.sweep import sweep
from tasks.metrics.checks import finite
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small


@pytest.fixture
def settings(huggingface_dir, complaints, tmp_path):
    values = dataclasses.asdict(
        small.settings(huggingface_dir, complaints, tmp_path / "sweep", epochs=1)
    )
    del values["learning_rate"]
    return FinetuneSettings(**{**values, "seeds": ("1", "2")})


def weights(path):
    run = Run.open(path)
    return read(run.checkpoints.path(run.checkpoints.steps()[-1]))


def assert_same(path, other):
    mine, theirs = weights(path), weights(other)
    assert set(mine) == set(theirs)
    for name, array in mine.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.slow
def test_a_later_run_is_bitwise_equal_to_a_single_one_and_the_sweep_summarizes_all(
    settings, tmp_path
):
    said = []
    report = sweep(settings, said.append)
    alone = dataclasses.replace(settings.runs()["seed-2"], output_dir=str(tmp_path / "alone"))
    assert_same(tmp_path / "sweep" / "seed-2", finetune(alone).path)
    first, second = weights(tmp_path / "sweep/seed-1"), weights(tmp_path / "sweep/seed-2")
    assert any((first[name] != second[name]).any() for name in first)

    scores = []
    for name in ("seed-1", "seed-2"):
        checkpoints = Run.open(tmp_path / "sweep" / name).checkpoints
        info = checkpoints.info(checkpoints.best_step())
        assert report["runs"][name] == {
            "step": 4,
            "score": info["metrics"]["dev_accuracy"],
            "degenerate": bool(info["metrics"]["dev_degenerate"]),
            "metrics": info["metrics"],
        }
        scores.append(info["score"])
    assert report["metric"] == "accuracy"
    (of_rate,) = report["settings"]
    assert of_rate["learning_rate"] == 5e-5 and of_rate["runs"] == ["seed-1", "seed-2"]
    assert of_rate["mean"] == pytest.approx(sum(scores) / 2)
    assert of_rate["standard_deviation"] == pytest.approx(np.std(scores, ddof=1))
    best = "seed-2" if scores[1] > scores[0] else "seed-1"
    assert report["best"] == of_rate["best"] == best
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text()) == report
    assert said[-2].startswith(f"learning rate 5e-5: accuracy mean {sum(scores) / 2:.4f}  ")
    assert f"best {max(scores):.4f} in {tmp_path / 'sweep' / best}" in said[-2]
    assert said[-1] == f"finished: {tmp_path / 'sweep' / 'sweep.json'}"

    # Repeating the sweep trains nothing and prints the same summary.
    again = []
    assert sweep(settings, again.append) == report
    assert len([line for line in again if "nothing to do" in line]) == 2
    assert not [line for line in again if line.startswith("step ")]
    with pytest.raises(UserError, match="--epochs: was 1 when .*seed-1 was created, is now 2"):
        sweep(dataclasses.replace(settings, epochs=2))
    # With one more seed.
    longer = sweep(dataclasses.replace(settings, seeds=("1", "2", "3")))
    assert {name: longer["runs"][name] for name in report["runs"]} == report["runs"]
    assert longer["settings"][0]["runs"] == ["seed-1", "seed-2", "seed-3"]


@pytest.mark.slow
def test_a_sweep_stopped_in_its_second_run_resumes(settings, tmp_path, monkeypatch):
    original, count = TrainingLoop._steps, []

    def step(*arguments):
        logs = original(*arguments)
        count.append(1)
        if len(count) == 6:  # Each run has four steps.
            os.kill(os.getpid(), signal.SIGTERM)
        return logs

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_steps", step)
        with pytest.raises(Interrupted, match="saved at step 2 of 4 in .*seed-2; rerun"):
            sweep(settings)
    assert not (tmp_path / "sweep" / "sweep.json").exists()
    said = []
    sweep(settings, said.append)
    assert any("seed-1: finished at step 4, nothing to do" in line for line in said)
    assert "resuming at step 2 of 4" in said
    complete = dataclasses.replace(settings.runs()["seed-2"], output_dir=str(tmp_path / "whole"))
    assert_same(tmp_path / "sweep" / "seed-2", finetune(complete).path)
    assert (tmp_path / "sweep" / "sweep.json").exists()


@pytest.mark.slow
def test_a_grid_continues_after_a_run_that_diverges(settings, tmp_path):
    """Use a rate of 1e30, which is reported, and the other run still trains."""
    grid = dataclasses.replace(
        settings, seeds=("3",), learning_rates=("1e30", "2e-5"), warmup_proportion=0.0
    )
    said = []
    report = sweep(grid, said.append)
    runs = ["learning_rate-1e+30-seed-3", "learning_rate-2e-5-seed-3"]
    assert list(report["runs"]) == runs
    high, low = report["settings"]
    assert (high["learning_rate"], low["learning_rate"]) == (1e30, 2e-5)
    assert (high["failed"], high["best"], high["mean"]) == (runs[:1], None, None)
    assert (low["failed"], low["runs"], low["best"]) == ([], runs[1:], runs[1])
    assert low["standard_deviation"] is None
    assert "not finite" in report["runs"][runs[0]]["failed"]
    assert f"learning rate 1e+30: failed: {runs[0]}" in said
    assert len([line for line in said if line.endswith("in a new --output_dir")]) == 1
    assert weights(tmp_path / "sweep" / runs[1])["step"] == 4


def scripted(monkeypatch, infos):
    """Replace training by runs whose best checkpoint holds `infos`; exceptions are raised."""
    remaining = iter(infos)

    class Stub:
        best_metric = "f1"
        task = {}

        def __init__(self, info):
            self.checkpoints, self._info = self, info

        def best_step(self):
            return 7

        def info(self, step):
            return self._info

    def stub(settings, log, strategy, data):
        info = next(remaining)
        if isinstance(info, Exception):
            raise info
        os.makedirs(settings.output_dir, exist_ok=True)
        return Stub(info)

    monkeypatch.setattr(sweep_module, "finetune", stub)
    monkeypatch.setattr(sweep_module, "task_from_dict", lambda values: Stub)


def scored(score, degenerate=0.0):
    return {"score": score, "metrics": {"dev_f1": score, "dev_degenerate": degenerate}}


@pytest.mark.slow
def test_the_summary_metrics_by_hand(settings, tmp_path, monkeypatch):
    diverged = sweep_module.DivergenceError("not finite")
    scripted(monkeypatch, [scored(0.5), diverged, scored(0.9), scored(0.1, degenerate=1.0)])
    said = []
    report = sweep(dataclasses.replace(settings, seeds=tuple("3142")), said.append)
    assert report["settings"] == [
        {
            "learning_rate": 5e-5,
            "mean": pytest.approx(0.5),
            "standard_deviation": pytest.approx(0.4),
            "best": "seed-4",
            "degenerate": ["seed-2"],
            "failed": ["seed-1"],
            "runs": ["seed-3", "seed-1", "seed-4", "seed-2"],
        }
    ]
    assert report["settings"][0]["standard_deviation"] == statistics.stdev([0.5, 0.9, 0.1])
    assert said[-2] == (
        "learning rate 5e-5: f1 mean 0.5000  standard deviation 0.4000  of 3 runs  best 0.9000 in "
        f"{tmp_path / 'sweep' / 'seed-4'}  degenerate: seed-2  failed: seed-1"
    )
    scripted(monkeypatch, [scored(0.5)])
    (of_one,) = sweep(dataclasses.replace(settings, seeds=("3",)))["settings"]
    assert (of_one["mean"], of_one["standard_deviation"]) == (0.5, None)


def test_a_run_whose_outputs_are_not_finite_has_failed(settings, monkeypatch):
    with pytest.raises(UserError, match="received 1 of 2 that are NaN") as raised:
        finite([0.5, np.nan])
    scripted(monkeypatch, [raised.value, scored(0.5)])
    (of_rate,) = sweep(settings)["settings"]
    assert (of_rate["failed"], of_rate["best"]) == (["seed-1"], "seed-2")


def test_other_workers_read_no_evaluations(settings, monkeypatch):
    """They may see a file of worker 0 late: here there is no score yet."""
    scripted(monkeypatch, [{}, {}])
    monkeypatch.setattr(sweep_module, "is_chief", lambda strategy: False)
    said = []
    assert list(sweep(settings, said.append)["runs"]) == ["seed-1", "seed-2"]
    assert said == []


@pytest.mark.slow
def test_any_other_error_stops_the_sweep(settings, monkeypatch):
    scripted(monkeypatch, [scored(0.5), UserError("train.csv: no such file"), scored(0.5)])
    with pytest.raises(UserError, match="no such file"):
        sweep(dataclasses.replace(settings, seeds=("1", "2", "3")))


@pytest.mark.slow
def test_the_model_of_a_run_is_freed_before_the_next(settings, monkeypatch):
    original, models, alive = ClassificationTask.build_model, [], []

    def build(*arguments):
        alive.append(sum(model() is not None for model in models))
        model = original(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(ClassificationTask, "build_model", build)
    assert not gc.isenabled()  # The sweep itself has to free the models.
    sweep(settings)
    assert alive == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ("1", "x")}, "--seeds=1,x: expected integers, joined by commas"),
        ({"seeds": ("1", "1")}, "--seeds=1,1: expected distinct values"),
        ({"seeds": ("-1",)}, "--seed=-1: expected an integer >= 0"),
        ({"learning_rates": ("0",)}, "--learning_rate=0.0: expected a number > 0"),
        ({"learning_rates": ("high",)}, "--learning_rates=high: expected numbers"),
        ({"learning_rates": ("2e-5", "0.00002")}, "--learning_rates=.*: expected distinct values"),
        ({"seed": 3}, "--seed: cannot be combined with --seeds"),
        (
            {"learning_rate": 1e-4, "learning_rates": ("1e-5",)},
            "--learning_rate: cannot be combined with --learning_rates",
        ),
        ({"dev": ()}, "--seeds: requires --dev, on which the runs are compared"),
    ],
)
def test_wrong_flags_are_rejected(settings, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(settings, **changes)


def test_without_seeds_and_rates_there_is_one_run_with_the_plain_flags(settings):
    one = dataclasses.replace(settings, seeds=())
    assert not one.is_sweep and settings.is_sweep
    ((name, of_run),) = one.runs().items()
    assert (name, of_run.output_dir, of_run.seed) == ("", settings.output_dir, 0)
    assert not {"seeds", "learning_rates", "dry_run", "devices"} & of_run.recorded().keys()
    rates = dataclasses.replace(one, learning_rates=("5e-5",), seed=3)
    assert list(rates.runs()) == ["learning_rate-5e-5-seed-3"]


@pytest.mark.slow
def test_an_unrelated_or_locked_directory_is_rejected(settings, tmp_path):
    directory = tmp_path / "sweep"
    directory.mkdir()
    (directory / "sweep.json").write_text("theirs")
    with pytest.raises(UserError, match="expected a sweep or no directory, received sweep.json"):
        sweep(settings)
    assert os.listdir(directory) == ["sweep.json"]
    assert (directory / "sweep.json").read_text() == "theirs"
    (directory / "sweep.json").unlink()
    with ownership.sole_writer(directory):
        with pytest.raises(UserError, match=r"in use by another process \(PID"):
            sweep(settings)


@pytest.mark.slow
def test_a_run_directory_is_no_sweep(settings):
    run = finetune(dataclasses.replace(settings, seeds=()).runs()[""])
    with pytest.raises(UserError, match="--output_dir=.*: contains a single run"):
        sweep(settings)
    assert run.path == settings.output_dir


@pytest.mark.slow
def test_the_command_runs_a_sweep(settings, run_command, tmp_path):
    one = dataclasses.asdict(dataclasses.replace(settings, seeds=()).runs()[""])
    flags = [
        f"--{name}={','.join(value) if isinstance(value, tuple) else value}"
        for name, value in one.items()
        if value not in (None, ())
    ]
    done = run_command("tasks.finetune", *flags, "--seeds=4")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == f"sweep: run 1 of 1, {tmp_path / 'sweep' / 'seed-4'}"
    assert lines[-2].startswith("learning rate 5e-5: accuracy mean ")
    done = run_command("tasks.finetune", *flags, "--seeds=1,2", "--seed=5")
    assert done.returncode == 2
    assert done.stderr == "--seed: cannot be combined with --seeds\n"
