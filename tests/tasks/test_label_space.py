"""Whitespace around a label, which is ignored in any task, format or flag."""

import json

import pytest

from bert_tf import UserError
from tasks.data.readers.choices import read_choices
from tasks.types.anomaly import AnomalyTask
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.tagging import TaggingTask
from tests import small

ROWS = [("a", "x"), ("b", "x "), ("c", "\u00a0x\t"), ("d", "y")]


def write(path, rows):
    if path.suffix == ".csv":
        return str(small.write_rows(path, rows))
    if path.suffix == ".tsv":  # A tab would end the field.
        lines = ["text\tlabel", *(f"{text}\t{label.strip(chr(9))}" for text, label in rows)]
    else:
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_space_is_stripped_from_one_label_per_row(tmp_path, suffix):
    path = write(tmp_path / f"rows{suffix}", ROWS)
    task = ClassificationTask.from_data(path, class_weights=("balanced",), max_seq_length=8)
    assert task.labels == ("x", "y") and task.load_examples(path).labels == [0, 0, 0, 1]
    assert task.class_weights == (4 / (2 * 3), 4 / (2 * 1))
    flags = ClassificationTask.from_data(
        path, labels=("y", " x"), rare_label="x ", max_seq_length=8
    )
    assert (flags.labels, flags.rare_label) == (("y", "x"), "x")


def test_space_is_stripped_from_several_labels_per_row(tmp_path):
    rows = [("a", "x | y"), ("b", ["x ", "\ty"]), ("c", " "), ("d", [])]
    path = write(tmp_path / "rows.jsonl", rows)
    task = ClassificationTask.from_data(path, multi_label=True, max_seq_length=8)
    assert task.labels == ("x", "y") and task.load_examples(path).labels == [
        (0, 1),
        (0, 1),
        (),
        (),
    ]


def test_space_is_stripped_from_labels_of_glue(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\na\t1 \nb\t0\n")
    task = ClassificationTask.from_data(str(path), file_format="sst2", max_seq_length=8)
    assert task.load_examples(str(path)).labels == [1, 0]


def test_space_is_stripped_from_normal_labels(tmp_path):
    path = write(tmp_path / "rows.csv", ROWS)
    task = AnomalyTask.from_data(path, normal_labels=(" x",), max_seq_length=8)
    assert task.normal_labels == ("x",) and task.load_examples(path).labels == [0, 0, 0, 1]


def test_space_is_stripped_from_types_of_entities(tmp_path):
    path = tmp_path / "rows.jsonl"
    spans = [{"start": 0, "end": 1, "type": "PER "}, {"start": 2, "end": 3, "type": "PER"}]
    path.write_text(json.dumps({"text": "a b", "entities": spans}))
    assert TaggingTask.from_data(str(path), max_seq_length=8).labels == ("O", "B-PER", "I-PER")
    columns = tmp_path / "rows.conll"
    columns.write_text("a B-PER\u00a0\nb I-PER\n", encoding="utf-8")
    task = TaggingTask.from_data(str(columns), labels=("PER ",), max_seq_length=8)
    assert task.labels == ("O", "B-PER", "I-PER")
    assert task.load_examples(str(columns)).labels[0].tags == ["B-PER", "I-PER"]


def test_space_is_stripped_from_labels_of_choices(tmp_path):
    path = tmp_path / "rows.jsonl"
    choices = [{"label": "A ", "text": "one"}, {"label": "B", "text": "two"}]
    values = {"question": {"stem": "which", "choices": choices}, "answerKey": "B "}
    path.write_text(json.dumps(values))
    (row,) = read_choices(path)
    assert (row.texts["choices"], row.label) == (["one", "two"], 1)


def test_labels_that_differ_by_space_are_one_label(tmp_path, huggingface_dir, complaints):
    with pytest.raises(UserError, match="expected at least two different labels"):
        small.settings(huggingface_dir, complaints, tmp_path / "run", labels=("x", "x "))
    with pytest.raises(UserError, match="expected at least two different labels"):
        small.settings(huggingface_dir, complaints, tmp_path / "run", labels=("x",))
    for labels in (("x", "y", ""), ("x", " ", "y")):
        with pytest.raises(UserError, match="--labels=x,.*: expected names .* an empty one"):
            small.settings(huggingface_dir, complaints, tmp_path / "run", labels=labels)
    entities = {"task": "tagging", "labels": ("x",)}
    assert small.settings(huggingface_dir, complaints, tmp_path / "run", **entities)
    with pytest.raises(UserError, match="expected two or more labels. Received: 'x'"):
        ClassificationTask.from_data(write(tmp_path / "rows.csv", ROWS[:3]), max_seq_length=8)
