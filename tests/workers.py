"""Several processes of one command on loopback, for --strategy=multi_worker."""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys

from tests.conftest import ROOT

MAX_STARTS = 6


def free_ports(count):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def start(module, flags, count=2, of_others=None):
    """Start `count` processes of `python -m module --flag=value ...`, the chief first.

    `of_others` are additional flags of all processes but the chief.
    """
    ports = free_ports(count)
    return [
        start_worker(module, {**flags, **(of_others or {} if index else {})}, ports, index)
        for index in range(count)
    ]


def start_worker(module, flags, ports, index):
    """Start the worker `index` of those on `ports`."""
    values = {**flags, "strategy": "multi_worker"}
    workers = [f"localhost:{port}" for port in ports]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    return subprocess.Popen(
        [sys.executable, "-m", module, *(f"--{name}={value}" for name, value in values.items())],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TF_CONFIG": json.dumps(cluster)},
    )


def supervise(module, flags, killed, at, count=2):
    """Run workers under a supervisor that restarts each one that fails, as systemd does.

    Args:
        module: The command.
        flags: Its flags.
        killed: Index of the worker that is killed once.
        at: Begin of the line of the chief at which it is killed.
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
                    running[killed].kill()
            statuses[index].append(process.wait())

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))
    return statuses


def finish(processes, timeout=300):
    """Assert that all processes end well and return what each wrote to stderr."""
    try:
        outputs = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # One process may still wait for the other.
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs
