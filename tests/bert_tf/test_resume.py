"""A run goes on from any step as though never stopped; a damaged checkpoint is told and passed."""

import json
import os
import pathlib
import shutil

import pytest

from bert_tf import UserError, ownership
from bert_tf.checkpoints import CheckpointManager
from bert_tf.model.fused_ops import MIN_WIDTH
from bert_tf.pretraining import recipe
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

# Of 350 examples: step 10 begins in the first epoch and ends in the second.
STEPS = {"num_train_steps": 12, "global_batch_size": 36}
NEVER = {"save_every": 100}  # Only the end is saved.


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_directories(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(directories, tmp_path_factory):
    """runs(shards) -> (a run of 12 steps that nothing stops, {step: a copy of it at that step}).

    It saves at every step, those that go on from a copy only at the end: a save that changed what
    comes after it would be seen too.
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
    """The same weights, moments and step at the end; the same losses and measures at each step."""
    assert run.checkpoints.steps()[-1] == 12
    assert_same_bits(weights_of(run), weights_of(complete))
    assert [line["step"] for line in lines_of(run)] == list(range(1, 13))
    assert lines_of(run) == lines_of(complete)


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
def test_restored_at_any_step_the_rest_is_the_same_bit_for_bit(
    directories, runs, tmp_path, shards, step
):
    """Weights, moments, losses, data, masks and dropout, over the end of an epoch."""
    complete, copies = runs(shards)
    shutil.copytree(copies[step], tmp_path / "run")
    said = []
    run = recipe.pretrain(
        settings_of(directories, tmp_path / "run", (shards,), **STEPS, **NEVER), said.append
    )
    assert f"resuming at step {step} of 12" in said
    assert_same_run(run, complete)


@pytest.mark.slow
def test_stopped_by_a_signal_twice_the_rest_is_the_same_bit_for_bit(
    directories, runs, tmp_path, monkeypatch
):
    """At steps that are not saved anyway; the second stop comes right after going on."""
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
def test_a_model_of_compiled_kernels_goes_on_bit_for_bit(directories, tmp_path, monkeypatch):
    """Wide enough for them in every place, with dropout; TINY ones use the same uncompiled."""
    config = config_of(
        **{**TINY, "hidden_size": MIN_WIDTH, "intermediate_size": MIN_WIDTH + 2},
        max_position_embeddings=48,
    )
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
QUICK = ("flipped data", "no index", "emptied state")
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


@EACH_DAMAGE
def test_a_damaged_newest_checkpoint_is_told_and_the_end_is_the_same(
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
    # What was damaged can be looked at, and stands in nobody's way.
    assert sorted(os.listdir(path / "checkpoints")) == [
        "damaged-step-00000007",
        "step-00000009",
        "step-00000012",
    ]


def contents(directory):
    return {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ownership.MARKER  # It names who was here last.
    }


@EACH_DAMAGE
def test_a_run_of_which_all_checkpoints_are_damaged_is_refused_and_left_alone(
    directories, runs, tmp_path, damage, file
):
    path, said = tmp_path / "run", []
    shutil.copytree(runs("shards")[1][7], path)
    for step in (6, 7):
        damage(directory_of(path, step) / file)
    before = contents(path)
    with pytest.raises(UserError, match="none of its 2 checkpoints can be restored") as caught:
        recipe.pretrain(settings_of(directories, path, save_every=1, **STEPS), said.append)
    assert str(path / "checkpoints") in str(caught.value) and "\n" not in str(caught.value)
    warnings = [line for line in said if line.startswith("warning: ")]
    for step, warning in zip((7, 6), warnings, strict=True):
        assert str(directory_of(path, step)) in warning
    assert not [line for line in said if line.startswith(("resuming", "step "))]
    assert contents(path) == before


def test_an_older_checkpoint_of_damaged_state_is_told_and_stops_nothing(
    directories, runs, tmp_path
):
    """Its weights are not wanted, but whether it was the best is asked at every save."""
    complete, copies = runs("shards")
    path, said = tmp_path / "run", []
    shutil.copytree(copies[7], path)
    truncate(directory_of(path, 6) / "checkpoint.json")
    run = recipe.pretrain(settings_of(directories, path, save_every=3, **STEPS), said.append)
    (warning,) = (line for line in said if line.startswith("warning: "))
    assert str(directory_of(path, 6)) in warning
    assert "resuming at step 7 of 12" in said
    assert_same_run(run, complete)


def test_a_finished_run_whose_last_checkpoint_is_damaged_makes_it_again(
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
def test_killed_before_the_last_evaluation_it_is_made_when_going_on(
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
