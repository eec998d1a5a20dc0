"""Masked language model: predictions, files, and training on shards."""

import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf import UserError, read_pretrained
from bert_tf.config import BertConfig
from bert_tf.data.batches import DataPosition, PretrainingDataset, pad_examples
from bert_tf.pretraining.model import to_batch
from bert_tf.system import command
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights.sources import PretrainedWeights
from tasks import predict
from tasks.base.task import task_from_dict
from tasks.base.task_types import TASK_TYPES
from tasks.model import task_model
from tests import corpus, small
from tests.conftest import ROOT
from tests.pretraining import make_config

TEXTS = ["the [MASK] is high", "my app", "[MASK] [MASK]"]


@pytest.fixture
def pretrained_run(tmp_path, config, vocabulary):
    """Write a run with both pretraining heads, as bert_tf.convert does."""
    weights = small.random_weights(config, parts=("bert", "masked_lm", "next_sentence"))
    PretrainedWeights(config, vocabulary, weights, "random").save(tmp_path / "pretrained")
    return tmp_path / "pretrained"


@pytest.fixture
def model(pretrained_run):
    return tasks.MaskedLanguageModel.from_pretrained(pretrained_run)


@pytest.mark.slow
def test_tokens_are_the_most_probable_at_the_first_mask(model):
    assert model.task.max_seq_length == 16  # All positions, which are fewer than 512.
    rows = model.predict_rows(TEXTS)
    ids = model.tokenize(TEXTS[:1])
    inputs = {name: ids[name] for name in ("input_ids", "input_mask", "segment_ids")}
    (position,) = np.flatnonzero(inputs["input_ids"][0] == model.vocabulary["[MASK]"])
    logits = model({**inputs, "masked_lm_positions": np.array([[position]], np.int32)})
    (logits,) = np.array(logits["masked_lm"])[0]
    best = np.argsort(-logits)[:5]
    assert rows[0]["token"] == [model.vocabulary.entries[number] for number in best]
    probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    np.testing.assert_allclose(rows[0]["score"], probabilities[best], rtol=1e-4)
    assert rows[1] == {"token": [""] * 5, "score": [0.0] * 5}
    (is_next,) = model.predict_next_sentence(["the bill"], ["is high"])
    assert 0 < is_next < 1


@pytest.mark.slow
def test_a_gpu_predicts_equally_in_packed_rows(pretrained_run, model, monkeypatch):
    expected = model.predict_rows(TEXTS)
    monkeypatch.setattr(task_model, "is_accelerated", lambda strategy: True)
    packed = tasks.MaskedLanguageModel.from_pretrained(pretrained_run)
    for row, expected_row in zip(packed.predict_rows(TEXTS), expected, strict=True):
        assert row["token"] == expected_row["token"]
        np.testing.assert_allclose(row["score"], expected_row["score"], rtol=1e-4)
    assert packed.serving.pipeline.is_on_gpu
    pair = (["the bill", "my app"], ["is high", "is open"])
    np.testing.assert_allclose(
        packed.predict_next_sentence(*pair), model.predict_next_sentence(*pair), rtol=1e-4
    )


@pytest.fixture
def masked_lm_only(config, vocabulary):
    """Return weights without the next sentence head, as of BertForMaskedLM."""
    weights = small.random_weights(config, parts=("bert", "masked_lm"))
    return PretrainedWeights(config, vocabulary, weights, "random")


def test_a_head_that_the_weights_lack_is_neither_served_nor_saved(masked_lm_only, tmp_path):
    masked_lm_only.save(tmp_path / "pretrained")
    model = tasks.MaskedLanguageModel.from_pretrained(tmp_path / "pretrained")
    run = model.save_run(tmp_path / "run")
    assert read_pretrained(run.path).heads == ("masked_lm",)
    loaded = tasks.load_model(run.path)
    assert loaded.source.is_that_of(loaded.task, loaded.network)
    loaded.save(tmp_path / "model.keras")
    for one in (model, loaded, tasks.load_model(tmp_path / "model.keras")):
        assert set(one.serving.signatures) == {"serving_default", "masked_lm", "tokenize", "embed"}
        with pytest.raises(UserError, match="the weights have no next sentence head; load others"):
            one.predict_next_sentence(["the bill"], ["is high"])


@pytest.mark.medium
def test_a_text_without_a_mask_is_a_bad_row(pretrained_run, tmp_path, capsys):
    """That of the third row is after the last of 16 tokens."""
    texts = [TEXTS[0], "my app", "my " * 20 + "[MASK]"]
    rows = small.write_rows(tmp_path / "rows.csv", [(text,) for text in texts], ("text",))

    def run(*flags):
        settings, _ = command.parse(
            predict.PredictSettings, ["predict", f"--run={pretrained_run}", *flags]
        )
        settings.check()
        predict.main(settings)

    run(f"--input={rows}", f"--output={tmp_path / 'out.jsonl'}")
    first, *others = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert all(first["token"])
    message = "expected a text with [MASK] among its first 16 tokens"
    assert others == [{"error": f"{rows}:{number}: {message}"} for number in (3, 4)]
    for text in texts[1:]:
        with pytest.raises(UserError, match=f"^--text: {re.escape(message)}$"):
            run(f"--text={text}")
    run(f"--text={texts[0]}")
    assert json.loads(capsys.readouterr().out)["token"] == first["token"]


@pytest.mark.medium
def test_training_of_both_heads_adds_the_one_that_is_absent(masked_lm_only, tmp_path):
    masked_lm_only.save(tmp_path / "start")
    model = tasks.MaskedLanguageModel.from_pretrained(tmp_path / "start", next_sentence=True)
    assert model.task.heads == ("masked_lm", "next_sentence")
    ids = np.arange(4, 12, dtype=np.int32).reshape(2, 4)
    positions, labels = np.array([[1], [2]], np.int32), np.array([0, 1], np.int32)
    x = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    batches = tf.data.Dataset.from_tensors(
        (
            {**x, "masked_lm_positions": positions},
            {"masked_lm": ids[:, :1], "next_sentence": labels},
            {"masked_lm": np.ones((2, 1), np.float32), "next_sentence": np.ones(2, np.float32)},
        )
    )
    names = {f"{head}_{name}" for head in model.task.heads for name in ("loss", "accuracy")}
    before = model.encoder.pooler.kernel.numpy()
    assert {"loss", *names} == model.fit(batches, verbose=0).history.keys()
    assert (model.encoder.pooler.kernel.numpy() != before).any()
    loaded = tasks.load_model(model.save_run(tmp_path / "run").path)
    assert "next_sentence" in loaded.serving.signatures


def test_weights_without_the_head_are_refused(huggingface_dir):
    with pytest.raises(UserError, match=r"huggingface: expected weights .* received no head; use"):
        tasks.MaskedLanguageModel.from_pretrained(huggingface_dir)


@pytest.mark.slow
def test_a_saved_model_gives_the_same_tokens(model, pretrained_run, tmp_path):
    rows = model.predict_rows(TEXTS)
    model.save(tmp_path / "m.keras")
    code = (
        "import json, tasks\n"
        f"model = tasks.load_model({str(tmp_path / 'm.keras')!r})\n"
        f"print(json.dumps([type(model).__name__, model.predict_rows({TEXTS!r})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["MaskedLanguageModel", rows]
    saved = model.save_run(tmp_path / "run")
    assert saved.task is None and not (tmp_path / "run" / "task.json").exists()
    for path in (tmp_path / "run", pretrained_run):
        loaded = tasks.load_model(path)
        assert type(loaded) is tasks.MaskedLanguageModel and loaded.predict_rows(TEXTS) == rows
    np.testing.assert_array_equal(
        read_pretrained(tmp_path / "run").weights["masked_lm/output_bias"],
        read_pretrained(pretrained_run).weights["masked_lm/output_bias"],
    )


@pytest.mark.slow
def test_fit_and_evaluate_on_shards(tmp_path):
    shards = corpus.write_shards(tmp_path / "data")
    make_config(tmp_path)
    config, vocabulary = BertConfig.load(tmp_path / "config.json"), Vocabulary(corpus.ENTRIES)
    keras.utils.set_random_seed(0)
    model = tasks.MaskedLanguageModel(
        {"kind": "pretrained", "max_seq_length": 32, "next_sentence": True}, config, vocabulary
    )
    dataset = PretrainingDataset(str(shards), vocabulary, config)
    training = dataset.training_batches(DataPosition(0, 0, 0), 24, pad_examples).map(to_batch)
    held_out = dataset.evaluation_batches(24, pad_examples).map(to_batch)
    before = model.evaluate(held_out, verbose=0)
    assert set(before) == {
        "loss",
        *(f"{head}_{name}" for head in model.task.losses for name in ("loss", "accuracy")),
    }
    model.compile(learning_rate=3e-2, warmup_proportion=0.0)
    history = model.fit(training, steps_per_epoch=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert int(model.optimizer.iterations.numpy()) == 2
    assert model.evaluate(held_out, verbose=0)["loss"] < before["loss"] - 0.05
    with pytest.raises(UserError, match="steps_per_epoch: expected a number for a dataset"):
        model.fit(training, verbose=0)
    with pytest.raises(UserError, match="x: received texts, .* expected a dataset of batches of"):
        model.fit(["a [MASK]"])


def test_the_kind_is_known_to_saved_models_but_not_to_fine_tuning():
    assert "pretrained" not in TASK_TYPES
    task = task_from_dict({"kind": "pretrained", "max_seq_length": 8})
    assert task.kind == "pretrained" and task.max_seq_length == 8
