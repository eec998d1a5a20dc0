"""Several processes of one command on loopback, for --strategy=multi_worker."""

import json
import os
import socket
import subprocess
import sys

from tests.conftest import ROOT


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

    def command(index):
        values = {**flags, "strategy": "multi_worker", **(of_others or {} if index else {})}
        values = [f"--{name}={value}" for name, value in values.items()]
        return [sys.executable, "-m", module, *values]

    workers = [f"localhost:{port}" for port in free_ports(count)]
    return [
        subprocess.Popen(
            command(index),
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
                ),
            },
        )
        for index in range(count)
    ]


def finish(processes, timeout=300):
    """Assert that all processes end well and return what each wrote to stderr."""
    try:
        outputs = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # One process may still wait for the other.
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs
