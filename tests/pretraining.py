"""Short pretraining runs: their data and settings, and what is compared between two of them."""

import json
import signal

import numpy as np
import pytest

from bert_tf.pretraining.settings import PretrainSettings
from bert_tf.runs.checkpoints import read
from bert_tf.train.loop import TrainingLoop
from tests.corpus import config_of, write_shards

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def make_directories(directory):
    """Return {name: directory} of static, held-out, dynamic and longer shards, and a config."""
    make_config(directory)
    return {
        "shards": write_shards(directory / "train"),
        "held_out": write_shards(directory / "held_out", seed=1),
        "dynamic": write_shards(directory / "dynamic", masking="dynamic"),
        "longer": write_shards(directory / "longer", max_seq_length=48, max_predictions_per_seq=8),
        "config": directory / "config.json",
    }


def make_config(directory):
    config = config_of(**TINY, max_position_embeddings=48)
    (directory / "config.json").write_text(json.dumps(config.to_dict()))


def settings_of(directories, output_dir, shards=("shards",), **changes):
    values = {
        "shards": tuple(str(directories.get(name, name)) for name in shards),
        "config": str(directories["config"]),
        "output_dir": str(output_dir),
        "num_train_steps": 8,
        "global_batch_size": 12,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "save_every": 3,
        "log_every": 1,
    }
    return PretrainSettings(**{**values, **changes})


def lines_of(run):
    """Return the lines of metrics.jsonl without the values that depend on the clock."""
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in run.metrics()
    ]


def weights_of(run):
    return read(run.checkpoints.path(run.checkpoints.steps()[-1]))


def assert_same_bits(first, second):
    assert set(first) == set(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def stop_at(monkeypatch, step):
    """Make the training loop stop after `step` steps, as if by a signal."""
    taken = TrainingLoop._steps

    def take(self, iterator, number, asked, count, norm):
        logs = taken(self, iterator, number, asked, count, norm)
        if number + count == step:
            signal.raise_signal(signal.SIGTERM)
        return logs

    monkeypatch.setattr(TrainingLoop, "_steps", take)


class Prepared(Exception):
    """Raised in place of the training."""


def prepared(monkeypatch, start):
    """Return the training loop that a function starts, without its training."""
    loops = []

    def train(self):
        loops.append(self)
        raise Prepared

    monkeypatch.setattr(TrainingLoop, "train", train)
    with pytest.raises(Prepared):
        start()
    return loops[0]
