"""Several processes of one command on loopback, for --strategy=multi_worker."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys

from bert_tf.model.fused_kernels import MIN_WIDTH
from bert_tf.runs.checkpoints import read
from bert_tf.runs.run import Run
from tests.conftest import ROOT
from tests.corpus import config_of, write_shards

MAX_STARTS = 6
# A process needs about 20 seconds of CPU time to import TensorFlow and to compile kernels, which
# take minutes beside other work. Only processes that wait for each other forever reach this limit.
MAX_SECONDS = 1800


def make_flags(directory):
    """Write shards and configurations, and return the flags of a short pretraining."""
    # Wide enough for compiled kernels.
    config = config_of(hidden_size=MIN_WIDTH, num_hidden_layers=2, num_attention_heads=2)
    for name, rate in (("config", 0.0), ("dropout", 0.1)):
        values = config.to_dict()
        values |= {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
        (directory / f"{name}.json").write_text(json.dumps(values))
    small = config_of(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    (directory / "small.json").write_text(json.dumps(small.to_dict()))
    return {
        "global_batch_size": 12,
        "num_train_steps": 10,
        "learning_rate": 1e-2,  # Some gradient norms exceed 1 and are clipped.
        "warmup_steps": 2,
        "log_every": 1,
        "save_every": 4,
        "shards": write_shards(directory / "train"),
        "eval_shards": write_shards(directory / "held_out", seed=1),
        "config": directory / "config.json",
    }


def with_dropout(flags, num_train_steps=400):
    """Return the flags of a longer training with dropout and without evaluation."""
    changes = {"config": flags["config"].with_name("dropout.json")}
    changes["num_train_steps"] = num_train_steps
    return {**{name: flags[name] for name in flags if name != "eval_shards"}, **changes}


def last_weights(path):
    run = Run.open(path)
    return read(run.checkpoints.path(run.checkpoints.steps()[-1]))


def free_ports(count):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def start(module, flags, count=2, of_others=None, directories=None):
    """Start `count` processes of `python -m module --flag=value ...`, the chief first.

    `of_others` are additional flags of all processes but the chief, and `directories` the working
    directory of each process.
    """
    ports = free_ports(count)
    return [
        start_worker(
            module, {**flags, **(of_others or {} if index else {})}, ports, index, directory
        )
        for index, directory in enumerate(directories or [ROOT] * count)
    ]


def start_worker(module, flags, ports, index, directory=ROOT):
    """Start the worker `index` of those on `ports`."""
    jobs = {"worker": [f"localhost:{port}" for port in ports]}
    return start_process(module, flags, jobs, "worker", index, directory)


def start_process(module, flags, jobs, job, index, directory=ROOT):
    """Start one process of a cluster, of the type `job`; `jobs` are its addresses by type."""
    values = {**flags, "strategy": "multi_worker"}
    cluster = {"cluster": jobs, "task": {"type": job, "index": index}}
    return subprocess.Popen(
        [sys.executable, "-m", module, *(f"--{name}={value}" for name, value in values.items())],
        cwd=directory,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TF_CONFIG": json.dumps(cluster), "PYTHONPATH": str(ROOT)},
    )


def supervise(module, flags, which, at, signum=signal.SIGKILL, count=2):
    """Run workers under a supervisor that restarts each one that fails, as systemd does.

    Args:
        module: The command.
        flags: Its flags.
        which: Index of the worker that gets the signal, once.
        at: Begin of the line of the chief at which it gets it.
        signum: The signal. A worker that is stopped goes on when another one has failed.
        count: Number of workers.

    Returns:
        The exit statuses of each worker, in order.
    """
    ports, running, statuses = free_ports(count), [None] * count, [[] for _ in range(count)]
    pending = [at]

    def run(index):
        while len(statuses[index]) < MAX_STARTS and (not statuses[index] or statuses[index][-1]):
            running[index] = process = start_worker(module, flags, ports, index)
            for line in process.stderr:
                if index == 0 and pending and line.startswith(pending[0]):
                    pending.clear()
                    running[which].send_signal(signum)
            statuses[index].append(process.wait())
            if index != which and signum == signal.SIGSTOP:
                running[which].send_signal(signal.SIGCONT)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))
    return statuses


def finish(processes, timeout=MAX_SECONDS):
    """Assert that all processes end well and return what each wrote to stderr."""
    try:
        outputs = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # One process may still wait for the other.
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def wait_for_line(process, start):
    """Read stderr to a line with a begin, and return it."""
    line = next((line for line in process.stderr if line.startswith(start)), None)
    assert line is not None, f"ended without {start!r}"
    return line


def assert_lost(process, which, timeout=60):
    """Assert that a process ends within a minute with one line that names the lost worker."""
    output = process.communicate(timeout=timeout)[1]
    assert process.returncode == 2, output
    *steps, line = output.splitlines()
    assert f"another worker is lost (worker {which}, " in line, output
    assert "Traceback" not in output and not [step for step in steps if "rror" in step]


def assert_rejected(chief, other):
    """Assert that the second worker ends before the first step, since it differs."""
    output = other.communicate(timeout=120)[1]
    assert other.returncode == 2, output
    (line,) = output.splitlines()
    assert line.startswith("this worker's flags or data differ from those of worker 0")
    assert_lost(chief, 1)
