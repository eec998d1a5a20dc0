"""Two worker processes on loopback fine-tune like one process; only one writes and logs."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from bert_tf.runs.checkpoints import read
from bert_tf.runs.run import Run
from tests import small
from tests.workers import assert_rejected, finish, start, wait_for_line


@pytest.fixture
def flags(huggingface_dir, complaints, tmp_path):
    path = huggingface_dir / "config.json"
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **still}))
    settings = small.settings(huggingface_dir, complaints, tmp_path, learning_rate=1e-3)
    values = {**dataclasses.asdict(settings), "dev": complaints["dev"], "log_every": 1}
    return {name: value for name, value in values.items() if value not in (None, ())}


@pytest.mark.slow
@pytest.mark.parametrize("has_teacher", [False, True])
def test_two_workers_equal_one_process_and_resume_together(
    flags, tmp_path, run_command, has_teacher
):
    """Use 27 rows in batches of 8 and 9 dev rows, so that the last batches are partial."""
    if has_teacher:
        teacher = {**flags, "output_dir": tmp_path / "teacher", "seed": 5}
        done = run_command("tasks.finetune", *(f"--{name}={v}" for name, v in teacher.items()))
        assert done.returncode == 0, done.stderr
        flags = {**flags, "teacher": tmp_path / "teacher"}
    chief, other = finish(start("tasks.finetune", {**flags, "output_dir": tmp_path / "two"}))
    assert "step 8/8" in chief and "on 2 replicas" in chief and other == ""
    arguments = {**flags, "output_dir": tmp_path / "one"}
    done = run_command("tasks.finetune", *(f"--{name}={v}" for name, v in arguments.items()))
    assert done.returncode == 0, done.stderr

    one, two = (Run.open(tmp_path / name) for name in ("one", "two"))
    assert one.checkpoints.steps() == two.checkpoints.steps()
    assert one.checkpoints.best_step() == two.checkpoints.best_step()
    for step in one.checkpoints.steps():
        weights, expected = (read(run.checkpoints.path(step)) for run in (two, one))
        assert set(weights) == set(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(weights[name], array, rtol=0, atol=1e-5, err_msg=name)
    for mine, theirs in zip(two.metrics(), one.metrics(), strict=True):
        for name in set(theirs) - {"examples_per_second"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name

    again = finish(start("tasks.finetune", {**flags, "output_dir": tmp_path / "two"}))
    assert "finished at step 8, nothing to do" in again[0] and again[1] == ""


@pytest.mark.slow
def test_train_from_python_ends_with_the_same_weights_in_each_worker(flags, tmp_path):
    """Show the second worker no checkpoints until `train` opens the last one."""
    run, view = tmp_path / "run", tmp_path / "view"
    names = ("init_from", "train")
    flags = {**{name: flags[name] for name in names}, "output_dir": run}
    weights = [tmp_path / f"{index}.npz" for index in range(2)]
    flags["weights"] = weights[0]
    of_other = {"output_dir": view, "weights": weights[1]}
    processes = start("tests.tasks.train_runner", flags, of_others=of_other)
    assert f"{view}/checkpoints " in wait_for_line(processes[1], "worker 1: waiting for ")
    view.mkdir()
    for name in ("config.json", "task.json", "train.json", "vocab.txt"):
        (view / name).symlink_to(run / name)
    (view / "checkpoints").mkdir()
    assert f"{view}/checkpoints/step-" in wait_for_line(processes[1], "worker 1: waiting for ")
    (view / "checkpoints").rmdir()
    (view / "checkpoints").symlink_to(run / "checkpoints")
    finish(processes)
    chief, other = (np.load(path) for path in weights)
    assert len(chief.files) == len(other.files) > 20
    for name in chief.files:
        np.testing.assert_array_equal(other[name], chief[name], err_msg=name)


@pytest.mark.slow
def test_a_worker_waits_for_files_that_it_sees_late(flags, tmp_path):
    """Give the worker another name of the run, which exists once it waits for it."""
    view = tmp_path / "view"
    flags = {**flags, "output_dir": tmp_path / "two", "calibrate": True}
    processes = start("tasks.finetune", flags, of_others={"output_dir": view})
    assert str(view) in wait_for_line(processes[1], "worker 1: waiting for ")
    view.symlink_to(tmp_path / "two")
    chief, _ = finish(processes)
    assert "tuned on dev: " in chief


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["flags", "data"])
def test_a_worker_with_other_flags_or_data_is_reported(flags, complaints, tmp_path, differs):
    """Name the same training file in both working directories."""
    flags, of_others = {**flags, "train": "train.csv", "output_dir": tmp_path / "run"}, {}
    directories = [tmp_path / name for name in ("of_chief", "of_other")]
    for directory in directories:
        directory.mkdir()
        shutil.copy(complaints["train"], directory)
    if differs == "flags":
        of_others["learning_rate"] = 1e-4
    else:
        with open(directories[1] / "train.csv", "a") as rows:
            rows.write(rows_of(complaints["train"])[-1])
    processes = start("tasks.finetune", flags, of_others=of_others, directories=directories)
    assert_rejected(*processes)
    assert not (tmp_path / "run").exists()


def rows_of(path):
    return path.read_text().splitlines(keepends=True)


@pytest.mark.slow
def test_a_missing_tpu_is_reported_in_one_line(flags, run_command, tmp_path):
    flags = {**flags, "output_dir": tmp_path / "run", "strategy": "tpu"}
    done = run_command("tasks.finetune", *(f"--{name}={value}" for name, value in flags.items()))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("--strategy=tpu --tpu=local: no TPU found")
    assert not Run.exists(flags["output_dir"])
