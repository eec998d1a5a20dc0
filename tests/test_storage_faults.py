"""Each call to the file system fails once: no good checkpoint, run or published version is lost."""

import builtins
import contextlib
import errno
import itertools
import os
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.runs.checkpoints import CheckpointManager, read
from bert_tf.runs.run import Run
from bert_tf.storage import files, ownership
from export import publishing
from export.checks import parity
from export.package import version_files

CALLS = ("stat", "lstat", "listdir", "scandir", "open", "rename", "replace")
CALLS += ("mkdir", "remove", "unlink", "rmdir")


class Faults:
    """Fail in one call to the file system below a directory, as a storage does for a moment."""

    def __init__(self, directory, failing):
        self.directory, self.failing, self.count = str(directory), failing, 0

    def wrap(self, function):
        def call(path, *args, **kwargs):
            if self._is_below(path):
                self.count += 1
                if self.count == self.failing:
                    raise OSError(errno.EIO, "Input/output error", str(path))
            return function(path, *args, **kwargs)

        return call

    def _is_below(self, path):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return str(path).startswith(self.directory)


@contextlib.contextmanager
def one_fault(directory, failing):
    """Let call `failing`, counted from 1, fail in the block; yield the counter."""
    faults = Faults(directory, failing)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, faults.wrap(getattr(os, name)))
        patch.setattr(os, "fsync", faults.wrap(lambda descriptor: None))  # It takes milliseconds.
        patch.setattr(builtins, "open", faults.wrap(builtins.open))
        opened = faults.wrap(lambda path, mode: mode)

        class File(files._LocalFile):
            def __init__(self, path, mode):
                super().__init__(path, opened(path, mode))

        patch.setattr(files, "_LocalFile", File)
        yield faults


def each_fault(tmp_path, prepare, function, check):
    """Call a function once per call to the file system that it makes, which fails.

    Args:
        tmp_path: Directory of the test.
        prepare: Fills a new directory, a copy of which it is called with.
        function: Called with the directory, at first with the fault and then without.
        check: Called with the directory after the fault, and with True after both.

    Returns:
        The number of calls, and of those whose fault the function raised.
    """
    raised, template = 0, tmp_path / "template"
    prepare(template)
    for failing in itertools.count(1):
        directory = shutil.copytree(template, tmp_path / f"{failing}")
        with one_fault(directory, failing) as faults:
            try:
                function(directory)
            except OSError:
                raised += 1
        check(directory, False)
        with one_fault(directory, None):
            function(directory)
        check(directory, True)
        if faults.count < failing:  # There was no fault.
            return failing - 1, raised


def variables(step):
    return {"a": tf.Variable(tf.fill([3], float(step))), "step": tf.Variable(step)}


def steps_of(directory):
    """Return the steps whose checkpoints can be read, after a check of their content."""
    checkpoints = CheckpointManager(directory / "checkpoints")
    for step in checkpoints.steps():
        np.testing.assert_array_equal(read(checkpoints.path(step))["a"], np.full(3, step, "f"))
        assert checkpoints.info(step)["step"] == step
    return set(checkpoints.steps())


@pytest.fixture
def write_run(config, vocabulary):
    """Return a function that writes a run with some steps, the earliest of which is the best."""

    def write(directory, *steps):
        with Run.writing(directory):
            run = Run.create(directory, config, vocabulary, train={"settings": {}})
            for step in steps:
                run.checkpoints.save(step, variables(step))
                run.checkpoints.annotate(step, 1 / step, {})
        (directory / "notes").touch()

    return write


def test_a_save_loses_no_checkpoint(tmp_path, write_run):
    """Save step 4, evaluate it and delete step 2; step 1 is the best."""

    def save(directory):
        with ownership.sole_writer(directory):
            checkpoints = CheckpointManager(directory / "checkpoints")
            if 4 not in checkpoints.steps():
                checkpoints.save(4, variables(4))
            checkpoints.annotate(4, 1 / 4, {})

    def check(directory, is_over):
        found = steps_of(directory)
        assert {1, 3} <= found and (4 in found or 2 in found)
        assert (directory / "notes").exists()
        if is_over:
            assert found == {1, 3, 4}
            assert sorted(os.listdir(directory / "checkpoints")) == [
                f"step-{step:08d}" for step in sorted(found)
            ]
            assert CheckpointManager(directory / "checkpoints").best_step() == 1

    calls, raised = each_fault(tmp_path, lambda path: write_run(path, 1, 2, 3), save, check)
    assert calls > 50 and raised > 30


def test_a_resumed_run_loses_no_checkpoint(tmp_path, write_run, config, vocabulary):
    """Resume as a training command does; only a run without checkpoints is created anew."""

    def prepare(directory):
        write_run(directory, 1, 2)
        run = Run.open(directory)
        run.checkpoints.save(3, variables(3))
        state = directory / "checkpoints" / "step-00000003" / "checkpoint.json"
        state.write_text("{")  # Damaged, and set aside.
        run.log_metrics({"step": 2})

    def resume(directory):
        with Run.writing(directory):
            if not Run.has_checkpoint(directory):
                Run.create(directory, config, vocabulary, train={"settings": {"seed": 2}})
            run, target = Run.open(directory), variables(0)
            step = run.checkpoints.restore_latest(target, lambda line: None)
            assert step == int(target["step"]) and step in (2, 3)
            run.forget_metrics_after(step)
            if step == 2:
                run.checkpoints.save(3, variables(3))

    def check(directory, is_over):
        assert Run.open(directory).train["settings"] == {}
        assert Run.open(directory).metrics() == [{"step": 2}]
        states = directory.glob("checkpoints/step-0000000[12]/checkpoint.json")
        assert len(list(states)) == 2 and (directory / "notes").exists()
        if is_over:
            assert steps_of(directory) == {1, 2, 3}

    calls, raised = each_fault(tmp_path, prepare, resume, check)
    assert calls > 50 and raised > 30


@pytest.mark.medium
def test_a_run_without_a_checkpoint_starts_again(tmp_path, write_run, config, vocabulary):
    def start(directory):
        with Run.writing(directory):
            if not Run.has_checkpoint(directory):
                run = Run.create(directory, config, vocabulary, train={"settings": {"seed": 2}})
                run.checkpoints.save(1, variables(1))

    def check(directory, is_over):
        assert (directory / "notes").exists()
        if is_over:
            assert steps_of(directory) == {1}
            run = Run.open(directory)
            assert run.train["settings"] == {"seed": 2} and run.metrics() == []

    def prepare(directory):
        write_run(directory)
        Run.open(directory).log_metrics({"step": 2})

    calls, raised = each_fault(tmp_path, prepare, start, check)
    assert calls > 50 and raised > 30


def test_publishing_loses_no_version(tmp_path, monkeypatch):
    model = types.SimpleNamespace(record={"origin": "run RUN"})
    monkeypatch.setattr(publishing, "loaded", lambda *args: contextlib.nullcontext(model))
    monkeypatch.setattr(version_files, "prepare", lambda *args: ())
    monkeypatch.setattr(version_files, "write_documents", lambda *args: None)
    monkeypatch.setattr(parity, "check", lambda *args: {})

    def write(trained, directory, *rest):
        for name in ("saved_model.pb", "variables/variables.index"):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(b"model")

    monkeypatch.setattr(publishing, "write_saved_model", write)

    def prepare(directory):
        for number in ("3", "4"):
            (directory / number / "variables").mkdir(parents=True)
            write(None, directory / number)

    def publish(directory):
        version = publishing.publish("RUN", directory)
        assert int(version.name) > 4

    def check(directory, is_over):
        published = {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
        assert {3, 4} <= published and min(published) == 3
        for number in published:
            assert files.listdir(directory / str(number)) == ["saved_model.pb", "variables"]
            assert files.listdir(directory / str(number) / "variables") == ["variables.index"]
        if is_over:
            assert max(published) in (5, 6) and len(os.listdir(directory)) == len(published)

    calls, raised = each_fault(tmp_path, prepare, publish, check)
    assert calls > 30 and raised > 20
