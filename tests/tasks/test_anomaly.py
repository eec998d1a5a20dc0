"""The anomaly task on literals, against scikit-learn's PCA, and from files to a run directory."""

import csv
import dataclasses
import json
import os
import signal
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.runs.checkpoints import read
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.signals import Interrupted
from bert_tf.weights.sources import read_pretrained
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.finetuning.recipe import finetune
from tasks.graph.evaluation import Evaluator
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types.anomaly import AnomalyTask
from tests import small
from tests.conftest import ROOT

NORMAL = small.TEXTS["billing"] + [
    "my bill !",
    "the bill",
    "is my bill high ?",
    "high , too high",
]
UNUSUAL = small.TEXTS["hardware"] + small.TEXTS["software"]


def from_data(path, **changes):
    return AnomalyTask.from_data(path, **{"max_seq_length": 12, "latent_dim": 3, **changes})


@pytest.fixture
def task():
    return AnomalyTask(max_seq_length=12, latent_dim=3, normal_labels=("a", "b"))


def test_rows_are_normal_or_anomalous(tmp_path):
    path = small.write_rows(
        tmp_path / "train.csv", [("t", "a"), ("u", "b"), ("v", "c"), ("w", "a")], ("words", "class")
    )
    columns = {"text_columns": ("words",), "label_column": "class"}
    task = from_data(path, normal_labels=("a", "b"), **columns)
    assert task.load_examples(path).labels == [0, 0, 1, 0]
    assert task.select_training_examples(task.load_examples(path)) == Examples(
        {"text": ["t", "u", "w"]}, [0, 0, 0]
    )
    new = small.write_rows(tmp_path / "dev.csv", [("t", "never seen")], ("words", "class"))
    assert task.load_examples(new).labels == [1]
    assert task.load_examples(new, labelled=False).texts == {"text": ["t"]}
    assert task_from_dict(json.loads(json.dumps(task.to_dict()))) == task


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_without_labels_every_row_is_normal(tmp_path, name):
    (tmp_path / "train.csv").write_text("text\nthe bill\nmy bill\n")
    (tmp_path / "train.jsonl").write_text('{"text": "the bill"}\n{"text": "my bill"}\n')
    task = from_data(tmp_path / name)
    assert task.normal_labels == () and task.load_examples(tmp_path / name).labels == [0, 0]
    one = small.write_rows(tmp_path / "one.csv", [("t", "fine"), ("u", "fine")])
    assert from_data(one).normal_labels == ("fine",)
    with pytest.raises(UserError, match="one.csv:2: label 'fine', but the training rows had no"):
        task.load_examples(one)


MISTAKES = {
    "which are normal": (
        [("t", "a"), ("u", "b")],
        {},
        "train.csv: several labels: a, b. Set --normal_labels",
    ),
    "no such label": (
        [("t", "a"), ("u", "b")],
        {"normal_labels": ("a", "c")},
        "--normal_labels: no row of .*train.csv has label 'c'. Found: a, b",
    ),
    "no such column": (
        [("t", "a")],
        {"label_column": "class"},
        "train.csv:2: no column 'class'; the columns are 'text', 'label'",
    ),
    "empty": (
        [("t", "a"), ("u", " ")],
        {"normal_labels": ("a",)},
        "train.csv:3: column 'label' is empty; expected a label",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_data_is_reported_in_one_line(tmp_path, name):
    rows, options, message = MISTAKES[name]
    path = small.write_rows(tmp_path / "train.csv", rows)
    with pytest.raises(UserError, match=message):
        from_data(path, **options)


def test_rows_with_and_without_a_label_cannot_be_mixed(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "t", "label": "a"}\n{"text": "u"}\n')
    with pytest.raises(UserError, match="jsonl:2: no label, unlike the rows before it in column"):
        from_data(path)
    path.write_text('{"text": "t"}\n{"text": "u", "label": "a"}\n')
    with pytest.raises(UserError, match="jsonl:2: a label, unlike the rows before it in column"):
        from_data(path)


def test_a_latent_dimension_as_large_as_the_features_is_rejected(task, config):
    with pytest.raises(UserError, match="--latent_dim=12: expected less than 12, the encoder's"):
        dataclasses.replace(task, latent_dim=12).build_model(config)


def test_threshold_metrics_and_prediction_by_hand(task):
    scores = np.array([0.1, 0.2, 0.3, 0.9, 0.8, 0.25], np.float32)
    outputs = {
        "score": scores,
        "pca": np.array([1, 1, 1, 1, 2, 2], np.float32),
        "mean_distance": -scores,
    }
    data = types.SimpleNamespace(labels={"score": np.array([0, 0, 0, 0, 1, 1])})
    # 0.8 is above three of four normal scores, 0.25 above two: 5 of 8 pairs.
    assert task.metrics(data, outputs) == pytest.approx(
        {
            "roc_auc": 5 / 8,
            "pr_auc": (1 / 2 + 2 / 4) / 2,
            "mean_distance_roc_auc": 3 / 8,
            "pca_roc_auc": 1.0,
        }
    )
    with pytest.raises(UserError, match="threshold not tuned yet"):
        task.predictions({}, None, outputs)
    task = dataclasses.replace(task, false_alarm_rate=0.25).tune(data, outputs)
    assert task.threshold == pytest.approx(0.6)  # Half way from 0.3 to the only false alarm, 0.9.
    metrics = task.metrics(data, outputs)
    assert (metrics["false_alarm_rate"], metrics["detection_rate"]) == (0.25, 0.5)
    prediction = task.predictions({}, None, {"score": tf.constant(scores)})
    assert prediction["is_anomaly"].numpy().tolist() == [False, False, False, True, True, False]
    np.testing.assert_array_equal(prediction["score"], scores)
    only_unusual = types.SimpleNamespace(labels={"score": np.array([1] * 6)})
    assert task.metrics(only_unusual, outputs)["false_alarm_rate"] == 0.0
    with pytest.raises(UserError, match="--dev: the first file has no normal row"):
        task.check_dev(types.SimpleNamespace(labels=[1, 1]))
    assert len(task.check_dev(types.SimpleNamespace(labels=[0, 0]))) == 1
    assert task.check_dev(types.SimpleNamespace(labels=[0, 1])) == []


def test_a_warning_is_logged_if_baselines_rank_as_well(task):
    metrics = {"roc_auc": 0.9, "pr_auc": 0.8, "mean_distance_roc_auc": 0.7, "pca_roc_auc": 0.8}
    assert task.warning(metrics) is None
    warning = task.warning({**metrics, "pca_roc_auc": 0.9})
    assert "(0.9000) does not beat PCA of equal width (0.9000); use" in warning
    both = task.warning({**metrics, "roc_auc": 0.6})
    assert "the distance to the mean (0.7000) and PCA of equal width (0.8000)" in both
    assert task.warning({**metrics, "pr_auc": 0.0}).startswith("no anomalies in the dev rows")


@pytest.fixture(scope="module")
def settings(config, vocabulary, tmp_path_factory):
    directory = tmp_path_factory.mktemp("anomaly")
    normal = [(text, "billing") for text in NORMAL]
    files = {
        "train": small.write_rows(directory / "train.csv", [*normal, (UNUSUAL[0], "hardware")]),
        "dev": small.write_rows(directory / "dev.csv", [*normal, *((t, "x") for t in UNUSUAL)]),
    }
    return small.settings(
        small.write_huggingface(directory / "huggingface", config, vocabulary),
        files,
        directory / "run",
        task="anomaly",
        normal_labels=("billing",),
        latent_dim=2,
        learning_rate=1e-2,
        global_batch_size=4,
        epochs=6,
        log_every=1,
    )


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def run(settings, said):
    return finetune(settings, said.append)


@pytest.mark.medium
def test_it_trains_on_normal_rows_and_freezes_the_encoder(run, said, settings):
    assert any(
        line.startswith(
            "anomaly: 7 rows, 1 more not used for training, 13 dev rows; normal labels billing"
        )
        for line in said
    )
    assert said.count("extracting features of 7 rows, once") == 1
    weights = read(run.checkpoints.path(run.checkpoints.best_step()))
    for name, values in read_pretrained(settings.init_from).weights.items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)
        assert f"{name}/adam_m" not in weights
    again = []
    finetune(settings, again.append)
    assert len(again) == 1 and "finished at step 12, nothing to do" in again[0]


@pytest.mark.slow
@pytest.mark.medium
def test_evaluate_and_predict_agree_and_keep_the_order(run, settings, tmp_path):
    trained = load_model(run.path)
    assert 0 < trained.task.threshold == trained.source.tuned["values"]["threshold"]
    examples = trained.task.load_examples(settings.dev[0])
    encoded = EncodedExamples.encode(examples, trained.serving.pipeline, to_flat)
    evaluator = Evaluator(trained.task, trained.network, tf.distribute.get_strategy())
    metrics = evaluator.metrics(encoded)
    decided = [line for line in run.metrics() if "tuned_dev_roc_auc" in line][-1]
    for name in ("roc_auc", "pca_roc_auc", "false_alarm_rate", "detection_rate"):
        assert metrics[name] == pytest.approx(decided[f"tuned_dev_{name}"], abs=1e-6)
    normal = evaluator.outputs(encoded)["score"][: len(NORMAL)]
    # The loss is the mean over normal rows only.
    assert metrics["loss"] == pytest.approx(normal.mean(), rel=1e-5)
    predict(trained, settings.dev[0], tmp_path / "answers.jsonl", 5, lambda line: None)
    with open(tmp_path / "answers.jsonl") as lines:
        predictions = [json.loads(line) for line in lines]
    assert set(predictions[0]) == {"score", "is_anomaly"}
    alarms = [prediction["is_anomaly"] for prediction in predictions]
    assert sum(alarms[: len(NORMAL)]) / len(NORMAL) == metrics["false_alarm_rate"] <= 0.05
    assert sum(alarms[len(NORMAL) :]) / len(UNUSUAL) == metrics["detection_rate"]
    serve = trained.serving.pipeline.signatures["serving_default"]
    for texts in ([], [""], ["the bill"] * 17):
        prediction = serve(tf.constant(texts, tf.string))
        assert prediction["score"].shape == prediction["is_anomaly"].shape == [len(texts)]
        assert np.isfinite(prediction["score"]).all()


@pytest.mark.slow
@pytest.mark.medium
def test_a_stopped_run_resumes_bitwise_equal(run, settings, tmp_path, monkeypatch):
    """Compute the features of the resumed run with the encoder in its checkpoint."""
    changed = dataclasses.replace(settings, output_dir=str(tmp_path / "stopped"))
    original = TrainingLoop._steps

    def stop(loop, iterator, step, *arguments):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(loop, iterator, step, *arguments)

    monkeypatch.setattr(TrainingLoop, "_steps", stop)
    with pytest.raises(Interrupted):
        finetune(changed)
    monkeypatch.undo()
    with pytest.raises(UserError, match="threshold not tuned yet"):
        load_model(changed.output_dir).serving.pipeline.predict(text=tf.constant(["the bill"]))
    resumed = finetune(changed)
    final = read(run.checkpoints.path(12))
    for name, values in read(resumed.checkpoints.path(12)).items():
        np.testing.assert_array_equal(values, final[name], err_msg=name)
    assert (
        load_model(resumed.path).source.tuned["values"]
        == load_model(run.path).source.tuned["values"]
    )


def test_settings_require_dev_and_have_their_own_defaults(settings):
    with pytest.raises(UserError, match="--task=anomaly: requires --dev, on which its threshold"):
        dataclasses.replace(settings, dev=())
    unset = {"epochs": None, "learning_rate": None, "global_batch_size": None}
    changed = dataclasses.replace(settings, **unset)
    assert (changed.epochs, changed.learning_rate, changed.global_batch_size) == (20, 3e-3, 128)


@pytest.mark.slow
def test_sixteen_real_complaints_of_one_kind_are_separated_from_the_others(
    pretrained_dir, tmp_path
):
    """Treat bills as normal; held-out bills should have lower scores than other complaints."""
    with open(ROOT / "examples" / "complaints" / "train.csv", encoding="utf-8") as lines:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(lines)]
    bills = [row for row in rows if row[1] == "billing"]
    others = [row for row in rows if row[1] != "billing"]
    settings = small.settings(
        pretrained_dir,
        {
            "train": small.write_rows(tmp_path / "train.csv", bills[:16]),
            "dev": small.write_rows(tmp_path / "dev.csv", bills[16:32] + others[:16]),
        },
        tmp_path / "run",
        task="anomaly",
        latent_dim=8,
        max_seq_length=48,
        epochs=10,
        learning_rate=3e-3,
        false_alarm_rate=0.125,
    )
    run = finetune(settings)
    metrics = [line for line in run.metrics() if "tuned_dev_roc_auc" in line][-1]
    assert metrics["tuned_dev_roc_auc"] > 0.85
    assert metrics["tuned_dev_false_alarm_rate"] == 0.125
    assert metrics["tuned_dev_detection_rate"] > 0.4
