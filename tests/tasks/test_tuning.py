"""Tuned values, which belong to one checkpoint and are stored in its file."""

import dataclasses
import json
import pathlib
import shutil
import types

import pytest

from bert_tf import UserError
from bert_tf.config import read_json_object
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from export import publishing
from export.package.documents import model_card
from tasks import AnomalyDetector, evaluate, predict
from tasks.finetuning.recipe import finetune
from tasks.graph.run_checkpoint import RunCheckpoint
from tasks.model import loading
from tasks.model.loading import load_model
from tasks.types.anomaly import AnomalyTask
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.question_answering import QuestionAnsweringTask
from tests import small

ROWS = [("the bill is too high", "no"), ("my bill is high", "no"), ("the screen is broken", "yes")]


@pytest.fixture(scope="module")
def settings(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("tuned")
    files = {
        "train": small.write_rows(directory / "train.csv", ROWS * 4),
        # One row has the wrong label, so there is an optimal temperature.
        "dev": small.write_rows(directory / "dev.csv", [*ROWS, ("the screen is high", "no")] * 2),
    }
    return small.settings(
        small.write_huggingface(directory / "huggingface", config, vocabulary),
        files,
        directory / "run",
        rare_label="yes",
        threshold_objective="f1",
        calibrate=True,
    )


@pytest.fixture(scope="module")
def finished(settings):
    return finetune(settings)


@pytest.fixture
def trained_run(finished, tmp_path):
    """Return a copy of a trained and tuned run, which a test may change."""
    shutil.copytree(finished.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


TUNED = {
    "values": {"temperature": 1.7, "thresholds": [0.2436649203300476]},
    "metrics": {"dev_f1": 0.75},
    "file": "folder/dev.csv",
    "sha256": "5" * 64,
    "warnings": [],
}


@pytest.fixture
def run(tmp_path, config, vocabulary):
    """Return a run without training: steps 3 and 6, of which 6 is the best and tuned."""
    task = ClassificationTask(
        labels=("no", "yes"),
        rare_label="yes",
        threshold_objective="f1",
        calibrate=True,
        max_seq_length=8,
    )
    train = {"settings": {"dev": ["folder/dev.csv"]}, "data": {"folder/dev.csv": "5" * 64}}
    run = Run.create(tmp_path / "run", config, vocabulary, train, task.to_dict())
    variables = model_variables(task.build_model(config))
    for step in (3, 6):
        run.checkpoints.save(step, variables)
        run.checkpoints.annotate(step, float(step), {"dev_pr_auc": step / 10})
    run.checkpoints.set_tuned(6, TUNED)
    return Run.open(run.path)


def state_of(run, step):
    return pathlib.Path(run.checkpoints.path(step)) / "checkpoint.json"


def untune(run):
    """Make the run as it is after being killed at the last evaluation."""
    best = run.checkpoints.best_or_latest_step()
    state = json.loads(state_of(run, best).read_text())
    tuned = state.pop("tuned")
    state_of(run, best).write_text(json.dumps(state))
    return tuned


@pytest.mark.slow
def test_tuned_values_are_in_the_best_checkpoint_with_their_metrics_and_file(trained_run, settings):
    run = trained_run
    task = read_json_object(run.file("task.json"))
    assert (task["temperature"], task["thresholds"]) == (None, None)
    tuned = run.checkpoints.info(run.checkpoints.best_or_latest_step())["tuned"]
    assert set(tuned["values"]) == {"temperature", "thresholds"}
    assert tuned["file"] == settings.dev[0]
    assert tuned["sha256"] == run.train["data"][settings.dev[0]]
    assert load_model(run.path).task.temperature == tuned["values"]["temperature"] != 1.0
    logged = [line for line in run.metrics() if "tuned_dev_f1" in line][-1]
    assert tuned["metrics"]["dev_f1"] == logged["tuned_dev_f1"]


def test_a_checkpoint_is_opened_with_its_own_values(run, tmp_path):
    trained = load_model(run.path)
    assert (trained.task.temperature, trained.task.thresholds) == (1.7, (0.2436649203300476,))
    assert trained.source.untuned is None and trained.source.tuned == TUNED
    other = load_model(run.path, checkpoint="step-00000003")
    assert (other.task.temperature, other.task.thresholds, other.source.tuned) == (None, None, None)
    with pytest.raises(UserError, match="untuned: .* was fitted to step-00000006 only; omit"):
        publishing.publish(other, tmp_path / "models")
    assert not (tmp_path / "models").exists()
    with pytest.raises(UserError, match="^checkpoint=step-3: no complete checkpoint .* expected"):
        load_model(run.path, checkpoint="step-3")
    # Checkpoints that are saved and removed later do not affect the values.
    run.checkpoints.annotate(6, 7.0, {"dev_pr_auc": 0.7})
    run.checkpoints.save(9, {"step": 9})
    run.checkpoints.save(12, {"step": 12})
    assert load_model(run.path).source.tuned == TUNED


@pytest.mark.slow
def test_evaluate_and_predict_warn_about_an_untuned_checkpoint(
    trained_run, tmp_path, capsys, settings
):
    run = trained_run
    best = run.checkpoints.best_or_latest_step()
    (other,) = (f"step-{step:08d}" for step in run.checkpoints.steps() if step != best)
    evaluate.main(evaluate.EvaluateSettings(run.path, settings.dev[0], checkpoint=other))
    output = tmp_path / "answers.jsonl"
    predict.main(predict.PredictSettings(run.path, settings.dev[0], str(output), checkpoint=other))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "untuned" in line]
    assert len(warnings) == 2
    for line in warnings:
        assert line.startswith("warning: ") and other in line
        assert f"temperature, thresholds was fitted to step-{best:08d} only" in line


def test_a_run_that_stopped_before_tuning_is_not_exported(run, tmp_path):
    untune(run)
    with pytest.raises(UserError, match="was never fitted.* run the same bert-tf finetune command"):
        publishing.publish(load_model(run.path), tmp_path / "models")


@pytest.mark.slow
def test_rerunning_the_command_tunes_a_run_that_stopped_before_tuning(
    trained_run, settings, monkeypatch
):
    before, again = (
        untune(trained_run),
        dataclasses.replace(settings, output_dir=trained_run.path),
    )
    # Tuning is complete after this single write, even if the process ends then.
    with monkeypatch.context() as context:
        context.setattr(Run, "log_metrics", lambda self, record: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finetune(again)
    checkpoints = trained_run.checkpoints
    assert checkpoints.info(checkpoints.best_or_latest_step())["tuned"] == before
    said = []
    finetune(again, said.append)
    assert len(said) == 1 and "nothing to do" in said[0]


def test_converted_weights_have_their_values_in_task_json(run):
    """A run of bert_tf.convert has no settings. In a trained run, task.json has no values."""
    values = untune(run)["values"]
    task = read_json_object(run.file("task.json"))
    pathlib.Path(run.file("task.json")).write_text(json.dumps({**task, **values}))
    assert load_model(run.path).source.tuned is None
    pathlib.Path(run.file("train.json")).write_text(json.dumps({"origin": "another program"}))
    trained = load_model(run.path)
    assert (trained.task.temperature, trained.source.untuned) == (1.7, None)
    assert trained.source.tuned["values"]["thresholds"] == tuple(values["thresholds"])


def test_the_model_card_has_the_values_of_the_graph_and_their_file(run):
    def card():
        return model_card("name", load_model(run.path), "float32", True)

    assert "temperature: 1.7 " in card() and "thresholds: 0.243665 " in card()
    assert "- rare_label: yes (label that the threshold applies to)" in card()
    assert f"Tuned on dev.csv (sha256 {'5' * 64}): temperature, thresholds" in card()
    assert "are optimistic" in card() and "| tuned_dev_f1 | 0.75 |" in card()
    assert "folder" not in card()
    run.checkpoints.set_tuned(6, {**TUNED, "warnings": ["it is small"]})
    assert "Warning: it is small." in card()
    # Metrics that were logged for values other than those of the graph are not in the card.
    untune(run)
    assert "uned" not in card() and "temperature" not in card()


def opened(directory, config, vocabulary, task, **settings):
    """Return a checkpoint without weights, of a run with these settings."""
    run = Run.create(directory, config, vocabulary, {"settings": settings}, task.to_dict())
    run.checkpoints.save(6, {"step": 6})
    return RunCheckpoint.open(run.path)


def test_a_threshold_with_a_published_default_is_missed_only_after_a_dev_file(
    tmp_path, config, vocabulary
):
    task = QuestionAnsweringTask(may_be_impossible=True, max_seq_length=80)
    assert opened(tmp_path / "no dev", config, vocabulary, task, dev=[]).untuned is None
    stopped = opened(tmp_path / "dev", config, vocabulary, task, dev=["dev.json"])
    assert "step-00000006: untuned: null_threshold was never fitted" in stopped.untuned


def test_an_untuned_anomaly_task_does_not_predict(tmp_path, config, vocabulary, monkeypatch):
    task = AnomalyTask(max_seq_length=8)
    source = opened(tmp_path / "run", config, vocabulary, task, dev=["dev.csv"])
    loaded = types.SimpleNamespace(task=source.task, source=source)
    monkeypatch.setattr(loading, "load_model", lambda path, checkpoint: loaded)
    rows, output = small.write_rows(tmp_path / "rows.csv", ROWS), tmp_path / "answers.jsonl"
    with pytest.raises(UserError, match="untuned: threshold was never fitted"):
        predict.main(predict.PredictSettings(source.run.path, str(rows), str(output)))
    assert not output.exists()


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_untuned_detector_does_not_predict(huggingface_dir):
    model = AnomalyDetector.from_pretrained(huggingface_dir, max_seq_length=8, latent_dim=2)
    model.has_new_head = False
    with pytest.raises(UserError, match="^threshold not tuned yet: call tune, .*$"):
        model.predict(["the bill"])
