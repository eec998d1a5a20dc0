"""Runs, shards and .keras files of version 0.1: opened, evaluated and resumed with equal results.

tests/released_runs was written by the code of that version; each run was stopped in its second
epoch. expected.json has its flags and its metrics in that version, before and after resuming.
"""

import json
import shutil

import keras
import numpy as np
import pytest

from bert_tf.data.manifest import Manifest
from bert_tf.pretraining.recipe import pretrain
from bert_tf.pretraining.settings import PretrainSettings
from bert_tf.system import command
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.distribution import make_strategy
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.model.loading import load_model
from tasks.types.anomaly import autoencoder  # noqa: F401  Registers the class of a model.
from tests import small
from tests.bert_tf.test_conversion import converted
from tests.conftest import ROOT

RELEASED = ROOT / "tests" / "released_runs"
EXPECTED = json.loads((RELEASED / "expected.json").read_text())
TASKS = sorted(set(EXPECTED) - {"pretraining", "models"})
MODELS = sorted(EXPECTED["models"])
IDS = np.array([[2, 5, 6, 7, 8, 3], [2, 9, 5, 3, 0, 0]], np.int32)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Return a copy as the working directory, because flags and records have relative paths."""
    shutil.copytree(RELEASED, tmp_path / "released")
    monkeypatch.chdir(tmp_path / "released")


def settings_of(settings_class, name):
    """Return settings from the flags in their spelling of version 0.1."""
    flags = [*EXPECTED[name]["flags"], f"--output_dir=runs/{name}"]
    return command.parse(settings_class, ["command", *flags])[0]


def evaluate(name, run=None):
    trained, strategy = load_model(run or f"runs/{name}"), make_strategy("none")
    path = next(flag for flag in EXPECTED[name]["flags"] if flag.startswith("--dev="))
    examples = trained.task.reader.load_examples(path.removeprefix("--dev="))
    encoded = EncodedExamples.encode(examples, trained.serving.pipeline, to_flat)
    return Evaluator(trained.task, trained.network, strategy).metrics(encoded)


@pytest.mark.parametrize("name", small.fast(TASKS, "tagging"))
def test_a_run_is_evaluated_as_before(released, name):
    assert evaluate(name) == pytest.approx(EXPECTED[name]["interrupted"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_run_is_resumed_as_before(released, name):
    finetune(settings_of(FinetuneSettings, name))
    assert evaluate(name) == pytest.approx(EXPECTED[name]["resumed"], rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["huggingface", "google"])
@pytest.mark.parametrize("name", [name for name in TASKS if name != "anomaly"])
def test_a_run_has_the_same_metrics_after_conversion_and_back(released, name, format):
    """Only bert_tf has the anomaly task."""
    converted(f"runs/{name}", "there", format=format)
    converted("there", "back")
    assert evaluate(name, "back") == evaluate(name)


@pytest.mark.slow
def test_pretraining_is_resumed_as_before(released):
    assert Manifest.load("shards").plan_sha256
    run = pretrain(settings_of(PretrainSettings, "pretraining"))
    for record, expected in zip(run.metrics(), EXPECTED["pretraining"]["records"], strict=True):
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_keras_file_predicts_as_before(name):
    model = keras.saving.load_model(RELEASED / "models" / f"{name}.keras")
    inputs = {"input_ids": IDS, "input_mask": np.int32(IDS > 0), "segment_ids": np.zeros_like(IDS)}
    if name == "multiple_choice":
        inputs["windows"] = np.array([[0, 1]], np.int32)
    outputs = model(inputs)
    assert set(outputs) == set(EXPECTED["models"][name])
    for key, expected in EXPECTED["models"][name].items():
        np.testing.assert_allclose(outputs[key], expected, rtol=1e-4, atol=1e-5)
