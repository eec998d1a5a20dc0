"""Regression on literals, and from files to predictions."""

import json
import types
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, read_pretrained
from tasks.base.task import task_from_dict
from tasks.finetuning import recipe
from tasks.finetuning.recipe import finetune
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types.regression import RegressionTask, TextRegressor
from tests import small
from tests.bert_tf.test_task_heads import write_head


@pytest.mark.parametrize(
    ("text", "value"),
    [("4.750", 4.75), ("-1", -1.0), (" 3 ", 3.0), ("1e3", 1000.0), ("0", 0.0)],
)
def test_labels_are_numbers(text, value):
    assert RegressionTask(max_seq_length=12).label_of(text) == value


@pytest.fixture
def cross_encoder(tmp_path, config, vocabulary):
    sigmoid = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 1, **sigmoid)
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("labels", "keep_head", "expected"),
    [
        ("0 0.5 1", "auto", "sigmoid"),
        ("0 0.5 1", "false", "identity"),
        ("0 2.5 5", "auto", "identity"),
        ("-1 0", "auto", "identity"),
    ],
)
def test_finetuning_keeps_a_sigmoid_that_reaches_the_labels_with_its_head(
    cross_encoder, tmp_path, monkeypatch, labels, keep_head, expected
):
    path = small.write_rows(tmp_path / "train.csv", [("a", label) for label in labels.split()])
    data = {"train": path, "dev": small.same_rows(path)}
    options = {"task": "regression", "precision": "float32", "keep_head": keep_head}
    settings = small.settings(cross_encoder, data, tmp_path / "run", **options)
    reads = unittest.mock.Mock(wraps=recipe.read_pretrained)
    monkeypatch.setattr(recipe, "read_pretrained", reads)
    strategy = tf.distribute.get_strategy()
    training, run, model = recipe.prepare(settings, settings.read_data(), print, strategy)
    assert training.task.activation == model.task.activation == expected
    assert run is None and reads.call_count == 1  # Weights may have gigabytes.


@pytest.mark.medium
def test_weights_of_a_regressor_keep_its_activation(cross_encoder, tmp_path):
    rows = (["the bill", "my screen"], ["is high", "is broken"])
    run = read_pretrained(cross_encoder).save(tmp_path / "run")
    loaded = load_model(run.path)
    expected = loaded(loaded.preprocessor(rows))["value"]
    assert np.all((expected > 0) & (expected < 1))
    for path in (cross_encoder, run.path):
        model = TextRegressor.from_pretrained(path, pairs=True, max_seq_length=16)
        found = model(model.preprocessor(rows))["value"]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    dataset = tf.data.Dataset.from_tensor_slices((rows, [0.5, 5.0])).batch(2)
    for labelled in ((rows, [0.5, 5.0]), (dataset,)):
        with pytest.raises(UserError, match=r"5\.0.*expected .* 0 to 1"):
            model.fit(*labelled, verbose=0)
    for options in ({"activation": "identity"}, {"keep_head": False}):
        other = TextRegressor.from_pretrained(path, pairs=True, **options)
        assert other.task.activation == "identity"


@pytest.mark.parametrize("text", ["", "high", "nan", "inf", "-inf", "1e39", "1,5", "3.0.0"])
def test_a_label_that_is_no_number_is_rejected_with_its_line(tmp_path, text):
    path = small.write_rows(tmp_path / "train.csv", [("a", "1"), ("b", text)])
    task = RegressionTask.from_data(path, max_seq_length=12)
    with pytest.raises(UserError, match=f"train.csv:3: label '{text}': expected a number"):
        task.load_examples(path)


def test_metrics_and_prediction_by_hand():
    task = RegressionTask(max_seq_length=12)
    data = types.SimpleNamespace(labels={"value": np.array([1, 2, 3, 4], np.float32)})
    outputs = {"value": np.array([[2.0], [4.0], [6.0], [5.0]], np.float32)}
    assert task.metrics(data, outputs) == pytest.approx(
        {
            "pearson": 5.5 / np.sqrt(5 * 8.75),
            "spearman": 1 - 6 * 2 / (4 * 15),
            "mean_squared_error": (1 + 4 + 9 + 1) / 4,
        }
    )
    prediction = task.predictions({}, None, {"value": tf.constant(outputs["value"])})
    assert {name: value.numpy().tolist() for name, value in prediction.items()} == {
        "value": [2.0, 4.0, 6.0, 5.0]
    }


@pytest.mark.slow
def test_it_learns_and_the_run_predicts(huggingface_dir, tmp_path):
    values = {"billing": "-1", "hardware": "0.5", "software": "2"}
    rows = [(text, values[label]) for label, texts in small.TEXTS.items() for text in texts]
    files = {
        "train": small.write_rows(tmp_path / "train.csv", rows * 3, ("words", "score")),
        "dev": small.write_rows(tmp_path / "dev.csv", rows, ("words", "score")),
    }
    run = finetune(
        small.settings(
            huggingface_dir,
            files,
            tmp_path / "run",
            task="regression",
            text_column="words",
            label_column="score",
            epochs=15,
        )
    )
    best = run.checkpoints.info(run.checkpoints.best_step())["metrics"]
    # Equal labels share a rank, but predictions differ: 0.949 is the maximum for nine in threes.
    assert best["dev_spearman"] > 0.9 and best["dev_pearson"] > 0.9
    assert best["dev_loss"] == pytest.approx(best["dev_mean_squared_error"])
    trained = load_model(run.path)
    assert trained.task == task_from_dict(run.task) and trained.task.kind == "regression"
    output = tmp_path / "answers.jsonl"
    assert predict(trained, files["dev"], output, 5, lambda line: None) == (9, 0)
    predictions = [json.loads(line) for line in output.read_text().splitlines()]
    errors = [
        prediction["value"] - float(row[1])
        for prediction, row in zip(predictions, rows, strict=True)
    ]
    assert np.mean(np.square(errors)) == pytest.approx(best["dev_mean_squared_error"], rel=1e-3)
    served = trained.serving.pipeline.signatures["serving_default"]
    assert served(tf.zeros([0], tf.string))["value"].shape == (0,)
    assert np.isfinite(served(tf.fill([17], ""))["value"]).all()
