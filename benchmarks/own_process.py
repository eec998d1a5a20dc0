"""Calls functions of the benchmarks, each in a process of its own, here or in another environment.

A peak of memory is a process's; and PyTorch lives in an environment without TensorFlow. Who calls
should stay small, and so without TensorFlow: on Linux a process's ru_maxrss begins with its
parent's.
"""

import contextlib
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

THREADS = "2"
HERE = pathlib.Path(__file__).resolve().parent
OF_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
OF_CHILD = {"TF_CPP_MIN_LOG_LEVEL": "3"}


class Failed(Exception):
    """A process ended without an answer; says the last line of what it had to say."""


def call(function, python=sys.executable, threads=THREADS, **arguments):
    """The dict that `function` ("module.name", beside this file) returns, and of its process
    "peak_mb" and "process_seconds". Arguments and answer go as JSON.
    """
    start = time.perf_counter()
    environment = {**OF_CHILD, **dict.fromkeys(OF_THREADS, threads)}
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [python, __file__, function, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(f"{function}: {said[-1]}")
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "process_seconds": round(time.perf_counter() - start, 1),
    }


def append(path, record):
    """A JSON line more in a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def main(function, arguments):
    module, name = function.split(".")
    with contextlib.redirect_stdout(sys.stderr):  # Libraries' and recipes' lines.
        prediction = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**prediction, "peak_mb": round(peak * 1024 / 1e6)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
