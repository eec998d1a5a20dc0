"""A run resumes on another number of replicas: same data, losses and weights."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bert_tf.data.batches import PretrainingDataset
from bert_tf.pretraining import recipe
from bert_tf.runs.checkpoints import CheckpointManager
from bert_tf.runs.run import Run
from bert_tf.train.distribution import make_strategy
from bert_tf.train.signals import Interrupted
from tests import small
from tests.conftest import ROOT
from tests.pretraining import lines_of, make_directories, settings_of, stop_at, weights_of

pytestmark = pytest.mark.medium
STEPS = {"num_train_steps": 9, "global_batch_size": 12}


@pytest.fixture(scope="module")
def strategies(mirrored):
    """Return {number of replicas: strategy}."""
    return {1: make_strategy("none"), 2: mirrored}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return the data, and a model without dropout, whose masks differ from replica to replica."""
    made = make_directories(tmp_path_factory.mktemp("data"))
    values = json.loads(made["config"].read_text())
    values |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made["config"].write_text(json.dumps(values))
    return made


@pytest.fixture(scope="module")
def runs(directories, strategies, tmp_path_factory):
    """Return a run on one replica, and its copy from when it saved step 3."""
    directory, save = tmp_path_factory.mktemp("complete"), CheckpointManager.save

    def save_and_copy(self, step, variables):
        save(self, step, variables)
        if step == 3:
            shutil.copytree(directory / "run", directory / "at3")

    with pytest.MonkeyPatch.context() as context:
        context.setattr(CheckpointManager, "save", save_and_copy)
        settings = settings_of(directories, directory / "run", **STEPS)
        return recipe.pretrain(settings, strategy=strategies[1]), directory / "at3"


@pytest.fixture
def complete(runs):
    return runs[0]


def assert_same_training(run, complete):
    """Assert equal losses and metrics of each step, and equal final weights, up to rounding."""
    for line, other in zip(lines_of(run), lines_of(complete), strict=True):
        assert line.keys() == other.keys()
        for name in line:
            np.testing.assert_allclose(line[name], other[name], rtol=1e-5, err_msg=name)
    weights = weights_of(complete)
    for name, values in weights_of(run).items():
        np.testing.assert_allclose(values, weights[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_run_continues_on_another_number_of_replicas(
    directories, strategies, complete, tmp_path, monkeypatch
):
    """Start on two replicas and end on one; the next tests go the other way."""
    read, training_batches = [], PretrainingDataset.training_batches

    def batches(self, position, size, layout, select):
        read.append((position.next_example, size))
        return training_batches(self, position, size, layout, select)

    monkeypatch.setattr(PretrainingDataset, "training_batches", batches)
    settings = settings_of(directories, tmp_path / "run", **STEPS)
    with monkeypatch.context() as context:
        stop_at(context, 4)
        with pytest.raises(Interrupted):
            recipe.pretrain(settings, strategy=strategies[2])
    run = recipe.pretrain(settings, strategy=strategies[1])
    # The second part reads from where the first one ended, in batches of its replicas.
    assert read == [(0, 6), (48, 12)]
    assert_same_training(run, complete)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 2, 4), (4, 2, 1), (2, 4, 1)], ids=str)
def test_a_run_continues_on_1_2_and_4_replicas(directories, complete, tmp_path, replicas):
    paths = json.dumps({name: str(path) for name, path in directories.items()})
    for number, stop in zip(replicas, (3, 6, 0), strict=True):
        arguments = [paths, tmp_path / "run", number, json.dumps(STEPS), stop]
        subprocess.run(
            [sys.executable, "-m", "tests.bert_tf.elastic_runner", *map(str, arguments)],
            cwd=ROOT,
            check=True,
        )
    assert_same_training(Run.open(tmp_path / "run"), complete)


@pytest.mark.parametrize(
    "changes",
    small.fast(
        [{"strategy": "mirrored"}, {"gradient_accumulation_steps": 2}],
        {"gradient_accumulation_steps": 2},
    ),
    ids=str,
)
def test_flags_that_divide_a_batch_may_change(directories, strategies, runs, tmp_path, changes):
    complete, stopped = runs
    shutil.copytree(stopped, tmp_path / "run")
    changed = settings_of(directories, tmp_path / "run", **STEPS, **changes)
    changed.check()
    run = recipe.pretrain(changed, strategy=strategies[2])
    losses = [[line["loss"] for line in lines_of(of)] for of in (run, complete)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
