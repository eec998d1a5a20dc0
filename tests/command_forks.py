"""Runs commands in forks of one process that has imported what all of them need.

    python -m tests.command_forks

Reads lines of JSON, [module, arguments], and answers each with [status, stdout, stderr]. A fork
starts in milliseconds; it imports the command as `python -m module` does, and ends like it. What
the commands import is imported before.
"""

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback

from bert_tf.__main__ import COMMANDS


def main():
    for module in COMMANDS:
        importlib.import_module(module)
        del sys.modules[module]  # A fork runs it as __main__.
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


def answer(module, arguments):
    """Return the exit status and the output of a command."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(run(module, arguments))
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()


def run(module, arguments):
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
