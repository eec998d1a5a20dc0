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
    """Call a function in a separate process.

    Args:
        function: "module.name" in this directory. It returns a dict.
        python: Interpreter of the process.
        environment: Variables that its environment has beside those of this process.
        timeout: Seconds after which the process and its children are killed, if given.
        **arguments: Arguments of the function, which are sent as JSON.

    Returns:
        The function's dict, with "peak_mb" of the process, and "started", the Unix time of its
        start.

    Raises:
        Failed: If the process fails or takes too long.
    """
    started = time.time()
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "arguments.json")
        file.write_text(json.dumps(arguments), encoding="utf-8")
        process = subprocess.Popen(
            [python, __file__, function, file],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **own, **environment},
            start_new_session=timeout is not None,  # A group, which is killed with its children.
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Failed(f"{function}: more than {timeout:.0f} s") from None
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise Failed(f"{function}: {lines[-1]}")
    return {**json.loads(output.splitlines()[-1]), "started": started}


def main(function, arguments):
    """Call a function in this process and print its result as JSON."""
    module, name = function.split(".")
    arguments = json.loads(pathlib.Path(arguments).read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone.
        result = getattr(importlib.import_module(module), name)(**arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**result, "peak_mb": round(peak * 1024 / 1e6)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
