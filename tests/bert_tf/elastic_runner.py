"""Train a run on a number of replicas in a process of its own; test_elastic.py starts it.

A process keeps one set of keys for the reductions of all its strategies, so that it cannot train on
two and on four replicas.
"""

import json
import pathlib
import sys

import pytest
import tensorflow as tf


def main(directories, output_dir, replicas, steps, stop):
    """Train until step `stop`, or to the end if it is 0."""
    replicas = int(replicas)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    from bert_tf.pretraining import recipe
    from bert_tf.train.signals import Interrupted
    from tests.pretraining import settings_of, stop_at

    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    made = {name: pathlib.Path(path) for name, path in json.loads(directories).items()}
    settings = settings_of(made, output_dir, **json.loads(steps))
    with pytest.MonkeyPatch.context() as context:
        if not int(stop):
            recipe.pretrain(settings, strategy=strategy)
            return
        stop_at(context, int(stop))
        with pytest.raises(Interrupted):
            recipe.pretrain(settings, strategy=strategy)


if __name__ == "__main__":
    main(*sys.argv[1:])
