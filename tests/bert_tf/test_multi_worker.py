"""Worker processes on loopback: equal to one process, stopped together, loss reported."""

import json
import pathlib
import signal

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.train.distribution import names_lost_worker
from bert_tf.weights.sources import PretrainedWeights
from tests import small
from tests.conftest import READS_PROC
from tests.corpus import ENTRIES, write_shards
from tests.workers import (
    assert_lost,
    assert_rejected,
    finish,
    last_weights,
    make_flags,
    start,
    supervise,
    wait_for_line,
    with_dropout,
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return make_flags(tmp_path_factory.mktemp("data"))


def start_workers(flags, output_dir, module="bert_tf.pretrain", count=2, of_others=None):
    """Start the processes of one pretraining run, the chief first."""
    return start(module, {**flags, "output_dir": output_dir}, count, of_others)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "recompute"), [(2, False), (2, True), (4, False)])
def test_workers_equal_one_process(flags, tmp_path, run_command, count, recompute):
    """Recompute layers in the backward pass of the workers, but not in the single process."""
    of_several = {**flags, "gradient_checkpointing": recompute}
    chief, *others = finish(start_workers(of_several, tmp_path / "several", count=count))
    assert "step 10/10" in chief and not any(others)  # Only one worker logs.
    assert f"on {count} replicas" in chief
    arguments = {**flags, "output_dir": tmp_path / "one"}
    done = run_command(
        "bert_tf.pretrain", *(f"--{name}={value}" for name, value in arguments.items())
    )
    assert done.returncode == 0, done.stderr
    one, several = (last_weights(tmp_path / name) for name in ("one", "several"))
    assert set(one) == set(several)
    # Adam divides by small numbers: a difference of 1.3e-5 was measured on one CPU type.
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=0, atol=2e-5, err_msg=name)
    lines = [Run.open(tmp_path / name).metrics() for name in ("one", "several")]
    for number, (first, second) in enumerate(zip(*lines, strict=True)):
        rel = 1e-3 if number else 1e-5  # Later gradients are those of slightly other weights.
        for name in set(first) - {"tokens_per_second"}:
            assert first[name] == pytest.approx(second[name], rel=rel), name
    assert max(line.get("gradient_norm", 0.0) for line in lines[0]) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_makes_both_workers_save_the_same_step_and_they_resume(flags, tmp_path, which):
    flags = with_dropout(flags)
    processes = start_workers(flags, tmp_path / "stopped")
    wait_for_line(processes[0], "step 7/")
    processes[which].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143]
    messages = {output.splitlines()[-1] for output in outputs}
    assert len(messages) == 1 and "stopped and saved at step" in messages.pop()
    steps = Run.open(tmp_path / "stopped").checkpoints.steps()
    assert 7 <= steps[-1] < 400
    finish(start_workers(flags, tmp_path / "stopped"))
    finish(start_workers(flags, tmp_path / "whole"))
    stopped, complete = last_weights(tmp_path / "stopped"), last_weights(tmp_path / "whole")
    for name in complete:
        np.testing.assert_array_equal(stopped[name], complete[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_worker_is_restarted_by_a_supervisor(flags, tmp_path, which):
    """Check that the run ends as without the kill, whichever worker was killed."""
    flags = with_dropout(flags)
    killed = {**flags, "output_dir": tmp_path / "killed"}
    statuses = supervise("bert_tf.pretrain", killed, which, "step 7/")
    assert statuses[which][0] == -signal.SIGKILL and statuses[1 - which][0] == 2, statuses
    assert [of[-1] for of in statuses] == [0, 0], statuses
    finish(start_workers(flags, tmp_path / "complete"))
    killed, complete = last_weights(tmp_path / "killed"), last_weights(tmp_path / "complete")
    for name in complete:
        np.testing.assert_array_equal(killed[name], complete[name], err_msg=name)


ABORTED = "Collective ops is aborted by: "
ERRORS = {
    "Socket closed\nAdditional GRPC error information from remote target /job:worker/replica:0/"
    "task:2 while calling /tensorflow.WorkerService/RecvBuf": "worker 2, ",
    "{{function_node CollectiveReduceV2_device_/job:worker/replica:0/task:0/device:CPU:0}} "
    f"{ABORTED}Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped "
    "sending heartbeats):\n/job:worker/replica:0/task:1": "worker 1, ",
    f"{ABORTED}Failed to send RPC to coordination service. Either the leader task was preempted/"
    "died/restarted unexpectedly": "worker 0, ",
    f"{ABORTED}Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat": "worker 0, ",
    f"{ABORTED}Cancelled": "",
}


@pytest.mark.parametrize(("text", "worker"), ERRORS.items())
def test_errors_of_a_lost_worker_are_distinguished_from_others(monkeypatch, text, worker):
    monkeypatch.setenv("TF_CONFIG", "{}")

    @names_lost_worker
    def train(error):
        raise error

    lost = tf.errors.UnavailableError(None, None, f"Graph execution error:\n\n{text}")
    message = rf"^another worker is lost \({worker}UnavailableError\); restart all workers"
    with pytest.raises(UserError, match=message) as raised:
        train(lost)
    assert "\n" not in str(raised.value)
    other = tf.errors.UnavailableError(None, None, "storage.googleapis.com does not answer")
    with pytest.raises(tf.errors.UnavailableError):
        train(other)
    monkeypatch.delenv("TF_CONFIG")  # Replicas of one process report each other in the same way.
    with pytest.raises(tf.errors.UnavailableError):
        train(lost)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_reported_by_the_other(flags, tmp_path, which, signum):
    flags = {**flags, "num_train_steps": 50000, "save_every": 5}
    processes = start_workers(flags, tmp_path / "run")
    try:
        wait_for_line(processes[0], "step 7/")
        processes[which].send_signal(signum)
        assert_lost(processes[1 - which], which)
    finally:
        processes[which].kill()
    processes[which].communicate()
    assert Run.open(tmp_path / "run").checkpoints.steps()[-1] >= 5


@pytest.mark.slow
def test_a_worker_lost_during_a_save_is_reported_at_the_evaluation(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("PAUSES", json.dumps({"0": {"save": [0, 15]}}))
    flags = {**flags, "eval_every": 4}
    processes = start_workers(flags, tmp_path / "run", "tests.paused")
    wait_for_line(processes[0], "step 4/")
    processes[1].kill()
    assert_lost(processes[0], 1)
    processes[1].communicate()
    assert Run.open(tmp_path / "run").checkpoints.steps() == [4]


@pytest.mark.slow
def test_a_save_may_take_longer_than_the_heartbeat_timeout(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("PAUSES", json.dumps({"0": {"save": [15, 0]}}))
    chief, _ = finish(start_workers(flags, tmp_path / "run", "tests.paused"))
    assert "step 10/10" in chief


@pytest.mark.slow
def test_only_the_chief_reads_which_checkpoint_is_best(flags, tmp_path, monkeypatch):
    """Remove the best checkpoint, of step 3, after the other worker has listed the names."""
    pauses = {"0": {"annotate": [1, 0]}, "1": {"steps": [0, 4]}}
    monkeypatch.setenv("PAUSES", json.dumps(pauses))
    flags = {**flags, "num_train_steps": 6, "save_every": 1, "eval_every": 3}
    chief, _ = finish(start_workers(flags, tmp_path / "run", "tests.paused"))
    assert chief.count("(best so far)") == 2
    assert Run.open(tmp_path / "run").checkpoints.steps() == [5, 6]


@pytest.mark.slow
def test_a_worker_with_other_flags_is_reported(flags, tmp_path):
    """Check flags that would make all workers wait forever, each at another step."""
    assert_rejected(*start_workers(flags, tmp_path / "run", of_others={"learning_rate": 1e-3}))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_worker_with_other_data_is_reported(flags, tmp_path):
    """Name the same directory of shards in both working directories."""
    directories = [tmp_path / name for name in ("of_chief", "of_other")]
    for seed, directory in enumerate(directories):
        directory.mkdir()
        write_shards(directory / "train", seed=seed)
    flags = {**flags, "shards": "train/shards", "output_dir": tmp_path / "run"}
    assert_rejected(*start("bert_tf.pretrain", flags, directories=directories))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_worker_with_other_weights_is_reported(flags, tmp_path):
    """Name the same weights in both working directories."""
    directories = [tmp_path / name for name in ("of_chief", "of_other")]
    config = BertConfig.load(flags["config"])
    for seed, directory in enumerate(directories):
        weights = small.random_weights(config, seed)
        weights = PretrainedWeights(config, Vocabulary(ENTRIES), weights, "somewhere")
        weights.save(directory / "weights")
    flags = {**flags, "init_from": "weights", "output_dir": tmp_path / "run"}
    del flags["config"]
    assert_rejected(*start("bert_tf.pretrain", flags, directories=directories))
    assert not (tmp_path / "run").exists()


def threads_and_megabytes(process):
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["Threads"]), int(values["VmRSS"].split()[0]) / 1024


@pytest.mark.slow
@READS_PROC
def test_threads_and_memory_stay_constant_over_2000_steps(flags, tmp_path):
    flags = {**flags, "num_train_steps": 2000, "log_every": 100, "save_every": 500}
    flags["config"] = flags["config"].with_name("small.json")
    del flags["eval_shards"]
    processes, lines, seen = start_workers(flags, tmp_path / "run"), [], []
    for line in processes[0].stderr:
        lines.append(line)
        if line.startswith("step "):
            seen.append([threads_and_megabytes(process) for process in processes])
    output = "".join(lines) + processes[1].communicate(timeout=60)[1]
    assert [process.wait(60) for process in processes] == [0, 0], output
    assert len(seen) == 20, output
    for (first_threads, first), (last_threads, last) in zip(seen[2], seen[-1], strict=True):
        assert last_threads <= first_threads + 8
        assert last <= first + 30
