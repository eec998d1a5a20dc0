"""Two processes on loopback train as one does, stop together, and notice when one is lost."""

import json
import signal

import numpy as np
import pytest

from bert_tf.checkpoints import read
from bert_tf.model.kernels import LEAST_WIDTH
from bert_tf.run import Run
from tests.corpus import config_of, write_shards
from tests.workers import finish, start

FLAGS = {
    "global_batch_size": 12,
    "num_train_steps": 10,
    "learning_rate": 1e-2,  # Some gradients are longer than 1, so clipped.
    "warmup_steps": 2,
    "log_every": 1,
    "save_every": 4,
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    # Wide enough for compiled kernels.
    config = config_of(hidden_size=LEAST_WIDTH, num_hidden_layers=2, num_attention_heads=2)
    for name, rate in (("config", 0.0), ("dropout", 0.1)):
        values = config.to_dict()
        values |= {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
        (folder / f"{name}.json").write_text(json.dumps(values))
    shards = write_shards(folder / "train")
    held_out = write_shards(folder / "held_out", seed=1)
    return {
        **FLAGS,
        "shards": shards,
        "eval_shards": held_out,
        "config": folder / "config.json",
    }


def start_workers(flags, output_dir):
    """Two processes of one pretraining, the chief first."""
    return start("bert_tf.pretrain", {**flags, "output_dir": output_dir})


def last_weights(path):
    run = Run.open(path)
    return read(run.checkpoints.folder(run.checkpoints.steps()[-1]))


@pytest.mark.slow
def test_two_workers_are_one(flags, tmp_path, run_command):
    chief, other = finish(start_workers(flags, tmp_path / "two"))
    assert "step 10/10" in chief and other == ""  # One of them speaks.
    arguments = {**flags, "output_dir": tmp_path / "one"}
    done = run_command(
        "bert_tf.pretrain", *(f"--{name}={value}" for name, value in arguments.items())
    )
    assert done.returncode == 0, done.stderr
    one, two = (last_weights(tmp_path / name) for name in ("one", "two"))
    assert set(one) == set(two)
    for name in one:  # Adam divides by small numbers: 1.3e-5 was seen on one kind of processor.
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=2e-5, err_msg=name)
    lines = [Run(tmp_path / name).metrics() for name in ("one", "two")]
    for first, second in zip(*lines, strict=True):
        for name in set(first) - {"tokens_per_second"}:
            assert first[name] == pytest.approx(second[name], rel=1e-4), name
    assert max(line.get("gradient_norm", 0.0) for line in lines[0]) > 1.0


def wait_for_step(process, step):
    assert any(line.startswith(f"step {step}/") for line in process.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_told_to_stop_both_save_the_same_step_and_go_on(flags, tmp_path, which):
    flags = {**flags, "config": flags["config"].with_name("dropout.json"), "num_train_steps": 400}
    del flags["eval_shards"]
    processes = start_workers(flags, tmp_path / "stopped")
    wait_for_step(processes[0], 7)
    processes[which].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143]
    messages = {output.splitlines()[-1] for output in outputs}
    assert len(messages) == 1 and "stopped and saved at step" in messages.pop()
    steps = Run.open(tmp_path / "stopped").checkpoints.steps()
    assert 7 <= steps[-1] < 400
    finish(start_workers(flags, tmp_path / "stopped"))
    finish(start_workers(flags, tmp_path / "whole"))
    stopped, whole = last_weights(tmp_path / "stopped"), last_weights(tmp_path / "whole")
    for name in whole:
        np.testing.assert_array_equal(stopped[name], whole[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_worker_is_named_by_the_other(flags, tmp_path, which):
    flags = {**flags, "num_train_steps": 5000, "save_every": 5}
    processes = start_workers(flags, tmp_path / "run")
    wait_for_step(processes[0], 7)
    processes[which].kill()
    left = processes[1 - which]
    output = left.communicate(timeout=150)[1]
    assert left.returncode == 2 and "another worker is lost" in output.splitlines()[-1], output
    processes[which].communicate()
    assert Run.open(tmp_path / "run").checkpoints.steps()[-1] >= 5
