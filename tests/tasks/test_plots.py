"""Plots of a fine-tuning run: their numbers, their images, and the files of a run."""

import struct
import warnings

import numpy as np
import pytest

import tasks
from tasks.base import plots
from tasks.base.task import task_class
from tasks.base.task_types import TASK_TYPES
from tasks.metrics.squad import scores_by_length
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.similarity.text_embedder import SimilarityTask
from tasks.types.tagging import TaggingTask
from tests import small

NAMES = ["你好", "مرحبا", "😀", "$a_b$", "a" * 60]


def test_reliability_has_mean_confidence_and_accuracy_per_bin():
    confidence_N = np.array([0.55, 0.65, 0.95, 0.91, 1.0])
    is_correct_N = np.array([True, False, True, True, False])
    confidence, accuracy, count = plots.reliability_points(confidence_N, is_correct_N, bins=2)
    np.testing.assert_allclose(confidence, [np.mean([0.55, 0.65, 0.95, 0.91, 1.0])])
    np.testing.assert_allclose(accuracy, [3 / 5])
    assert count.tolist() == [5]
    confidence, accuracy, count = plots.reliability_points(confidence_N, is_correct_N)
    np.testing.assert_allclose(confidence, [0.55, 0.65, 2.86 / 3])
    np.testing.assert_allclose(accuracy, [1, 0, 2 / 3])


def test_precision_and_recall_at_each_distinct_score():
    threshold, precision, recall = plots.precision_recall_points(
        np.array([True, False, True, False]), np.array([0.9, 0.5, 0.5, 0.1])
    )
    assert threshold.tolist() == [0.1, 0.5, 0.9]
    np.testing.assert_allclose(precision, [2 / 4, 2 / 3, 1])
    np.testing.assert_allclose(recall, [1, 1, 1 / 2])


def test_scores_by_length_of_the_shortest_answer():
    golds = {1: ["Rome"], 2: ["in the big city of Rome", "Rome Italy"], 3: [], 4: []}
    found = scores_by_length({1: "rome!", 2: "Italy", 3: "", 4: "x"}, golds)
    assert list(found) == ["no answer", "1 word", "2 words"]
    assert found["1 word"] == {"exact_match": 1.0, "f1": 1.0}
    assert found["2 words"]["f1"] == pytest.approx(2 / 3)
    assert found["no answer"] == {"exact_match": 0.5, "f1": 0.5}


def test_the_metric_that_selects_the_checkpoint_is_drawn():
    names = ("regression", "span_qa", "multiple_choice", "ranking", "anomaly")
    found = [
        ClassificationTask(labels=("0", "1"), max_seq_length=8),
        ClassificationTask(labels=("0", "1"), max_seq_length=8, file_format="cola"),
        SimilarityTask(max_seq_length=8),
        SimilarityTask(max_seq_length=8, loss="cosent"),
        TaggingTask(max_seq_length=8, labels=("O", "B-X"), doc_stride=2),
        *map(task_class, names),
    ]
    assert {task.kind for task in found} == set(TASK_TYPES)
    for task in found:
        name = f"dev_{task.best_metric}"
        assert plots._names([{"step": 1, "dev_loss": 1.0, name: 0.5}], is_loss=False) == [name]


@pytest.mark.plots
@pytest.mark.parametrize("scores", [[1, 1 + 2**-23], [1, 1], [0, 1e30], []])
def test_scores_that_are_nearly_equal_have_a_histogram(scores):
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    plots.draw_histogram(axes, {"normal": np.array(scores, np.float32)}, "score")
    assert sum(patch.get_height() > 0 for patch in axes.patches) == len(set(scores))


@pytest.mark.medium
@pytest.mark.plots
@pytest.mark.parametrize("count", [5, 80])
def test_each_plot_is_drawn_with_few_and_many_labels_in_any_script(count, tmp_path):
    rng = np.random.default_rng(0)
    names = [NAMES[number % 5] for number in range(count)]
    labels, scores = rng.random(200) > 0.5, rng.random(200)
    counts, bars = rng.integers(0, 9, (count, count)), {"f1": labels[:count], "x": scores[:count]}
    of_rows = {"normal": scores, "anomaly": scores[:0]}
    found = {
        "confusion_matrix": lambda axes: plots.draw_confusion_matrix(axes, names, counts),
        "reliability": lambda axes: plots.draw_reliability(axes, scores, labels),
        "precision_recall": lambda axes: plots.draw_precision_recall(
            axes, names[3], labels, scores, 0.5
        ),
        "entities": lambda axes: plots.draw_bars(axes, names, bars),
        "scores": lambda axes: plots.draw_histogram(axes, of_rows, "score", 0.3),
    }
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "dev_accuracy": 0.5, "dev_loss": 1.0}]
    run = type("Run", (), {"file": lambda self, name: f"{tmp_path}/{name}"})()
    run.metrics = lambda: lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots.write(run, found) == f"{tmp_path}/plots"
    images = {path.stem: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert sorted(images) == sorted([*found, "loss"])
    for image in images.values():
        width, height = struct.unpack(">II", image[16:24])
        assert image.startswith(b"\x89PNG") and min(width, height) > 300


@pytest.mark.medium
@pytest.mark.plots
def test_training_writes_plots_of_the_best_checkpoint(huggingface_dir, complaints, tmp_path):
    train, dev = (tasks.read_examples(complaints[name]) for name in ("train", "dev"))
    model = tasks.TextClassifier.from_pretrained(
        huggingface_dir, labels=sorted(small.TEXTS), max_seq_length=12
    )
    said = []
    flags = {"epochs": 2, "log_every": 2, "log": said.append}
    model.train(train, dev=dev, output_dir=tmp_path / "run", **flags)
    images = sorted(path.name for path in (tmp_path / "run" / "plots").iterdir())
    assert images == ["confusion_matrix.png", "loss.png", "reliability.png"]
    assert f"plots: {tmp_path / 'run' / 'plots'}" in said
    loaded = load_model(tmp_path / "run")
    np.testing.assert_array_equal(
        loaded.predict(["the bill"])["probabilities"], model.predict(["the bill"])["probabilities"]
    )


CASES = {
    "TextClassifier": (
        {"labels": ["a", "b"]},
        (["a", "b", "c"], ["a", "b", "a"]),
        {"confusion_matrix", "precision_recall", "reliability"},
    ),
    "TokenClassifier": (
        {"labels": ["X"]},
        (["the bill"] * 2, [[{"start": 4, "end": 8, "type": "X"}]] * 2),
        {"entities"},
    ),
    "QuestionAnswerer": (
        {"max_query_length": 4},
        ({"question": ["a"], "context": ["the bill"]}, [[{"text": "bill", "start": 4}]]),
        {"answers"},
    ),
    "AnomalyDetector": ({"latent_dim": 3}, (["a", "b", "c"], [0, 1, 0]), {"scores"}),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(CASES, "TokenClassifier"))
def test_each_task_has_its_plots(huggingface_dir, name):
    options, (x, y), expected = CASES[name]
    model = getattr(tasks, name).from_pretrained(huggingface_dir, max_seq_length=12, **options)
    encoded = model._evaluation_rows(x, y)
    found = model.task.plots(encoded, model.evaluator().outputs(encoded))
    assert set(found) == expected
