"""Rows of several labels: reading, metrics, and a complete run."""

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from tasks.base.task import task_from_dict
from tasks.finetuning.recipe import finetune
from tasks.model.labelled_rows import read_examples
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.tasks.metrics import brute_force


def from_data(path, **options):
    return ClassificationTask.from_data(path, max_seq_length=12, **options)


def test_a_row_may_have_several_labels_or_none(tmp_path):
    table = small.write_rows(
        tmp_path / "a.csv", [("t", "b|a"), ("u", ""), ("v", " c "), ("w", "a | c")]
    )
    lines = tmp_path / "a.jsonl"
    labels = (["b", "a"], [], "c", ["a", "c"])
    lines.write_text("".join(json.dumps({"text": "t", "label": of}) + "\n" for of in labels))
    for path in (table, lines):
        task = from_data(path, multi_label=True)
        assert task.labels == ("a", "b", "c")
        assert task.load_examples(path).labels == [(1, 0), (), (2,), (0, 2)]
        targets, weights = task.targets(task.load_examples(path), None)
        assert targets["label"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1]]
        assert weights["label"].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["a|b", "a||b"],
            "a.csv:3: column 'label' contains an empty label; expected a label, or several",
        ),
        (["a", "", "a"], "a.csv: expected two or more labels. Received: 'a' or none"),
        (["", ""], "a.csv: expected two or more labels. Received: none"),
    ],
)
def test_bad_rows_of_several_labels_are_rejected(tmp_path, rows, message):
    path = small.write_rows(tmp_path / "a.csv", [("t", row) for row in rows])
    with pytest.raises(UserError, match=message):
        from_data(path, multi_label=True)


def test_unknown_labels_among_several_are_reported(tmp_path):
    path = small.write_rows(tmp_path / "a.csv", [("t", "a|b"), ("t", "a|x")])
    with pytest.raises(UserError, match="a.csv:3: label 'x': expected one of a, b"):
        from_data(path, multi_label=True, labels=("a", "b")).load_examples(path)


def test_multi_hot_rows_are_no_names(tmp_path):
    table = small.write_rows(tmp_path / "a.csv", [("t", "a|b"), ("t", "b|a|b")])
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "t", "label": [0, 1]}\n{"text": "t", "label": [0, 1, 0]}\n')
    for path, message in (
        (table, "a.csv:3: column 'label' has 'b' twice; write the names of a row's labels"),
        (lines, "a.jsonl:2: column 'label' has '0' twice; write the names.* instead of 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            from_data(path, multi_label=True)


def test_metrics_of_several_labels_equal_their_definitions():
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (60, 4)).astype(np.float32)
    # The last label never occurs.
    labels = (rng.random((60, 4)) < [0.5, 0.3, 0.1, 0.0]).astype(np.int32)
    task = ClassificationTask(
        labels=tuple("wxyz"),
        multi_label=True,
        threshold_objective="recall=0.6",
        temperature=2.0,
        thresholds=(0.3, 0.5, 0.7, 0.5),
        max_seq_length=8,
    )
    data = types.SimpleNamespace(labels={"label": labels})
    metrics = task.metrics(data, {"label": logits})
    probabilities = 1 / (1 + np.exp(-logits / 2.0))
    chosen = probabilities >= [0.3, 0.5, 0.7, 0.5]
    numbers = [
        [brute_force.numbers_of(column) for column in pair]
        for pair in zip(labels.T, chosen.T, strict=True)
    ]
    of_each = [brute_force.precision_recall_f1(*pair)[2] for pair in numbers]
    recalls = [brute_force.precision_recall_f1(*pair)[1] for pair in numbers]
    every = [brute_force.numbers_of(cells.ravel()) for cells in (labels, chosen)]
    assert metrics == pytest.approx(
        {
            "micro_f1": brute_force.precision_recall_f1(*every)[2],
            "macro_f1": np.mean(of_each),
            "exact_match": np.mean([not any(row) for row in labels != chosen]),
            "pr_auc": np.mean(
                [brute_force.pr_auc(labels[:, i], probabilities[:, i]) for i in range(3)]
            ),
            **{f"f1_{name}": value for name, value in zip("wxyz", of_each, strict=True)},
            **{f"recall_{name}": value for name, value in zip("wxyz", recalls, strict=True)},
            "ece": metrics["ece"],
            "degenerate": 0,
        }
    )
    report = task.report(data, {"label": logits})
    assert report["confusion_matrix"] == [
        [[60 - len(gold | found), len(found - gold)], [len(gold - found), len(gold & found)]]
        for gold, found in numbers
    ]
    assert report["per_label"]["support"] == labels.sum(0).tolist()
    json.dumps(report)
    low = [name for name, value in zip("wxyz", recalls, strict=True) if value < 0.6]
    assert "z" in low and len(low) < 4
    warning = task.warning(metrics)
    assert [name for name in "wxyz" if f"recall_{name} is" in warning] == low


OF_SEVERAL = [
    ("the bill is too high", "billing"),
    ("my bill is high !", "billing"),
    ("my screen is broken", "hardware"),
    ("broken screen !", "hardware"),
    ("the app does not open", "software"),
    ("my app does not open !", "software"),
    ("broken screen , the bill too high", "billing|hardware"),
    ("my bill is high , my screen broken", "billing|hardware"),
    ("the app does not open , broken screen", "hardware|software"),
    ("my screen is broken , the app too", "hardware|software"),
    ("the app , the bill is too high", "billing|software"),
    ("my bill , the app does not open", "billing|software"),
    ("bill , app , screen broken", "billing|hardware|software"),
    ("my cafe is open", ""),
    ("the cafe does not open !", ""),
    ("is my cafe too high ?", ""),
]


@pytest.mark.slow
def test_sixteen_rows_of_several_labels_are_learned_tuned_and_served(huggingface_dir, tmp_path):
    path = small.write_rows(tmp_path / "several.csv", OF_SEVERAL)
    files = {"train": small.write_rows(tmp_path / "train.csv", OF_SEVERAL * 128), "dev": path}
    settings = small.settings(
        huggingface_dir,
        files,
        tmp_path / "run",
        multi_label=True,
        threshold_objective="f1",
        calibrate=True,
        global_batch_size=32,
        log_every=100,
        epochs=6,
        learning_rate=2e-3,
    )
    said = []
    run = finetune(settings, said.append)
    (decided,) = [line for line in said if line.startswith("tuned on dev: temperature ")]
    assert "dev_exact_match 1.0000" in decided
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "--calibrate: file with too few errors" in warning  # Every row is learned.
    trained = load_model(run.path)
    assert len(trained.task.thresholds) == 3 and trained.task.temperature == 1
    predictions = tmp_path / "answers.jsonl"
    assert predict(trained, path, predictions, 5, said.append) == (16, 0)
    for line, (_, labels) in zip(predictions.read_text().splitlines(), OF_SEVERAL, strict=True):
        prediction = json.loads(line)
        assert prediction["labels"] == ["billing", "hardware", "software"]
        pairs = zip(prediction["labels"], prediction["selected"], strict=True)
        assert [name for name, selected in pairs if selected] == list(
            filter(None, labels.split("|"))
        )
        assert prediction["score"] == max(prediction["probabilities"])
    serve = trained.serving.pipeline.signatures["serving_default"]
    for count in (0, 1, 17):
        prediction = serve(tf.constant([""] * count, tf.string))
        shapes = {name: value.shape for name, value in prediction.items()}
        assert shapes == {
            "label": (count,),
            "score": (count,),
            **dict.fromkeys(("probabilities", "labels", "selected"), (count, 3)),
        }
    said.clear()
    finetune(settings, said.append)
    assert len(said) == 1 and "nothing to do" in said[0]


COLUMNS = {
    "a.csv": "text,toxic,obscene,threat\nx,1,0,0\ny,1.0,True,0\nz,0,0,0\n",
    "a.jsonl": """{"text": "x", "toxic": 1, "obscene": 0, "threat": false}
{"text": "y", "toxic": true, "obscene": 1.0, "threat": 0}
{"text": "z", "toxic": 0, "obscene": 0, "threat": 0}
""",
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_0_and_1_are_labels(tmp_path, name):
    (tmp_path / name).write_text(COLUMNS[name])
    options = {"label_column": "toxic,obscene,threat", "multi_label": True}
    rows = read_examples(tmp_path / name, **options)
    # In the order of the columns, with one that no row has.
    assert rows.labels == ("toxic", "obscene", "threat")
    assert rows.y == [["toxic"], ["toxic", "obscene"], []]
    task = ClassificationTask.from_data(tmp_path / name, max_seq_length=8, **options)
    assert task.load_examples(tmp_path / name).labels == [(0,), (0, 1), ()]
    assert task_from_dict(task.to_dict()) == task
    (tmp_path / name).write_text(COLUMNS[name].replace("1.0", "2"))
    with pytest.raises(UserError, match=r"column '(toxic|obscene)': expected 0 or 1, received '2'"):
        read_examples(tmp_path / name, **options)
    with pytest.raises(UserError, match="no column 'toxic,obscene,threat'"):
        read_examples(tmp_path / name, label_column="toxic,obscene,threat")
