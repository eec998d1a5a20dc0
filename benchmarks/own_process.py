"""Call functions of the benchmarks in separate processes, also of other environments.

Peak memory is measured per process, and PyTorch is installed in an environment without TensorFlow.
On Linux a process's ru_maxrss starts with its parent's, so that the caller has to stay small: it
must not import TensorFlow.
"""

import contextlib
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

THREADS = "2"
HERE = pathlib.Path(__file__).resolve().parent
OF_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
OF_CHILD = {"TF_CPP_MIN_LOG_LEVEL": "3"}


class Failed(Exception):
    """A process failed. The message is the last line of its stderr."""


def call(function, python=sys.executable, threads=THREADS, **arguments):
    """Call a function in a separate process.

    Args:
        function: "module.name" in this directory. It returns a dict.
        python: Interpreter of the process.
        threads: Number of threads, as text.
        **arguments: Arguments of the function, which are sent as JSON.

    Returns:
        The function's dict, with "peak_mb" and "process_seconds" of the process, and "started", the
        Unix time of its start.

    Raises:
        Failed: If the process fails.
    """
    start, started = time.perf_counter(), time.time()
    environment = {**OF_CHILD, **dict.fromkeys(OF_THREADS, threads)}
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "arguments.json")
        file.write_text(json.dumps(arguments), encoding="utf-8")
        done = subprocess.run(
            [python, __file__, function, file],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(f"{function}: {said[-1]}")
    return {
        **json.loads(done.stdout.splitlines()[-1]),
        "process_seconds": round(time.perf_counter() - start, 1),
        "started": started,
    }


def main(function, arguments):
    """Call a function in this process and print its result as JSON."""
    module, name = function.split(".")
    arguments = json.loads(pathlib.Path(arguments).read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone.
        prediction = getattr(importlib.import_module(module), name)(**arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**prediction, "peak_mb": round(peak * 1024 / 1e6)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
