"""`bert_tf.pretrain` with pauses in one worker, which simulate slow storage.

The environment variable PAUSES is JSON: {"index of the worker": {"method of CheckpointManager":
[seconds before it, seconds after it]}}.
"""

import json
import os
import runpy
import time

from bert_tf.runs.checkpoints import CheckpointManager


def pause(name, before, after):
    """Make one method of CheckpointManager slow."""
    method = getattr(CheckpointManager, name)

    def slow(self, *args, **kwargs):
        time.sleep(before)
        result = method(self, *args, **kwargs)
        time.sleep(after)
        return result

    setattr(CheckpointManager, name, slow)


if __name__ == "__main__":
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for name, seconds in json.loads(os.environ["PAUSES"]).get(str(index), {}).items():
        pause(name, *seconds)
    runpy.run_module("bert_tf.pretrain", run_name="__main__")
