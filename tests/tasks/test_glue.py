"""GLUE by name: files, metrics and submissions, on made-up rows in the published formats."""

import math
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, read_pretrained
from bert_tf.weights import heads
from tasks import TextRegressor, predict
from tasks.base.task import task_class, task_from_dict
from tasks.base.task_types import DATASETS
from tasks.finetuning.recipe import finetune
from tasks.graph.pipeline import ServingFunctions
from tasks.model.loading import load_model
from tasks.prediction.outputs import submit
from tasks.prediction.retrieval import check_ranker, open_ranker, rerank
from tests import small

_OF_NLI = "index\tpromptID\tpairID\tgenre\tp1\tp2\tq1\tq2\tsentence1\tsentence2"
_OF_STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
_PAIR = "index\tsentence1\tsentence2"
_ENTAILMENT = ("entailment", "not_entailment")

# Per dataset: header and row of a labelled file, of a test file; labels; metrics.
FORMS = {
    "cola": (
        ("", "gj04\t{label}\t*\t{a}"),
        ("index\tsentence", "{index}\t{a}"),
        ("0", "1"),
        ["matthews"],
    ),
    "sst2": (
        ("sentence\tlabel\n", "{a}\t{label}"),
        ("index\tsentence", "{index}\t{a}"),
        ("0", "1"),
        ["accuracy"],
    ),
    "mrpc": (
        ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n", "{label}\t7\t8\t{a}\t{b}"),
        ("\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String", "{index}\t7\t8\t{a}\t{b}"),
        ("0", "1"),
        ["accuracy", "f1"],
    ),
    "qqp": (
        (
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\tbroken\n",
            "1\t2\t3\t{a}\t{b}\t{label}",
        ),
        ("id\tquestion1\tquestion2", "{index}\t{a}\t{b}"),
        ("0", "1"),
        ["accuracy", "f1"],
    ),
    "stsb": (
        (f"{_OF_STSB}\tscore\n", "0\tg\tf\t12\t1\tn\tn\t{a}\t{b}\t{label}"),
        (_OF_STSB, "{index}\tg\tf\t12\t1\tn\tn\t{a}\t{b}"),
        ("0.000", "2.500", "5.000"),
        ["pearson", "spearman", "mean_squared_error"],
    ),
    "mnli": (
        (
            f"{_OF_NLI}\tlabel1\tgold_label\n",
            "0\t1\t1n\tg\t(\t(\tq\tq\t{a}\t{b}\tneutral\t{label}",
        ),
        (_OF_NLI, "{index}\t1\t1n\tg\t(\t(\tq\tq\t{a}\t{b}"),
        ("contradiction", "entailment", "neutral"),
        ["accuracy"],
    ),
    "qnli": (
        ("index\tquestion\tsentence\tlabel\n", "0\t{a}\t{b}\t{label}"),
        ("index\tquestion\tsentence", "{index}\t{a}\t{b}"),
        _ENTAILMENT,
        ["accuracy"],
    ),
    "rte": (
        (f"{_PAIR}\tlabel\n", "0\t{a}\t{b}\t{label}"),
        (_PAIR, "{index}\t{a}\t{b}"),
        _ENTAILMENT,
        ["accuracy"],
    ),
    "wnli": (
        (f"{_PAIR}\tlabel\n", "0\t{a}\t{b}\t{label}"),
        (_PAIR, "{index}\t{a}\t{b}"),
        ("0", "1"),
        ["accuracy"],
    ),
}
TEXTS = [
    ('the bill "is high', "broken"),
    ("my screen", "is broken"),
    ("a", "b"),
    ("the app", "open"),
    ("my app", "not open"),
    ("b", "c"),
]


def write_labelled(path, name):
    (header, row), _, labels, _ = FORMS[name]
    lines = [
        row.format(label=labels[number % len(labels)], a=a, b=b)
        for number, (a, b) in enumerate(TEXTS)
    ]
    path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_test(path, name):
    """Write a test file of the first two texts, with indices from 10."""
    _, (header, row), *_ = FORMS[name]
    lines = [row.format(index=number + 10, a=a, b=b) for number, (a, b) in enumerate(TEXTS[:2])]
    path.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return path


def task_of(path, name):
    dataset = DATASETS[name]
    return task_class(dataset.kind).from_data(path, max_seq_length=12, **dataset.options)


def answering(task, outputs):
    """Return a model of a run that predicts these outputs for any input."""
    pipeline = types.SimpleNamespace(
        task=task,
        signatures={"serving_default": lambda *texts: task.predictions({}, None, outputs)},
        token_fillers={},
        vocabulary={"[UNK]": 1, "[CLS]": 2, "[SEP]": 3},
    )
    record = {"origin": "run"}
    return types.SimpleNamespace(task=task, serving=ServingFunctions(pipeline), record=record)


def write_submission(trained, path, output):
    return submit(trained, path, output, 64, lambda line: None)


@pytest.mark.parametrize("name", FORMS)
def test_each_dataset_has_its_labels_metrics_and_submission(tmp_path, name):
    *_, labels, metrics = FORMS[name]
    path = write_labelled(tmp_path / "dev.tsv", name)
    task = task_of(path, name)
    assert heads.reads_pairs(task.to_dict()) == (len(task.input_names) == 2)
    assert task_from_dict({**task.to_dict(), "text_columns": ("text",)}) == task
    examples = task.load_examples(path)
    assert len(examples.skipped_rows) == (name == "qqp")
    texts = list(zip(*examples.texts.values(), strict=True))
    assert texts == [texts[: len(task.input_names)] for texts in TEXTS]
    if task.kind == "regression":
        right = {"value": np.array(examples.labels)[:, None]}
        assert examples.labels == [0.0, 2.5, 5.0, 0.0, 2.5, 5.0]
    else:
        right = {"label": np.eye(len(labels), dtype=np.float32)[examples.labels] * 9}
        if len(labels) == 2:
            right = {"label": right["label"][:, 1:] - 4.5}
        assert task.labels == labels
        assert examples.labels == [number % len(labels) for number in range(6)]
    data = types.SimpleNamespace(labels=task.targets(examples, None)[0])
    scores = task.metrics(data, right)
    assert task.best_metric == ("spearman" if name == "stsb" else metrics[0])
    for metric in metrics:
        assert scores[metric] == pytest.approx(float(metric != "mean_squared_error"))

    first_two = {name: tf.constant(values[:2], tf.float32) for name, values in right.items()}
    output = tmp_path / "test.tsv"
    count = write_submission(
        answering(task, first_two), write_test(tmp_path / "in.tsv", name), output
    )
    lines = [f"{number + 10}\t{labels[number]}" for number in range(2)]
    assert (count, output.read_text().split("\n")) == (2, ["index\tprediction", *lines, ""])


@pytest.mark.medium
def test_a_run_of_stsb_reranks(huggingface_dir, tmp_path):
    task = task_of(write_labelled(tmp_path / "dev.tsv", "stsb"), "stsb")
    model = TextRegressor.from_weights(read_pretrained(huggingface_dir), task)
    model.has_new_head = False  # Any head has scores.
    run = model.save_run(tmp_path / "run").path
    check_ranker(run)
    (first, score), _ = rerank(open_ranker(run), "the bill", ["my app", "is high"])
    values = model.predict((["the bill"] * 2, ["my app", "is high"]))["value"]
    assert (first, score) == (np.argmax(values), pytest.approx(max(values), abs=1e-5))


def test_f1_and_matthews_use_the_second_label_as_positive(tmp_path):
    """Use 1 true positive, 1 false negative, 2 false positives and 2 true negatives."""
    data = types.SimpleNamespace(labels={"label": np.array([1, 1, 0, 0, 0, 0], np.int32)})
    logits = np.array([[1], [-1], [1], [1], [-1], [-1]], np.float32)
    qqp, cola = (
        task_of(write_labelled(tmp_path / f"{name}.tsv", name), name) for name in ("qqp", "cola")
    )
    metrics = qqp.metrics(data, {"label": logits})
    assert (metrics["accuracy"], metrics["f1"]) == pytest.approx((0.5, 0.4))
    assert cola.metrics(data, {"label": logits})["matthews"] == 0.0
    logits[3] = -1
    expected = (1 * 3 - 1 * 1) / math.sqrt(2 * 2 * 4 * 4)
    assert cola.metrics(data, {"label": logits})["matthews"] == pytest.approx(expected)


def test_a_submission_is_complete_or_not_written(tmp_path, monkeypatch):
    task = task_of(write_labelled(tmp_path / "dev.tsv", "rte"), "rte")
    trained = answering(task, {"label": tf.ones([2, 1])})
    path, output = write_test(tmp_path / "in.tsv", "rte"), tmp_path / "RTE.tsv"
    with open(path, "a") as file:
        file.write("12\tno second text\n")
    with pytest.raises(UserError, match="in.tsv:4: expected 3 fields"):
        write_submission(trained, path, output)
    monkeypatch.setattr(
        predict, "check_run", lambda *run: types.SimpleNamespace(task=task.to_dict())
    )
    predict.PredictSettings("run", str(path), f"{output}.jsonl").check()
    with pytest.raises(UserError, match="in.tsv:4: expected 3 fields"):
        predict.PredictSettings("run", str(path), str(output)).check()
    with pytest.raises(UserError, match="dev.tsv:2: expected a test file with the column index"):
        write_submission(answering(task, {"label": tf.ones([6, 1])}), tmp_path / "dev.tsv", output)
    task = task_class("classification")(labels=("a", "b"), max_seq_length=12)
    with pytest.raises(
        UserError, match=".tsv is a GLUE submission and run is not trained on a GLUE"
    ):
        write_submission(answering(task, None), path, output)
    assert not output.exists()


def test_the_diagnostic_set_is_predicted_by_a_task_of_mnli(tmp_path):
    task = task_of(write_labelled(tmp_path / "dev.tsv", "mnli"), "mnli")
    path = tmp_path / "diagnostic.tsv"
    path.write_text(f"{_PAIR}\n5\ta\tb\n")
    trained = answering(task, {"label": tf.constant([[0.0, 0.0, 1.0]])})
    assert write_submission(trained, path, tmp_path / "AX.tsv") == 1
    assert (tmp_path / "AX.tsv").read_text() == "index\tprediction\n5\tneutral\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cola", "stsb", pytest.param("mnli", marks=pytest.mark.slow)])
def test_files_are_trained_on_and_submitted(huggingface_dir, tmp_path, name):
    devs = [write_labelled(tmp_path / f"{part}.tsv", name) for part in ("matched", "mismatched")]
    devs = devs if name == "mnli" else devs[:1]
    settings = small.settings(
        huggingface_dir,
        {"train": small.same_rows(devs[0]), "dev": devs[0]},
        tmp_path / "run",
        task=name,
        dev=tuple(map(str, devs)),
        epochs=1,
    )
    run = finetune(settings)
    metrics = run.checkpoints.info(run.checkpoints.best_step())["metrics"]
    expected = [*FORMS[name][3], "loss"]
    both = ("dev", "dev2")[: len(devs)]
    assert set(metrics) >= {f"{dev}_{metric}" for dev in both for metric in expected}
    assert ("dev2_loss" in metrics) == (name == "mnli")
    path, output = write_test(tmp_path / "test.tsv", name), tmp_path / "submission.tsv"
    trained = load_model(run.path)
    assert write_submission(trained, path, output) == 2
    header, *lines = output.read_text().splitlines()
    assert header == "index\tprediction" and [line[:3] for line in lines] == ["10\t", "11\t"]
    answer = trained.serving.pipeline.signatures["serving_default"]
    texts = [text[: len(trained.task.input_names)] for text in TEXTS[:2]]
    predictions = answer(*map(tf.constant, zip(*texts, strict=True)))
    for number, line in enumerate(lines):
        prediction = line.split("\t")[1]
        if name == "stsb":
            value = np.clip(predictions["value"][number], 0, 5)
            assert float(prediction) == pytest.approx(value, abs=6e-4)
        else:
            assert prediction == predictions["label"][number].numpy().decode()
