"""The gate of int8 exports: the task's metric, on rows with labels."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import export
from bert_tf import UserError
from export import LocalClient
from export.checks import metric_gate
from export.graph.saved_model import served_pipeline
from export.graph.served_encoder import has_packed_products
from tasks import AnomalyDetector, TextClassifier, TextRegressor, load_model
from tests.small import TEXTS

ROWS = [(text, label) for label, texts in TEXTS.items() for text in texts]


@pytest.fixture(scope="module", autouse=True)
def int8():
    if not has_packed_products("int8"):
        pytest.skip("this TensorFlow has no products of 8-bit integers")


@pytest.fixture
def dev(tmp_path):
    path = tmp_path / "dev.jsonl"
    lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def model(huggingface_dir):
    return TextClassifier.from_pretrained(huggingface_dir, labels=list(TEXTS), max_seq_length=12)


def always(pipeline, label):
    """Make the served graph predict one label."""
    bias = np.where(np.array(list(TEXTS)) == label, 100.0, 0.0)
    head = pipeline.model.head
    pipeline.model.scores = lambda hidden, seed: head(hidden) + bias
    return pipeline


@pytest.mark.slow
def test_both_values_are_those_of_the_file(model, dev):
    change = metric_gate.check(model, served_pipeline(model, "int8"), dev, 100)
    texts, labels = zip(*ROWS, strict=True)
    correct = np.mean(np.array(labels) == model.predict(list(texts))["label"])
    assert (change.name, change.path) == ("accuracy", "dev.jsonl")
    assert change.trained == pytest.approx(correct)


@pytest.mark.medium
def test_a_larger_drop_is_not_published(model, dev):
    texts = [text for text, _ in ROWS]
    predicted = model.predict(texts)["label"].tolist()
    with open(dev, "w", encoding="utf-8") as file:  # Labels that the trained model predicts.
        for text, label in zip(texts, predicted, strict=True):
            print(json.dumps({"text": text, "label": label}), file=file)
    rare = min(TEXTS, key=predicted.count)
    share = 100 * (1 - predicted.count(rare) / len(texts))
    pipeline = always(served_pipeline(model, "int8"), rare)
    with pytest.raises(UserError, match=r"accuracy of .* drops by .* points, from 100.00 to"):
        metric_gate.check(model, pipeline, dev, share - 1)
    assert metric_gate.check(model, pipeline, dev, share + 1).drop == pytest.approx(share)


def test_a_metric_that_is_not_a_number_is_not_published(model, dev, monkeypatch):
    metrics = {"accuracy": float("nan"), "degenerate": 0}
    monkeypatch.setattr(metric_gate.Evaluator, "metrics", lambda *arguments: metrics)
    with pytest.raises(UserError, match="drops by nan points"):
        metric_gate.check(model, served_pipeline(model, "int8"), dev, 0.5)


@pytest.mark.medium
def test_a_metric_that_cannot_drop_is_not_published(huggingface_dir, tmp_path):
    """The rank correlation with one number is 0 for any model."""
    path = tmp_path / "dev.csv"
    path.write_text("text,label\nthe bill,3\nmy screen,3\n")
    model = TextRegressor.from_pretrained(huggingface_dir, max_seq_length=12)
    pipeline = served_pipeline(model, "int8")
    with pytest.raises(UserError, match="spearman of .* is 0.00 for the trained model, so that no"):
        metric_gate.check(model, pipeline, str(path), 0.5)
    assert metric_gate.check(model, pipeline, str(path), 100).drop == 0


@pytest.mark.medium
def test_warnings_about_the_rows_are_logged(huggingface_dir, tmp_path):
    path = tmp_path / "dev.csv"
    path.write_text("text\nthe bill\nmy screen\n")
    model = AnomalyDetector.from_pretrained(huggingface_dir, max_seq_length=12, latent_dim=2)
    lines = []
    metric_gate.check(model, served_pipeline(model, "int8"), str(path), 0.5, lines.append)
    assert f"warning: {path}: no anomalies in the dev rows: detection cannot be evaluated" in lines


def test_int8_needs_rows_with_labels(model, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="expected dev=FILE, labelled rows"):
        export.publish(model, tmp_path / "models", precision="int8")
    with pytest.raises(UserError, match="has no standard operations; remove portable"):
        export.publish(model, tmp_path / "models", precision="int8", portable=True)
    with pytest.raises(UserError, match="^dev=typo.csv: no such file"):
        export.publish(model, tmp_path / "models", precision="int8", dev="typo.csv")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"{kind}:0"])
    with pytest.raises(UserError, match="sees a GPU; run it again with CUDA_VISIBLE_DEVICES=-1"):
        export.publish(model, tmp_path / "models", precision="int8")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        ("{}/gone.csv", "gone.csv does not exist; set --dev=FILE"),
        ("{}/run", "run does not exist; set --dev=FILE"),
        ("dev", "expected --dev=FILE, labelled rows; the run was trained on rows in Python"),
    ],
)
def test_a_dev_file_of_the_run_that_is_gone_is_named(model, tmp_path, dev, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev").touch()  # Of something else.
    run = model.save_run(tmp_path / "run")
    opened = load_model(run.path)
    train = {**opened.source.run.train, "settings": {"dev": [dev.format(tmp_path)]}}
    source = dataclasses.replace(
        opened.source, run=dataclasses.replace(opened.source.run, train=train)
    )
    object.__setattr__(opened, "source", source)
    with pytest.raises(UserError, match=message):
        metric_gate.dev_file(opened)


@pytest.mark.slow
def test_an_int8_model_is_published_with_both_metrics(model, dev, tmp_path):
    version = export.publish(
        model, tmp_path / "letters", precision="int8", dev=dev, max_metric_drop=100
    )
    card = (version / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "served in: int8" in card and "accuracy on dev.jsonl: " in card
    texts = [text for text, _ in ROWS]
    served = LocalClient(version.parent).predict({"text": texts})
    expected = served_pipeline(model, "int8").signatures["serving_default"](np.array(texts))
    np.testing.assert_allclose(served["probabilities"], expected["probabilities"], atol=1e-3)
