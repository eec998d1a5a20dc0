"""Runs commands in forks of a process that has imported TensorFlow already, so they start at once.

Run `python -m tests.fault_server`. Each line of JSON {"module", "arguments", "output"} starts a
command in its own process group and is answered by its pid; the command prints to the file
"output". A line {"pid"} waits for the end of a command and is answered by its status.
"""

import json
import multiprocessing.util
import os
import runpy
import sys
import traceback

# These are imported but not used, so that a fork finds no threads.
import bert_tf.data.vocabulary_learning
import bert_tf.pretraining.recipe  # noqa: F401
import export.publishing  # noqa: F401
import tasks.finetuning.recipe
import tasks.prediction.outputs
import tasks.types.similarity.text_embedder  # noqa: F401


def start(module, arguments, output):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    # As at the end of a process; os._exit skips it, and semaphores would be reported as leaked.
    multiprocessing.util._exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        else:
            answer = start(**request)
        print(answer, flush=True)
