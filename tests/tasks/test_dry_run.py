"""Dry runs of fine-tuning: they check and estimate what the run does, and create nothing."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.runs.run import Run
from tasks.finetuning.recipe import dry_run, finetune, plan_of, window_lengths
from tasks.finetuning.settings import FinetuneSettings
from tests import small


@pytest.fixture
def settings(huggingface_dir, complaints, tmp_path):
    settings = small.settings(huggingface_dir, complaints, tmp_path / "run")
    return dataclasses.replace(settings, dry_run=True, device="t4")


def test_it_prints_the_estimate_and_creates_nothing(settings, tmp_path):
    lines = []
    dry_run(settings, lines.append)
    report = "\n".join(lines)
    # 27 rows in batches of 8: 4 steps per epoch.
    assert "27 samples of" in report and "  steps             8 of 8 samples" in report
    assert "AdamW moments" in report and "fits into 16 GB" in report and "total" in report
    assert lines[-1].startswith("dry run: checked")
    assert not (tmp_path / "run").exists()


def test_the_lengths_are_those_of_the_tokens(settings):
    plan = plan_of(settings, lambda line: None)
    # [CLS] the bill is too high [SEP], and so on; each word is one token.
    expected = [len(text.split()) + 2 for texts in small.TEXTS.values() for text in texts]
    assert [sum(sample) for sample in plan.samples] == 3 * expected
    assert [sum(sample) for sample in plan.dev_samples] == expected
    assert plan.epochs == 2 and plan.global_batch_size == 8 and plan.static_length is None


def test_a_sweep_takes_as_long_as_its_runs(settings):
    values = {**vars(settings), "seeds": ("1", "2", "3"), "seed": 0}
    assert plan_of(FinetuneSettings(**values), lambda line: None).runs == 3


def test_devices_are_planned_that_this_machine_lacks(settings):
    values = {**vars(settings), "strategy": "tpu", "device": "tpu-v4", "devices": 4}
    plan = plan_of(FinetuneSettings(**values), lambda line: None)
    assert plan.devices == 4 and plan.static_length == settings.max_seq_length


def test_a_frozen_encoder_runs_once_per_sample(settings):
    options = {"normal_labels": ("billing",), "latent_dim": 3}
    anomaly = FinetuneSettings(**{**vars(settings), "task": "anomaly", **options})
    assert plan_of(anomaly, lambda line: None).is_frozen
    assert not plan_of(settings, lambda line: None).is_frozen


def test_samples_without_windows_are_left_out():
    ids = tf.ragged.constant([[1, 1, 1], [1] * 4, [1] * 5])
    packed = types.SimpleNamespace(input_ids=ids)
    encoded = types.SimpleNamespace(
        windows=types.SimpleNamespace(packed=packed), sample_splits=np.array([0, 2, 2, 3])
    )
    assert window_lengths(encoded) == [[3, 4], [5]]


@pytest.mark.slow
def test_an_existing_run_is_checked_and_left_as_it_is(settings, tmp_path):
    finetune(settings.runs()[""])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    dry_run(settings, lambda line: None)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert Run.exists(settings.output_dir)
    other = FinetuneSettings(**{**vars(settings), "max_seq_length": 10})
    with pytest.raises(UserError, match="max_seq_length"):
        dry_run(other, lambda line: None)
