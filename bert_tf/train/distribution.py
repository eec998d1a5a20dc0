"""Where a run computes: one device, or one replica of the model a device."""

import tensorflow as tf

from bert_tf.text.packing import flat, padded

STRATEGIES = ("none", "mirrored")
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def make_strategy(name, devices=None):
    """A tf.distribute strategy: "none", or "mirrored" over `devices`, by default all local GPUs."""
    return {
        "none": tf.distribute.get_strategy,
        "mirrored": lambda: tf.distribute.MirroredStrategy(devices),
    }[name]()


def make_layout(strategy):
    """How batches are laid out: `flat`, or `padded` for XLA (a TPU's, or set_jit's)."""
    compiled = tf.config.optimizer.get_jit() or isinstance(strategy, tf.distribute.TPUStrategy)
    return padded if compiled else flat


def distribute(batches, strategy):
    """Of `batches()`, a dataset of replica batches, a step takes one for each replica."""
    return strategy.distribute_datasets_from_function(lambda context: batches())


def gather(strategy, values):
    """Joins a dict of per-replica results along the batch axis, in order, as numpy arrays."""
    return {name: strategy.gather(value, axis=0).numpy() for name, value in values.items()}
