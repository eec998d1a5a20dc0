"""The classification task on literals, its batches, and the complaints dataset."""

import ast
import csv
import dataclasses
import math
import re
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, UserError, WarmupLinearDecay
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.train.losses import WeightedMean, sigmoid_cross_entropy
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.regression import RegressionTask
from tests import small
from tests.conftest import ROOT
from tests.shared_graphs import tokenizer_of


def from_data(path, **changes):
    return ClassificationTask.from_data(
        path,
        **{
            "text_columns": ("text",),
            "label_column": "label",
            "labels": (),
            "max_seq_length": 12,
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["b", "a", "c", "a"], ("a", "b", "c")),
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["2", "01", "1"], ("01", "1", "2")),
    ],
)
def test_labels_are_sorted_as_numbers_if_all_are_numbers(tmp_path, found, expected):
    path = small.write_rows(tmp_path / "a.csv", [("t", label) for label in found])
    assert from_data(path).labels == expected
    given = tuple(reversed(expected))
    assert from_data(path, labels=given).labels == given
    assert from_data(path).load_examples(path).labels == [expected.index(label) for label in found]


def test_one_class_and_unknown_labels_are_rejected(tmp_path):
    train = small.write_rows(tmp_path / "train.csv", [("t", "a"), ("u", "b")])
    with pytest.raises(UserError, match="expected two or more labels. Received: 'a'"):
        from_data(small.write_rows(tmp_path / "one.csv", [("t", "a"), ("u", "a")]))
    with pytest.raises(UserError, match="dev.csv:3: label 'c': expected one of a, b"):
        from_data(train).load_examples(
            small.write_rows(tmp_path / "dev.csv", [("t", "a"), ("u", "c")])
        )


def test_a_task_is_restored_from_its_json():
    for columns in (("text",), ("a", "b")):
        task = ClassificationTask(text_columns=columns, labels=("x", "y", "z"), max_seq_length=12)
        assert task_from_dict(task.to_dict()) == task
    assert task.input_names == ("text_a", "text_b")
    with pytest.raises(UserError, match="task type 'dancing': expected one of classification"):
        task_from_dict({"kind": "dancing"})


def test_the_prediction_of_a_binary_task_by_hand():
    task = ClassificationTask(labels=("no", "yes"), max_seq_length=12)
    prediction = {
        name: value.numpy()
        for name, value in task.predictions(
            {}, None, {"label": tf.constant([[math.log(3)], [-math.log(4)]])}
        ).items()
    }
    assert prediction["label"].tolist() == [b"yes", b"no"]
    np.testing.assert_allclose(prediction["probabilities"], [[0.25, 0.75], [0.8, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(prediction["score"], [0.75, 0.8], rtol=1e-6)
    assert prediction["labels"].tolist() == [[b"no", b"yes"]] * 2


def test_the_prediction_of_a_multi_class_task_by_hand():
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    prediction = task.predictions({}, None, {"label": tf.math.log([[0.2, 0.5, 0.3]])})
    assert prediction["label"].numpy().tolist() == [b"b"]
    np.testing.assert_allclose(prediction["probabilities"], [[0.2, 0.5, 0.3]], rtol=1e-6)


def test_metrics_by_hand():
    task = ClassificationTask(labels=("no", "yes"), max_seq_length=12)
    logits = np.array([[2.0], [-1.0], [1.0]], np.float32)
    data = types.SimpleNamespace(labels={"label": np.array([1, 1, 0], np.int32)})
    result = task.metrics(data, {"label": logits})
    assert result == pytest.approx(
        {
            "accuracy": 1 / 3,
            "macro_f1": 0.25,
            "matthews": -0.5,  # (1 * 0 - 1 * 1) / sqrt(2 * 2 * 1 * 1)
            "f1_no": 0,
            "f1_yes": 0.5,
            "f1": 0.5,
            "precision": 0.5,
            "recall": 0.5,
            "pr_auc": 1 / 2 + 1 / 2 * 2 / 3,
            "roc_auc": 0.5,
            # Confidence 0.881 and right; 0.731 twice, in one bin, and wrong.
            "ece": (1 - 0.880797 + 2 * 0.731059) / 3,
            "degenerate": 0,
        },
        abs=1e-6,
    )


def test_the_evaluation_loss_by_hand(pipeline, encoded, monkeypatch):
    evaluator = Evaluator(pipeline.task, pipeline.model, tf.distribute.get_strategy())
    logits = np.log(np.tile([[0.5, 0.25, 0.25]], (10, 1))).astype(np.float32)

    def outputs(data, on_batch):
        for numbers in (np.array([3, 1, 8]), np.array([0, 2, 4, 5, 6, 7, 9])):
            on_batch(numbers, {"label": logits[numbers]})
        return {"label": logits}

    monkeypatch.setattr(evaluator, "outputs", outputs)
    expected = (3 * math.log(2) + 6 * math.log(4) + math.log(2)) / 10
    assert evaluator.metrics(encoded)["loss"] == pytest.approx(expected)


@pytest.fixture
def pipeline(config, vocabulary):
    task = ClassificationTask(labels=("billing", "hardware", "software"), max_seq_length=12)
    return Pipeline(task, tokenizer_of(vocabulary, True), task.build_model(config))


@pytest.fixture
def encoded(pipeline):
    texts = [text for texts in small.TEXTS.values() for text in texts] + ["the"]
    examples = Examples({"text": texts}, [0, 0, 0, 1, 1, 1, 2, 2, 2, 0])
    return EncodedExamples.encode(examples, pipeline, to_padded)


@pytest.fixture
def numbered(encoded):
    """Replace the labels by the numbers of the examples."""
    encoded.labels["label"] = np.arange(10, dtype=np.int32)
    return encoded


def rows_of(batches):
    """Return the labels, here numbers of examples, of each batch's real rows."""
    return [
        labels["label"].numpy()[weights["label"].numpy() > 0].tolist()
        for _, labels, weights in batches
    ]


def joined(lists):
    return [entry for part in lists for entry in part]


def test_each_epoch_has_every_example_once_in_its_own_order(numbered):
    batches = rows_of(numbered.training_batches(global_batch_size=4, num_epochs=2, seed=5))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = joined(batches[:3]), joined(batches[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))
    assert batches == rows_of(numbered.training_batches(global_batch_size=4, num_epochs=2, seed=5))
    assert batches != rows_of(numbered.training_batches(global_batch_size=4, num_epochs=2, seed=6))


def test_batches_from_a_later_step_on_are_the_same(numbered):
    arguments = {"global_batch_size": 4, "num_epochs": 2, "seed": 5}
    batches = rows_of(numbered.training_batches(**arguments))
    for step in range(6):
        assert rows_of(numbered.training_batches(**arguments, first_step=step)) == batches[step:]


def test_replicas_divide_each_global_batch(numbered):
    arguments = {"global_batch_size": 4, "num_epochs": 2, "seed": 5}
    complete = rows_of(numbered.training_batches(**arguments))
    for replicas in (2, 4):
        batches = rows_of(numbered.training_batches(**arguments, num_replicas=replicas))
        assert [
            joined(batches[i : i + replicas]) for i in range(0, len(batches), replicas)
        ] == complete


def test_batches_hold_the_packed_ids(numbered, vocabulary):
    inputs, is_sample = next(iter(numbered.evaluation_batches(np.array([9, 0]), 2)))
    np.testing.assert_array_equal(
        inputs["input_ids"], [[2, vocabulary["the"], 3, 0, 0, 0, 0], [2, 5, 6, 7, 8, 9, 3]]
    )
    np.testing.assert_array_equal(inputs["input_mask"], [[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    assert is_sample.numpy().all()
    *_, (inputs, labels, weights) = small.in_order(numbered, 4)
    assert (labels["label"].numpy().tolist(), weights["label"].numpy().tolist()) == ([8, 9], [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("replica_batch_size", [1, 3, 64])
def test_evaluation_keeps_the_order_for_any_batch_size_and_number_of_replicas(
    pipeline, encoded, mirrored, replica_batch_size
):
    model = pipeline.model
    expected = np.concatenate(
        [model(inputs)["label"] for inputs, _ in encoded.evaluation_batches(np.arange(10), 1)]
    )
    evaluator = Evaluator(pipeline.task, model, tf.distribute.get_strategy(), replica_batch_size)
    np.testing.assert_allclose(evaluator.outputs(encoded)["label"], expected, atol=1e-6)
    with mirrored.scope():
        copy = pipeline.task.build_model(model.config)
    for variable, value in zip(copy.variables, model.variables, strict=True):
        variable.assign(value)
    evaluator = Evaluator(pipeline.task, copy, mirrored, replica_batch_size)
    np.testing.assert_allclose(evaluator.outputs(encoded)["label"], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_the_model_saves_and_loads_in_keras(config, inputs_BL, tmp_path, dtype):
    """Follow a notebook: compile, fit for a step, save, load, and fit again."""
    task = ClassificationTask(labels=("no", "yes"), max_seq_length=12)
    model = task.build_model(config, dtype)
    model.compile(
        AdamW(WarmupLinearDecay(1e-2, 10, 1)), {"label": WeightedMean(task.losses["label"])}
    )
    labels = {"label": np.array([0, 1])}
    model.fit(inputs_BL, labels, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs_BL)["label"], model(inputs_BL)["label"])
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert int(loaded.optimizer.iterations.numpy()) == 1
    loaded.fit(inputs_BL, labels, verbose=0)


@pytest.mark.slow
def test_a_saved_model_loads_in_a_process_that_imports_only_the_task(config, inputs_BL, tmp_path):
    model = ClassificationTask(labels=("no", "yes"), max_seq_length=12).build_model(config)
    model.compile(
        AdamW(WarmupLinearDecay(1e-2, 10, 1)), {"label": WeightedMean(sigmoid_cross_entropy)}
    )
    model.fit(inputs_BL, {"label": np.array([0, 1])}, verbose=0)
    model.save(tmp_path / "model.keras")
    path = str(tmp_path / "model.keras")
    load = f"print(keras.saving.load_model({path!r}).name)"
    code = f"import keras, tasks.types.classification.text_classifier; {load}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "classification\n", done.stderr


def test_mean_embedding_ignores_padding(pipeline):
    together, alone = (
        pipeline.embed(tf.constant(["the bill", "the bill is too high !"])),
        pipeline.embed(tf.constant(["the bill"])),
    )
    for name in ("pooled", "mean"):
        np.testing.assert_allclose(together[name][0], alone[name][0], atol=1e-5)


def test_the_embedding_of_a_long_text_is_that_of_the_kept_part(pipeline):
    task = dataclasses.replace(pipeline.task, max_seq_length=5, truncation="tail")
    tail = Pipeline(task, pipeline.tokenizer, pipeline.model)
    found, expected = (
        tail.embed(tf.constant([text])) for text in ("the bill is too high !", "too high !")
    )
    for name in ("pooled", "mean"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)


def read_complaints(name):
    with open(ROOT / "examples" / "complaints" / name, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_the_complaints_are_balanced_varied_and_without_questions_of_the_demo():
    train, dev = read_complaints("train.csv"), read_complaints("dev.csv")
    assert (len(train), len(dev)) == (360, 90)
    for rows in (train, dev):
        counts = {
            label: sum(row["label"] == label for row in rows)
            for label in ("hardware", "software", "billing")
        }
        assert len(set(counts.values())) == 1
    texts = [row["text"] for row in (*train, *dev)]
    assert len(set(texts)) == len(texts)

    def words(text):
        return set(re.findall(r"[a-z0-9']+", text.lower()))

    tree = ast.parse((ROOT / "examples" / "demo.py").read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    questions = [words(text) for text in ast.literal_eval(values["QUESTIONS"])]
    assert len(questions) == 3
    for text in texts:
        for question in questions:
            shared = len(words(text) & question)
            assert shared < len(words(text)) / 2 and shared < len(question) / 2, text


def test_settings_know_published_datasets(huggingface_dir, complaints, tmp_path):
    settings = small.settings(huggingface_dir, complaints, tmp_path / "run", task="sst2")
    kind, options = settings.task_options()
    assert (kind, options) == (
        "classification",
        {"file_format": "sst2", "max_seq_length": 12},
    )
    with pytest.raises(UserError, match="--text_column: .* the files of sst2 have fixed columns"):
        dataclasses.replace(settings, text_column="a")
    settings = dataclasses.replace(
        settings, task="classification", text_column="a", text_b_column="b", labels=("y", "x")
    )
    assert settings.task_options()[1] == {
        "text_columns": ("a", "b"),
        "labels": ("y", "x"),
        "max_seq_length": 12,
    }
    with pytest.raises(UserError, match="--labels: not supported by --task=regression"):
        dataclasses.replace(settings, task="regression")


@pytest.mark.parametrize(
    ("task", "same", "others"),
    [
        (ClassificationTask(labels=("a", "b"), max_seq_length=8), [1, 1], [1, 0]),
        (
            ClassificationTask(labels=("a", "b"), max_seq_length=8, multi_label=True),
            [[0], [0]],
            [[0], [0, 1]],
        ),
        (RegressionTask(max_seq_length=8), [0.5, 0.5], [0.5, 0.25]),
    ],
    ids=["classification", "multi_label", "regression"],
)
def test_rows_of_one_label_are_reported_since_their_metrics_say_nothing(task, same, others):
    def warnings(labels):
        return task.label_warnings(types.SimpleNamespace(examples=Examples({}, labels)))

    assert warnings(others) == warnings(same[:1]) == []
    (warning,) = warnings(same)
    assert warning.startswith("all 2 rows have the same label; macro F1, ROC-AUC and correlations")
