"""Checkpoints and runs: atomic saves, strict restoring, and reports of damage."""

import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.runs.checkpoints import CheckpointManager, assign, read
from bert_tf.runs.run import FILES, Run
from bert_tf.storage import files, ownership


def variables(value):
    return {
        "a/kernel": tf.Variable(tf.fill([300, 7], float(value))),
        "step": tf.Variable(value, dtype=tf.int64),
    }


def saved(tmp_path, *steps, **kwargs):
    checkpoints = CheckpointManager(os.path.join(tmp_path, "checkpoints"), **kwargs)
    for step in steps:
        checkpoints.save(step, variables(step))
    return checkpoints


def test_names_on_disk_are_the_names_of_the_variables(tmp_path):
    checkpoints = saved(tmp_path, 5)
    assert dict(tf.train.list_variables(f"{checkpoints.path(5)}/variables")) == {
        "a/kernel": [300, 7],
        "step": [],
    }
    values = read(checkpoints.path(5))
    np.testing.assert_array_equal(values["a/kernel"], np.full((300, 7), 5, np.float32))
    assert values["step"] == 5


@pytest.mark.parametrize("name", ["r [v1]", "a*", "b?", "c\\d", "%20 \u4e2d", "\u00e9#"])
def test_a_run_may_have_any_name(tmp_path, name):
    (tmp_path / "r v").mkdir()
    checkpoints = saved(tmp_path / name, 5)
    assert checkpoints.is_readable(5) and read(checkpoints.path(5))["step"] == 5
    os.remove(f"{checkpoints.path(5)}/variables.index")
    with pytest.raises(UserError, match="not a readable TensorFlow checkpoint: ") as raised:
        read(checkpoints.path(5))
    assert "/link" not in str(raised.value)


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path):
    checkpoints = saved(tmp_path)
    for step, score in enumerate((0.5, 0.9, 0.7, 0.9, 0.6, 0.2, 0.1)):
        checkpoints.save(step, variables(step))
        checkpoints.annotate(step, score, {"dev_accuracy": score})
    assert checkpoints.steps() == [3, 5, 6]
    assert (checkpoints.best_step(), checkpoints.best_or_latest_step()) == (3, 3)
    assert checkpoints.info(3)["metrics"] == {"dev_accuracy": 0.9}
    assert saved(tmp_path / "unscored", 1, 2, 3).best_or_latest_step() == 3


def test_files_of_a_killed_save_are_ignored_and_overwritten(tmp_path):
    with ownership.sole_writer(tmp_path):
        checkpoints = saved(tmp_path, 1, 2)
        left = tmp_path / "checkpoints" / ".writing-checkpoint"
        shutil.copytree(checkpoints.path(2), left)
        (left / "half").touch()
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, variables(3))
        assert sorted(os.listdir(checkpoints.directory)) == ["step-00000002", "step-00000003"]
        assert len(os.listdir(checkpoints.path(3))) == 3


def test_an_incomplete_checkpoint_is_kept_also_when_its_step_is_saved(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for _ in range(2):
        half = pathlib.Path(checkpoints.path(3))
        shutil.copytree(checkpoints.path(2), half, dirs_exist_ok=True)
        (half / "checkpoint.json").unlink()
        assert 3 not in checkpoints.steps()
        checkpoints.save(3, variables(3))
        assert read(checkpoints.path(3))["step"] == 3
    for step in (4, 5):
        checkpoints.save(step, variables(step))
    assert sorted(os.listdir(checkpoints.directory)) == [
        "damaged-step-00000003",
        "damaged-step-00000003-2",
        "step-00000004",
        "step-00000005",
    ]


def test_a_remote_checkpoint_is_complete_once_it_has_its_state(monkeypatch):
    checkpoints = saved("ram://checkpoints/run", 1)
    with monkeypatch.context() as context, pytest.raises(OSError, match="cannot be saved"):
        context.setattr(files, "sync_directory", os.stat)
        checkpoints.save(2, variables(2))
    assert checkpoints.steps() == [1] and "step-00000002" in files.listdir(checkpoints.directory)
    for step in (2, 3, 4):
        checkpoints.save(step, variables(step))
    assert checkpoints.steps() == [3, 4] and read(checkpoints.path(4))["step"] == 4
    assert files.listdir(checkpoints.directory) == ["step-00000003", "step-00000004"]
    files.atomic_write_text(f"{checkpoints.path(4)}/checkpoint.json", "{")
    assert checkpoints.restore_latest(variables(0), print) == 3
    checkpoints.save(4, variables(4))
    assert files.listdir(checkpoints.directory) == [
        "damaged-step-00000004",
        "step-00000003",
        "step-00000004",
    ]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: flip(directory / "variables.data-00000-of-00001"),
        lambda directory: os.truncate(directory / "variables.data-00000-of-00001", 100),
        lambda directory: os.truncate(directory / "variables.index", 20),
        lambda directory: (directory / "variables.index").unlink(),
    ],
    ids=["flipped", "truncated data", "truncated index", "no index"],
)
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_is_restored(tmp_path, damage):
    checkpoints, said = saved(tmp_path, 1, 2), []
    damage(pathlib.Path(checkpoints.path(2)))
    target = variables(0)
    assert checkpoints.restore_latest(target, said.append) == 1
    np.testing.assert_array_equal(target["a/kernel"], np.full((300, 7), 1, np.float32))
    assert len(said) == 1 and "step-00000002" in said[0]
    damage(pathlib.Path(checkpoints.path(1)))
    with pytest.raises(UserError, match="none of the 1 checkpoints can be restored"):
        checkpoints.restore_latest(target, said.append)
    # The file is still there, so the next start does not mistake the run for a new one.
    assert checkpoints.steps() == [1]


def test_a_storage_that_fails_once_costs_no_checkpoint(tmp_path, monkeypatch):
    checkpoints, said, target = saved(tmp_path, 1, 2), [], variables(0)
    read_by_tensorflow = tf.compat.v1.train.NewCheckpointReader
    errors = [tf.errors.UnavailableError(None, None, "503 Service Unavailable")]

    def reader(prefix):
        if errors:
            raise errors.pop()
        return read_by_tensorflow(prefix)

    monkeypatch.setattr(tf.compat.v1.train, "NewCheckpointReader", reader)
    assert checkpoints.restore_latest(target, said.append) == 2 and not errors
    assert int(target["step"]) == 2 and said == [] and checkpoints.steps() == [1, 2]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that fails")
def test_a_storage_that_fails_is_reported_and_no_checkpoint_is_set_aside(tmp_path):
    checkpoints, said, target = saved(tmp_path, 1, 2), [], variables(0)
    data = pathlib.Path(checkpoints.path(2)) / "variables.data-00000-of-00001"
    data.rename(tmp_path / "data")
    data.symlink_to("/proc/self/mem")  # Reading its first bytes is an "Input/output error".
    for function in (
        lambda: checkpoints.restore_latest(target, said.append),
        lambda: checkpoints.is_readable(2),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            function()
    assert said == [] and checkpoints.steps() == [1, 2]
    data.unlink()
    (tmp_path / "data").rename(data)
    assert checkpoints.restore_latest(target, said.append) == 2


def test_checkpoints_saved_after_a_damaged_one_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 4)
    checkpoints.annotate(4, 1.0, {})
    for step in (8, 12):
        checkpoints.save(step, variables(step))
        flip(pathlib.Path(checkpoints.path(step)) / "variables.data-00000-of-00001")
    assert checkpoints.restore_latest(variables(0), print) == 4
    checkpoints.save(5, variables(5))
    assert checkpoints.steps() == [4, 5]
    assert sorted(name for name in os.listdir(checkpoints.directory) if "damaged" in name) == [
        "damaged-step-00000008",
        "damaged-step-00000012",
    ]


def test_the_best_is_found_while_another_process_removes_checkpoints(tmp_path, monkeypatch):
    """Ignore a checkpoint that is removed after its name was listed."""
    checkpoints = saved(tmp_path, 1, 2, 3)
    assert checkpoints.annotate(2, 0.5, {}) and not checkpoints.annotate(3, 0.4, {})
    reader = CheckpointManager(checkpoints.directory, is_writer=False)
    assert reader.annotate(9, 1.0, {}) is False
    listed = CheckpointManager.steps
    monkeypatch.setattr(CheckpointManager, "steps", lambda self: [1, *listed(self)])
    assert reader.best_step() == reader.best_or_latest_step() == 2
    state = pathlib.Path(checkpoints.path(3)) / "checkpoint.json"
    state.write_text("{")  # Damage is still an error.
    with pytest.raises(UserError, match="not JSON"):
        reader.best_step()


def test_restoring_without_checkpoints_returns_none(tmp_path):
    assert saved(tmp_path).restore_latest(variables(0), print) is None
    with pytest.raises(UserError, match="no complete checkpoint in this directory"):
        saved(tmp_path).best_or_latest_step()


def test_assign_rejects_missing_and_unknown_names():
    values = {name: variable.numpy() for name, variable in variables(1).items()}
    with pytest.raises(UserError, match="here: 1 variables are missing, e.g. b"):
        assign({**variables(0), "b": tf.Variable(1.0)}, values, "here")
    with pytest.raises(UserError, match="here: 1 tensors are unknown to the model, e.g. b"):
        assign(variables(0), {**values, "b": np.zeros(3)}, "here")
    with pytest.raises(
        UserError, match=r"a/kernel: shape mismatch. Expected: \(300, 7\). Received: \(7, 300\)"
    ):
        assign(variables(0), {**values, "a/kernel": np.zeros((7, 300))}, "here")


def test_metrics_of_lost_steps_are_dropped(tmp_path, config, vocabulary):
    run = Run.create(tmp_path / "run", config, vocabulary, train={"settings": {}})
    path = tmp_path / "run" / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        run.log_metrics({"step": step})
    with open(path, "a") as lines:
        lines.write('{"step": 5, "lo')  # The process was killed while it wrote this line.
    run.forget_metrics_after(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    run.log_metrics({"step": 3, "loss": 1.0})
    run.log_metrics({"step": 3, "dev_accuracy": 1.0})
    run.forget_metrics_after(3, and_evaluation=True)
    assert path.read_text().count("\n") == 3
    run.forget_metrics_after(0)
    assert path.read_text() == ""


def scalars_of(run):
    """Return [(step, tag, value)] as TensorBoard shows them; a session start drops later steps."""
    read, names = [], os.listdir(run.file("tensorboard"))
    for name in sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        path = os.path.join(run.file("tensorboard"), name)
        for event in tf.compat.v1.train.summary_iterator(path):
            if event.session_log.status == tf.compat.v1.SessionLog.START:
                read = [entry for entry in read if entry[0] < event.step]
            read += [
                (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
                for value in event.summary.value
            ]
    return read


def test_tensorboard_drops_the_metrics_of_lost_steps(tmp_path, config, vocabulary):
    first = Run.create(tmp_path / "run", config, vocabulary, train={"settings": {}})
    for step in (1, 2, 3):
        first.log_metrics({"step": step, "loss": float(step)})
    first.log_metrics({"step": 2, "dev_accuracy": 0.5})
    run = Run.open(first.path)
    run.forget_metrics_after(2)
    run.log_metrics({"step": 3, "loss": 30.0})
    accuracy, losses = (2, "dev_accuracy", 0.5), [(1, "loss", 1.0), (2, "loss", 2.0)]
    assert sorted(scalars_of(run)) == sorted([*losses, accuracy, (3, "loss", 30.0)])
    run.forget_metrics_after(2, and_evaluation=True)
    assert scalars_of(run) == losses
    size = len(list(tf.io.gfile.glob(run.file("tensorboard/*"))))
    Run.open(first.path).forget_metrics_after(2)  # There is nothing to drop.
    assert len(list(tf.io.gfile.glob(run.file("tensorboard/*")))) == size


def test_a_run_that_never_saved_is_replaced_by_the_next(tmp_path, config, vocabulary):
    first = Run.create(tmp_path / "run", config, vocabulary, train={"settings": {"seed": 3}})
    first.log_metrics({"step": 1})
    second = Run.create(tmp_path / "run", config, vocabulary, train={"settings": {"seed": 4}})
    assert Run.open(second.path).train["settings"] == {"seed": 4}
    assert second.metrics() == []
    third = Run.create(second.path, config, vocabulary, train={}, task={"kind": "x"})
    assert third.task and Run.create(second.path, config, vocabulary, train={}).task is None
    assert Run.open(second.path).task is None
    second.checkpoints.save(0, variables(0))
    with pytest.raises(UserError, match="contains other files; name a new directory"):
        Run.create(tmp_path / "run", config, vocabulary, train={})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def everything(directory):
    return {str(path): path.is_dir() or path.read_bytes() for path in directory.rglob("*")}


def test_an_unrelated_directory_is_left_unchanged(tmp_path, config, vocabulary):
    path = tmp_path / "theirs"
    for name in ("config.json", "vocab.txt", "checkpoints/best_model/weights.bin"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("theirs")
    before = everything(path)
    found = "found checkpoints, config.json, vocab.txt"
    for begin in (Run.writing, lambda path: Run.create(path, config, vocabulary, train={})):
        with pytest.raises(UserError, match=f"contains other files; name a new .*{found}"):
            with begin(path):
                pass
    assert everything(path) == before
    for content in ("{}", '{"data": [], "version": "1.1"}', "theirs"):
        (path / "train.json").write_text(content)  # Rows of others have this name too.
        with pytest.raises(UserError, match="found checkpoints, config.json, train.json, but"):
            Run.create(path, config, vocabulary, train={})
        assert (path / "train.json").read_text() == content
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="is a file; expected a directory"),
        Run.writing(path / "../file"),
    ):
        pass


def test_a_run_whose_only_checkpoint_is_incomplete_is_kept(tmp_path, config, vocabulary):
    run = Run.create(tmp_path / "run", config, vocabulary, train={})
    run.checkpoints.save(3, variables(3))
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "checkpoint.json").unlink()
    before = everything(tmp_path)
    with pytest.raises(UserError, match="step-00000003: contains weights but no checkpoint.json"):
        Run.create(run.path, config, vocabulary, train={})
    assert everything(tmp_path) == before


def test_a_run_killed_in_its_first_save_starts_again(tmp_path, config, vocabulary, monkeypatch):
    path, left = tmp_path / "run", tmp_path / "left"
    rename = files.rename_directory

    def copy(*paths):  # All files of the checkpoint are there.
        shutil.copytree(path, left)
        rename(*paths)

    monkeypatch.setattr(files, "rename_directory", copy)
    with Run.writing(path):
        run = Run.create(path, config, vocabulary, train={})
        run.checkpoints.save(3, variables(3))
    assert sorted(os.listdir(run.checkpoints.path(3))) == [
        "checkpoint.json",
        "variables.data-00000-of-00001",
        "variables.index",
    ]
    assert os.listdir(left / "checkpoints") == [".writing-checkpoint"]
    monkeypatch.undo()
    with Run.writing(left):
        Run.create(left, config, vocabulary, train={}).checkpoints.save(1, variables(1))
    assert os.listdir(left / "checkpoints") == ["step-00000001"]


def test_a_run_killed_while_it_is_created_starts_again(tmp_path, config, vocabulary, monkeypatch):
    """Copy the run before each rename: each copy is free, and so is a run whose copy is not."""
    path, copies, move = tmp_path / "run", [], files.move

    def copy(*paths):
        copies.append(shutil.copytree(path, tmp_path / f"copy{len(copies)}"))
        move(*paths)

    monkeypatch.setattr(files, "move", copy)
    with Run.writing(path):
        Run.create(path, config, vocabulary, train={}, task={"kind": "x"})
    monkeypatch.undo()
    assert len(copies) == 4
    for left in copies:
        with Run.writing(left):
            Run.create(left, config, vocabulary, train={}, task={"kind": "x"})
        assert sorted(os.listdir(left)) == ["checkpoints", *sorted(FILES[1:])]


def test_an_error_removes_no_run(tmp_path, config, vocabulary):
    path = tmp_path / "run"
    with pytest.raises(OSError, match="No space left"), Run.writing(path):
        Run.create(path, config, vocabulary, train={}).log_metrics({"step": 1})
        raise OSError(28, "No space left on device")
    assert Run.open(path).metrics() == [{"step": 1}]
    (path / "notes").touch()
    run = Run.create(path, config, vocabulary, train={})
    assert run.metrics() == [] and (path / "notes").exists()


def test_a_run_is_written_by_one_process(tmp_path, config, vocabulary):
    run = Run.create(tmp_path / "run", config, vocabulary, train={})
    run.checkpoints.save(3, variables(3))
    with Run.writing(run.path), Run.writing(run.path, is_writer=False):
        with pytest.raises(UserError, match="in use by another process"):
            with Run.writing(run.path):
                pass


def test_malformed_change_records_are_reported(tmp_path, config, vocabulary):
    Run.create(tmp_path / "run", config, vocabulary, {"settings": {}, "changes": {"step": 2}})
    with pytest.raises(UserError, match=r'train.json: "changes" is'):
        Run.open(tmp_path / "run")


def test_unrelated_files_in_a_checkpoint_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 1)
    notes = pathlib.Path(checkpoints.path(1)) / "notes.txt"
    notes.touch()
    for step in (2, 3, 4):
        checkpoints.save(step, variables(step))
    assert checkpoints.steps() == [1, 3, 4] and notes.exists()
    notes.unlink()
    checkpoints.save(5, variables(5))
    assert checkpoints.steps() == [4, 5]


def test_a_run_is_opened_as_it_was_created(tmp_path, config, vocabulary):
    Run.create(
        tmp_path / "run",
        config,
        vocabulary,
        train={"settings": {"seed": 3}},
        task={"kind": "classification"},
    )
    run = Run.open(tmp_path / "run")
    assert (run.config, run.vocabulary.lines, run.task) == (
        config,
        vocabulary.lines,
        {"kind": "classification"},
    )
    assert run.train["settings"] == {"seed": 3}
    assert run.train["versions"]["tensorflow"] == tf.__version__
    with pytest.raises(UserError, match="--seed: was 3 when .* was created, is now 4"):
        run.check_resumable({"seed": 4}, {"kind": "classification"})
    with pytest.raises(UserError, match="contains a run of task 'classification', not 'tagging'"):
        run.check_resumable({"seed": 3}, {"kind": "tagging"})
    with pytest.raises(UserError, match="not a run directory"):
        Run.open(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        Run.open(tmp_path / "absent")
