"""Resuming a run: bitwise equal at any step; damaged checkpoints are reported and skipped."""

import json
import os
import pathlib
import shutil

import pytest

from bert_tf import UserError
from bert_tf.model.fused_kernels import MIN_WIDTH
from bert_tf.pretraining import recipe
from bert_tf.runs.checkpoints import CheckpointManager
from bert_tf.storage import files, ownership
from bert_tf.train.signals import Interrupted
from tests.corpus import config_of
from tests.pretraining import (
    TINY,
    assert_same_bits,
    lines_of,
    make_directories,
    settings_of,
    stop_at,
    weights_of,
)

# With 350 examples, step 10 starts in the first epoch and ends in the second.
STEPS = {"num_train_steps": 12, "global_batch_size": 36}
NEVER = {"save_every": 100}  # Only the end is saved.


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_directories(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(directories, tmp_path_factory):
    """Return a function of shards: an uninterrupted run of 12 steps, and {step: its copy}.

    The uninterrupted run saves at every step, resumed copies only at the end. If a save affected
    later steps, the comparison would fail as well.
    """
    made = {}

    def make(shards):
        directory, copies, save = tmp_path_factory.mktemp(shards), {}, CheckpointManager.save

        def save_and_copy(self, step, variables):
            save(self, step, variables)
            copies[step] = directory / f"at{step}"
            shutil.copytree(directory / "whole", copies[step])

        with pytest.MonkeyPatch.context() as context:
            context.setattr(CheckpointManager, "save", save_and_copy)
            settings = settings_of(
                directories, directory / "whole", (shards,), save_every=1, **STEPS
            )
            complete = recipe.pretrain(settings)
        assert list(copies) == list(range(1, 13))
        return complete, copies

    return lambda shards: made.get(shards) or made.setdefault(shards, make(shards))


def assert_same_run(run, complete):
    """Assert equal weights, moments and step at the end, and equal losses and metrics per step."""
    assert run.checkpoints.steps()[-1] == 12
    assert_same_bits(weights_of(run), weights_of(complete))
    assert [line["step"] for line in lines_of(run)] == list(range(1, 13))
    assert lines_of(run) == lines_of(complete)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("shards", "step"),
    [
        (
            (masking, step)
            if (masking, step) == ("dynamic", 10)
            else pytest.param(masking, step, marks=pytest.mark.slow)
        )
        for masking in ("shards", "dynamic")
        for step in range(1, 12)
    ],
)
def test_resumed_at_any_step_the_run_is_bitwise_equal(directories, runs, tmp_path, shards, step):
    """Check weights, moments, losses, data, masks and dropout beyond the end of an epoch."""
    complete, copies = runs(shards)
    shutil.copytree(copies[step], tmp_path / "run")
    said = []
    run = recipe.pretrain(
        settings_of(directories, tmp_path / "run", (shards,), **STEPS, **NEVER), said.append
    )
    assert f"resuming at step {step} of 12" in said
    assert_same_run(run, complete)


@pytest.mark.slow
def test_stopped_by_a_signal_twice_the_run_is_bitwise_equal(
    directories, runs, tmp_path, monkeypatch
):
    """Stop at steps that would not be saved otherwise, the second time right after resuming."""
    settings, said = settings_of(directories, tmp_path / "run", **STEPS, **NEVER), []
    for step in (7, 8):
        with monkeypatch.context() as context:
            stop_at(context, step)
            with pytest.raises(Interrupted, match=f"stopped and saved at step {step} of 12"):
                recipe.pretrain(settings, said.append)
    run = recipe.pretrain(settings, said.append)
    assert [line for line in said if line.startswith("resuming")] == [
        "resuming at step 7 of 12",
        "resuming at step 8 of 12",
    ]
    assert_same_run(run, runs("shards")[0])


@pytest.mark.slow
def test_a_model_with_compiled_kernels_resumes_bitwise_equal(directories, tmp_path, monkeypatch):
    """Use a model wide enough for compiled kernels, with dropout; TINY ones use plain formulas."""
    sizes = {"hidden_size": MIN_WIDTH, "intermediate_size": MIN_WIDTH + 2, "num_hidden_layers": 2}
    config = config_of(**{**TINY, **sizes}, max_position_embeddings=48)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    wide = {**directories, "config": tmp_path / "config.json"}
    complete = recipe.pretrain(settings_of(wide, tmp_path / "whole", **STEPS, **NEVER))
    settings = settings_of(wide, tmp_path / "run", **STEPS, **NEVER)
    with monkeypatch.context() as context:
        stop_at(context, 5)
        with pytest.raises(Interrupted, match="stopped and saved at step 5 of 12"):
            recipe.pretrain(settings)
    assert_same_run(recipe.pretrain(settings), complete)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


FILES = {"data": "variables.data-00000-of-00001", "index": "variables.index"}
DAMAGES = {
    f"{how} {name}": (damage, file)
    for name, file in FILES.items()
    for how, damage in (("flipped", flip), ("truncated", truncate), ("no", pathlib.Path.unlink))
}
QUICK = ("flipped data",)
DAMAGES["emptied state"] = (lambda path: os.truncate(path, 0), "checkpoint.json")
DAMAGES["truncated state"] = (truncate, "checkpoint.json")
EACH_DAMAGE = pytest.mark.parametrize(
    ("damage", "file"),
    [
        pytest.param(*values, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, values in DAMAGES.items()
    ],
)


def directory_of(path, step):
    return path / "checkpoints" / f"step-{step:08d}"


@pytest.mark.slow
@EACH_DAMAGE
def test_a_damaged_newest_checkpoint_is_reported_and_the_final_weights_are_equal(
    directories, runs, tmp_path, damage, file
):
    complete, copies = runs("shards")
    path, said = tmp_path / "run", []
    shutil.copytree(copies[7], path)
    damage(directory_of(path, 7) / file)
    run = recipe.pretrain(settings_of(directories, path, save_every=3, **STEPS), said.append)
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert str(directory_of(path, 7)) in warning and "\n" not in warning
    assert said.index(warning) < said.index("resuming at step 6 of 12")
    assert_same_run(run, complete)
    # The damaged checkpoint is kept for inspection and does not affect later saves.
    assert sorted(os.listdir(path / "checkpoints")) == [
        "damaged-step-00000007",
        "step-00000009",
        "step-00000012",
    ]


def contents(directory):
    """Return the content of each file but the lock, which exists while a run is written."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if path.name != ownership.LOCK}


@pytest.mark.medium
@EACH_DAMAGE
def test_a_run_whose_checkpoints_are_all_damaged_is_rejected_and_left_unchanged(
    directories, runs, tmp_path, damage, file
):
    path, said = tmp_path / "run", []
    shutil.copytree(runs("dynamic")[1][7], path)
    for step in (6, 7):
        damage(directory_of(path, step) / file)
    before = contents(path)
    with pytest.raises(UserError, match="none of the 2 checkpoints can be restored") as caught:
        settings = settings_of(directories, path, ("dynamic",), save_every=1, **STEPS)
        recipe.pretrain(settings, said.append)
    assert str(path / "checkpoints") in str(caught.value) and "\n" not in str(caught.value)
    warnings = [line for line in said if line.startswith("warning: ")]
    for step, warning in zip((7, 6), warnings, strict=True):
        assert str(directory_of(path, step)) in warning
    assert not [line for line in said if line.startswith(("resuming", "step "))]
    assert contents(path) == before


@pytest.mark.slow
def test_an_older_checkpoint_of_damaged_state_is_reported_and_training_resumes(
    directories, runs, tmp_path
):
    """Damage a checkpoint that is not restored; each save reads it only to find the best."""
    complete, copies = runs("shards")
    path, said = tmp_path / "run", []
    shutil.copytree(copies[7], path)
    truncate(directory_of(path, 6) / "checkpoint.json")
    run = recipe.pretrain(settings_of(directories, path, save_every=3, **STEPS), said.append)
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert str(directory_of(path, 6)) in warning
    assert "resuming at step 7 of 12" in said
    assert_same_run(run, complete)


@pytest.mark.slow
def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_it_again(
    directories, runs, tmp_path
):
    complete, copies = runs("shards")
    path, said = tmp_path / "run", []
    shutil.copytree(copies[12], path)
    flip(directory_of(path, 12) / FILES["data"])
    run = recipe.pretrain(settings_of(directories, path, **STEPS, **NEVER), said.append)
    assert "resuming at step 11 of 12" in said
    assert_same_run(run, complete)


@pytest.mark.slow
def test_killed_before_the_last_evaluation_a_run_evaluates_when_it_resumes(
    directories, tmp_path, monkeypatch
):
    changes = {"num_train_steps": 2, "eval_shards": str(directories["held_out"])}
    settings = settings_of(directories, tmp_path / "run", **changes)
    with monkeypatch.context() as context:
        context.setattr(recipe.PretrainingEvaluator, "metrics", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recipe.pretrain(settings)
    run = recipe.pretrain(settings)
    assert "score" in run.checkpoints.info(2)
    assert [(line["step"], "loss" in line) for line in lines_of(run)] == [
        (1, True),
        (2, True),
        (2, False),
    ]


class Stopped(Exception):
    """Raised by a log function before training."""


@pytest.mark.medium
def test_a_resumed_run_reads_only_shards_that_changed(directories, tmp_path, monkeypatch):
    """Train one step; other starts are stopped when they have read and recorded the shards."""
    shards = pathlib.Path(shutil.copytree(directories["shards"], tmp_path / "shards"))
    read, sha256 = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path) or sha256(path))

    def log(line):
        if line.startswith("precision "):
            raise Stopped

    def shards_read(num_train_steps):
        read.clear()
        with_copy = {**directories, "shards": shards}
        settings = settings_of(with_copy, tmp_path / "run", num_train_steps=num_train_steps)
        if num_train_steps == 1:
            recipe.pretrain(settings)
        else:
            with pytest.raises(Stopped):
                recipe.pretrain(settings, log)
        return sorted(pathlib.Path(path).name for path in read if str(path).endswith(".tfrecord"))

    names = [f"examples-0000{number}-of-00003.tfrecord" for number in range(3)]
    assert shards_read(2) == names
    for _ in range(2):  # Without a checkpoint, the run is created anew.
        assert shards_read(2) == []
    assert shards_read(1) == []
    assert shards_read(2) == []
    os.utime(shards / names[1], ns=(0, 0))
    assert shards_read(3) == [names[1]]
    verified = tmp_path / "run" / "verified_shards.json"
    verified.write_text(verified.read_text()[:-5])  # Damaged.
    assert shards_read(4) == names
    data = (shards / names[2]).read_bytes()
    (shards / names[2]).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{names[2]}: content was altered"):
        shards_read(5)
