"""Layer-wise rates, frozen layers and early stopping in the recipe, also across a stop."""

import dataclasses
import os
import signal

import numpy as np
import pytest

from bert_tf import UserError, read_pretrained
from bert_tf.runs.checkpoints import read
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.signals import Interrupted
from tasks.finetuning.recipe import finetune
from tests import small

FROZEN = ("bert/embeddings/", "bert/layer_0/")


@pytest.fixture(scope="module")
def config(config):
    """Return a configuration with two layers."""
    return dataclasses.replace(config, num_hidden_layers=2)


@pytest.fixture
def settings(huggingface_dir, complaints, tmp_path):
    return small.settings(huggingface_dir, complaints, tmp_path / "run")


def updates(run, settings):
    """Return {name: largest change by the first step of the run} for the encoder."""
    before = read_pretrained(settings.init_from).weights
    after = read(run.checkpoints.path(1))
    return {name: np.abs(after[name] - array).max() for name, array in before.items()}


@pytest.mark.slow
def test_each_layer_has_its_own_rate(settings):
    """Read off the rates: Adam's first update equals the rate, whatever the gradient."""
    run = finetune(
        dataclasses.replace(
            settings,
            layer_decay=0.5,
            weight_decay_rate=0.0,
            warmup_proportion=0.0,
            global_batch_size=27,
            epochs=1,
            dev=(),
        )
    )
    changed = updates(run, settings)
    for name, factor in (
        ("bert/pooler/kernel", 1.0),
        ("bert/layer_1/output/kernel", 0.5),
        ("bert/layer_0/output/kernel", 0.25),
        ("bert/embeddings/position_embeddings", 0.125),
    ):
        assert changed[name] == pytest.approx(1e-2 * factor, rel=0.01), name


@pytest.mark.slow
def test_frozen_layers_stay_constant_and_have_no_slots(settings):
    run = finetune(dataclasses.replace(settings, frozen_layers=1, epochs=1))
    before, after = read_pretrained(settings.init_from).weights, read(run.checkpoints.path(4))
    for name, array in before.items():
        is_same = np.array_equal(after[name], array)
        assert is_same == name.startswith(FROZEN), name
        assert (f"{name}/adam_m" in after) == (not is_same), name
    assert "classifier/kernel/adam_m" in after
    with pytest.raises(UserError, match="--frozen_layers: was 1 when .* was created, is now 0"):
        finetune(dataclasses.replace(settings, frozen_layers=0, epochs=1))
    other = dataclasses.replace(settings, frozen_layers=3, output_dir=f"{settings.output_dir}-2")
    with pytest.raises(
        UserError, match="--frozen_layers=3: expected at most 2, the number of layers"
    ):
        finetune(other)
    assert not os.path.exists(other.output_dir)


@pytest.mark.slow
def test_all_three_together_stop_early_and_resumed_at_the_same_step(
    settings, tmp_path, monkeypatch
):
    """Use a rate so low that no evaluation beats the first: the third is the last."""
    settings = dataclasses.replace(
        settings, layer_decay=0.5, frozen_layers=1, patience=2, learning_rate=1e-9, epochs=6
    )
    said = []
    complete = finetune(settings, said.append)
    assert any(line.startswith("stopped early at step 12 of 24: no better score") for line in said)
    assert complete.checkpoints.steps()[-1] == 12
    again = []
    finetune(settings, again.append)
    assert len(again) == 1 and "finished at step 12, nothing to do" in again[0]

    original = TrainingLoop._steps

    def step(loop, iterator, number, asked, count, norm):
        logs = original(loop, iterator, number, asked, count, norm)
        if number + count == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return logs

    changed = dataclasses.replace(settings, output_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_steps", step)
        with pytest.raises(Interrupted, match="stopped and saved at step 10 of 24"):
            finetune(changed)
    resumed = finetune(changed)
    assert resumed.checkpoints.steps()[-1] == 12
    expected, actual = (read(run.checkpoints.path(12)) for run in (complete, resumed))
    assert set(expected) == set(actual)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)
    with pytest.raises(UserError, match="--patience: was 2 when .* was created, is now 3"):
        finetune(dataclasses.replace(settings, patience=3))
