"""Workers that are slow, and storage that shows the files of worker 0 late."""

import os
import shutil
import signal
import subprocess
import types

import numpy as np
import pytest

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.train import shared_files
from tests.workers import (
    finish,
    last_weights,
    make_flags,
    start,
    supervise,
    wait_for_line,
    with_dropout,
)

DATA = "variables.data-00000-of-00001"
SECONDS_STOPPED = 5  # Half of TensorFlow's heartbeat timeout.


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return with_dropout(make_flags(tmp_path_factory.mktemp("data")), num_train_steps=60)


@pytest.fixture(scope="module")
def complete(flags, tmp_path_factory):
    """Return the weights of two workers that nothing disturbs."""
    path = tmp_path_factory.mktemp("complete") / "run"
    finish(start("bert_tf.pretrain", {**flags, "output_dir": path}))
    return last_weights(path)


def assert_weights(path, expected):
    for name, values in last_weights(path).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_stops_for_seconds_changes_nothing(flags, complete, tmp_path, which):
    processes = start("bert_tf.pretrain", {**flags, "output_dir": tmp_path / "run"})
    wait_for_line(processes[0], "step 7/")
    processes[which].send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):  # The other one waits.
        processes[1 - which].wait(SECONDS_STOPPED)
    processes[which].send_signal(signal.SIGCONT)
    finish(processes)
    assert_weights(tmp_path / "run", complete)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_stops_for_longer_is_replaced(flags, complete, tmp_path, which):
    """Let it go on when the other has ended: it ends too, and a supervisor restarts both."""
    settings = {**flags, "output_dir": tmp_path / "run"}
    statuses = supervise("bert_tf.pretrain", settings, which, "step 7/", signal.SIGSTOP)
    assert statuses[1 - which][0] == 2 and statuses[which][0] != 0, statuses
    assert [of[-1] for of in statuses] == [0, 0], statuses
    assert_weights(tmp_path / "run", complete)


@pytest.mark.slow
def test_a_worker_waits_for_a_run_that_it_sees_late(flags, complete, tmp_path):
    """Give the worker another name of the directory, which exists once it waits for it."""
    view = {"output_dir": tmp_path / "view"}
    processes = start("bert_tf.pretrain", {**flags, "output_dir": tmp_path / "run"}, of_others=view)
    line = wait_for_line(processes[1], "worker 1: waiting for ")
    assert str(tmp_path / "view" / "checkpoints") in line
    (tmp_path / "view").symlink_to(tmp_path / "run")
    _, output = finish(processes)
    assert "/view/checkpoints has arrived after " in output
    assert_weights(tmp_path / "run", complete)


@pytest.mark.slow
def test_a_worker_waits_for_a_checkpoint_that_it_sees_late_and_in_part(flags, complete, tmp_path):
    """Show the worker an older checkpoint, and the latest one with half of its weights."""
    run, view = tmp_path / "run", tmp_path / "view"
    before = start("bert_tf.pretrain", {**flags, "output_dir": run})
    wait_for_line(before[0], "step 9/")
    before[0].send_signal(signal.SIGTERM)
    assert [process.communicate(timeout=60) and process.returncode for process in before] == [
        143
    ] * 2
    shutil.copytree(run, view)
    checkpoints = Run.open(view).checkpoints
    latest = checkpoints.path(checkpoints.steps()[-1])
    data, hidden = (os.path.join(latest, name) for name in (DATA, "checkpoint.json"))
    complete_data = data + ".complete"
    shutil.move(data, complete_data)
    with open(complete_data, "rb") as source, open(data, "wb") as target:
        target.write(source.read(os.path.getsize(complete_data) // 2))
    os.rename(hidden, hidden + ".hidden")

    after = start("bert_tf.pretrain", {**flags, "output_dir": run}, of_others={"output_dir": view})
    assert hidden in wait_for_line(after[1], "worker 1: waiting for ")
    os.rename(hidden + ".hidden", hidden)
    assert data in wait_for_line(after[1], "worker 1: waiting for ")
    os.rename(complete_data, data)
    finish(after)
    assert_weights(run, complete)


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Return the strategy of worker 1, which sees here/ while the chief sees of_chief/."""
    (tmp_path / "of_chief").mkdir()
    (tmp_path / "here").mkdir()
    strategy = types.SimpleNamespace(cluster_resolver=types.SimpleNamespace(task_id=1))

    def from_chief(strategy, function):
        return function.func(function.args[0].replace("/here/", "/of_chief/"))

    monkeypatch.setattr(shared_files, "from_chief", from_chief)
    monkeypatch.setattr(shared_files, "barrier", lambda strategy: None)
    monkeypatch.setattr(shared_files, "is_multi_worker", lambda strategy: True)
    monkeypatch.setattr(shared_files, "is_chief", lambda strategy: False)
    monkeypatch.setattr(shared_files, "SECONDS_TO_WAIT", 0)
    return strategy


CONTENTS = {
    "missing": (b"abc", None, "does not exist here"),
    "short": (b"abc", b"ab", "is not the same here"),
    "old": (b"abc", b"abd", "is not the same here"),
}


@pytest.mark.parametrize(("of_chief", "here", "reason"), CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_never_arrives_is_named(worker, tmp_path, of_chief, here, reason):
    (tmp_path / "of_chief" / "vocab.txt").write_bytes(of_chief)
    if here is not None:
        (tmp_path / "here" / "vocab.txt").write_bytes(here)
    logged = []
    with pytest.raises(UserError) as raised:
        shared_files.wait_for_files(worker, tmp_path / "here", ["vocab.txt"], logged.append)
    path = tmp_path / "here" / "vocab.txt"
    assert str(raised.value).startswith(
        f"worker 1: {path}: worker 0 sees this file, which {reason}"
    )
    assert len(logged) == 1 and logged[0].startswith(f"worker 1: waiting for {path} ")


def test_files_that_are_the_same_are_not_waited_for(worker, tmp_path):
    for name in ("of_chief", "here"):
        (tmp_path / name / "checkpoints").mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    logged, names = [], ["checkpoints", "config.json", "task.json"]  # The last one is nowhere.
    shared_files.wait_for_files(worker, tmp_path / "here", names, logged.append)
    assert logged == []
