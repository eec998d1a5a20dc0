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
import signal
import subprocess
import sys
import tempfile
import time

THREADS = 2
HERE = pathlib.Path(__file__).resolve().parent
OF_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
LIMITS = dict.fromkeys(OF_THREADS, str(THREADS))


class Failed(Exception):
    """A process failed. The message is the last line of its stderr."""


def call(function, python=sys.executable, environment=LIMITS, timeout=None, **arguments):
    """Call a function, "module.name" in this directory, in a separate process.

    Its arguments and the dict that it returns are sent as JSON. The environment is added to that of
    this process. After `timeout` seconds the process and its children are killed.

    Returns:
        The function's dict, with "peak_mb" of the process, and "started", the Unix time of its
        start.

    Raises:
        Failed: If the process fails or takes too long.
    """
    started = time.time()
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [python, __file__, function],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **own, **environment},
        start_new_session=timeout is not None,  # A group, which is killed with its children.
    )
    try:
        output, errors = process.communicate(json.dumps(arguments), timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Failed(f"{function}: more than {timeout:.0f} s") from None
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise Failed(f"{function}: {lines[-1]}")
    return {**json.loads(output.splitlines()[-1]), "started": started}


def run(*command, environment=None):
    """Run a command in the repository; return its seconds, and the peak in MB of its memory."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            log.seek(0)
            raise Failed(f"{command}: {log.read()[-3000:]}")
    return time.monotonic() - start, usage.ru_maxrss * 1024 / 1e6


def main(function):
    """Call a function with the arguments of stdin, and print its result as JSON."""
    module, name = function.split(".")
    arguments = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone.
        result = getattr(importlib.import_module(module), name)(**arguments)
    print(json.dumps({**result, "peak_mb": round(peak_mb())}))


def peak_mb():
    """Return the peak of the memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
