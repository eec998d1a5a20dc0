"""A Dask cluster: scheduler and two workers as processes of this machine, some of them killed."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from bert_tf import Vocabulary
from tests import small
from tests.conftest import ROOT
from tests.corpus import ENTRIES, arguments, contents, settings_of, write_corpus, write_here

pytestmark = pytest.mark.slow
pytest.importorskip("distributed", reason="dask is not installed: pip install '.[dask]'")
SECONDS = 300  # At most, until a condition holds.


class Cluster:
    """A scheduler and its workers; `address` is that of the scheduler."""

    def __init__(self, directory):
        self._directory, file = directory, directory / "scheduler.json"
        file.unlink(missing_ok=True)
        self.processes = [self._start("scheduler", "--port=0", "--dashboard-address=127.0.0.1:0")]
        wait_until(file.exists)
        self.address = json.loads(file.read_text())["address"]
        options = ("--nthreads=1", "--no-nanny", "--death-timeout=60")
        self.processes += [
            self._start("worker", *options, f"--local-directory={directory}") for _ in range(2)
        ]

    def _start(self, role, *options):
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"distributed.cli.dask_{role}",
                "--host=127.0.0.1",
                "--no-dashboard",
                f"--scheduler-file={self._directory / 'scheduler.json'}",
                *options,
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def flags(self):
        return ["--runner=dask", f"--dask_address={self.address}"]


@contextlib.contextmanager
def cluster(directory):
    directory.mkdir(exist_ok=True)
    found = Cluster(directory)
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


def wait_until(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(module, flags):
    command = [sys.executable, "-m", module, *map(str, flags)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finish(process):
    errors = process.communicate(timeout=SECONDS)[1]
    return process.returncode, errors


def has_shards(directory):
    return directory.exists() and any(
        name.startswith("examples-") for name in os.listdir(directory)
    )


@pytest.fixture
def corpus(tmp_path):
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    text = write_corpus(tmp_path / "corpus.txt", 400)
    return {"input": str(text), "vocab": str(tmp_path / "vocab.txt")}


@pytest.fixture
def flags(corpus):
    """Return the flags of a write_shards that takes seconds, and that write to a directory."""
    changes = {"num_shards": 40, "dupe_factor": 20}
    return lambda directory: arguments(corpus, directory, **changes)


@pytest.fixture
def expected(corpus, tmp_path):
    """Return the shards of one process by file."""
    return write_here(settings_of(corpus, tmp_path / "here", num_shards=40, dupe_factor=20))


def test_shards_are_those_of_one_process_and_survive_a_killed_worker(tmp_path, flags, expected):
    with cluster(tmp_path / "cluster") as dask:
        command = start("bert_tf.write_shards", [*flags(tmp_path / "shards"), *dask.flags])
        wait_until(lambda: has_shards(tmp_path / "shards"))
        # One of the workers writes it, and each of them has some of the tasks.
        dask.processes[1].send_signal(signal.SIGKILL)
        assert len(contents(tmp_path / "shards")) < 40
        status, errors = finish(command)
    assert status == 0, errors
    assert contents(tmp_path / "shards") == expected


def test_a_lost_scheduler_is_reported_and_the_rerun_continues(tmp_path, flags, expected):
    with cluster(tmp_path / "cluster") as dask:
        command = start("bert_tf.write_shards", [*flags(tmp_path / "shards"), *dask.flags])
        wait_until(lambda: has_shards(tmp_path / "shards"))
        dask.processes[0].send_signal(signal.SIGKILL)
        status, errors = finish(command)
    assert status == 2 and "Traceback" not in errors, errors
    assert "rerun the command to resume" in errors.splitlines()[-1]
    there = contents(tmp_path / "shards")
    assert 0 < len(there) < 40 and there.items() <= expected.items()
    with cluster(tmp_path / "cluster") as dask:
        again = start("bert_tf.write_shards", [*flags(tmp_path / "shards"), *dask.flags])
        status, errors = finish(again)
    assert status == 0 and "resuming: " in errors, errors
    assert contents(tmp_path / "shards") == expected


def test_an_absent_scheduler_is_reported_in_one_line(tmp_path, flags):
    absent = ["--runner=dask", "--dask_address=tcp://127.0.0.1:1"]
    absent += ["--beam_args=--dask_connection_timeout=2"]
    command = start("bert_tf.write_shards", [*flags(tmp_path / "shards"), *absent])
    status, errors = finish(command)
    assert status == 2 and "Traceback" not in errors, errors
    assert errors.splitlines()[-1].startswith("--runner=dask: "), errors


def test_predictions_of_a_cluster_are_those_of_one_process(
    tmp_path, huggingface_dir, config, run_command
):
    from bert_tf.weights.sources import read_pretrained
    from tasks.types.classification.text_classifier import ClassificationTask

    pretrained = read_pretrained(huggingface_dir)
    task = ClassificationTask(labels=("a", "b"), max_seq_length=12)
    small.trained(tmp_path / "run", pretrained, task, task.build_model(config))
    rows = [(text,) for texts in small.TEXTS.values() for text in texts]
    small.write_rows(tmp_path / "rows.csv", rows * 3, ["text"])
    common = [f"--run={tmp_path / 'run'}", f"--input={tmp_path / 'rows.csv'}", "--num_shards=6"]

    def found(directory):
        return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}

    local = [*common, f"--output_dir={tmp_path / 'local'}", "--num_workers=1"]
    done = run_command("tasks.predict", *local, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    with cluster(tmp_path / "cluster") as dask:
        command = start(
            "tasks.predict", [*common, f"--output_dir={tmp_path / 'dask'}", *dask.flags]
        )
        status, errors = finish(command)
    assert status == 0, errors
    assert found(tmp_path / "dask") == found(tmp_path / "local")
    assert len(found(tmp_path / "dask")) == 8
