"""Pretraining as a process: reproducible, killed at any moment, and on a full disk."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bert_tf.runs.checkpoints import read
from bert_tf.runs.run import Run
from tests.conftest import ROOT
from tests.corpus import config_of, write_shards


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    config = config_of(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return {
        "shards": write_shards(directory / "train"),
        "config": directory / "config.json",
        "global_batch_size": 12,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "log_every": 1,
    }


def arguments(flags, output_dir, **changes):
    values = {**flags, "output_dir": output_dir, **changes}
    return [f"--{name}={value}" for name, value in values.items()]


def weights_and_lines(path):
    run = Run.open(path)
    lines = [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in run.metrics()
    ]
    return read(run.checkpoints.path(run.checkpoints.steps()[-1])), lines


def same_bits(first, second):
    assert set(first[0]) == set(second[0])
    for name in first[0]:
        np.testing.assert_array_equal(first[0][name], second[0][name], err_msg=name)
    assert first[1] == second[1]


@pytest.mark.slow
def test_12_steps_in_two_processes_are_bitwise_equal(flags, tmp_path, run_command):
    results = []
    for name in ("one", "two"):
        flags_of = arguments(flags, tmp_path / name, num_train_steps=12)
        done = run_command("bert_tf.pretrain", *flags_of)
        assert done.returncode == 0, done.stderr
        results.append(weights_and_lines(tmp_path / name))
    same_bits(*results)


@pytest.mark.slow
def test_a_full_disk_is_reported_in_one_line_and_the_last_save_stays(flags, tmp_path, run_command):
    limits = arguments(flags, tmp_path / "run", num_train_steps=4, save_every=2)
    done = run_command("bert_tf.pretrain", *limits)
    assert done.returncode == 0, done.stderr
    before, _ = weights_and_lines(tmp_path / "run")
    more = arguments(flags, tmp_path / "run", num_train_steps=8, save_every=2)
    size = max(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").rglob("*.data*"))
    done = run_command(
        "bert_tf.pretrain",
        *more,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1)),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "checkpoints" in done.stderr.splitlines()[-1]
    after, _ = weights_and_lines(tmp_path / "run")
    np.testing.assert_array_equal(before["step"], after["step"])
    done = run_command("bert_tf.pretrain", *more)
    assert done.returncode == 0 and "resuming at step 4 of 8" in done.stderr


@pytest.mark.slow
def test_killed_at_twenty_moments_only_time_is_lost(flags, tmp_path, run_command):
    """Kill some processes during a save: every second step is saved."""
    changes = {"num_train_steps": 400, "save_every": 2}
    done = run_command("bert_tf.pretrain", *arguments(flags, tmp_path / "whole", **changes))
    assert done.returncode == 0, done.stderr
    rng, inside, reached = random.Random(0), 0, 0
    for _ in range(20):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bert_tf.pretrain",
                *arguments(flags, tmp_path / "run", **changes),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("step "):
                break
        resumed = [int(line.split()[3]) for line in said if line.startswith("resuming")]
        # At most one interval was lost; all of it only if the first save was not complete.
        assert sum(resumed) >= reached - 2, (said, reached)
        moment = time.monotonic() + rng.uniform(0, 0.3)
        while time.monotonic() < moment:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        directory = tmp_path / "run" / "checkpoints"
        inside += any(not (path / "checkpoint.json").exists() for path in directory.iterdir())
        reached = max([line["step"] for line in Run.open(tmp_path / "run").metrics()], default=0)
        assert reached < 400
    print(f"{inside} of 20 kills were inside of a save; step {reached} reached")
    done = run_command("bert_tf.pretrain", *arguments(flags, tmp_path / "run", **changes))
    assert done.returncode == 0, done.stderr
    same_bits(weights_and_lines(tmp_path / "run"), weights_and_lines(tmp_path / "whole"))
