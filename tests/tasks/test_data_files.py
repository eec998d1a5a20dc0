"""A command opens each of its data files once: for hash, check, labels and examples."""

import builtins
import collections
import dataclasses
import gzip
import hashlib
import json
import os

import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.data.settings import WriteShardsSettings
from bert_tf.storage import files
from tasks import evaluate, read_examples
from tasks.data.readers.rows import BadRow, DataFile, FileRows, read_rows
from tasks.finetuning.recipe import finetune, read
from tasks.finetuning.settings import FinetuneSettings
from tasks.finetuning.sweep import sweep
from tests import small


@pytest.fixture
def opened(monkeypatch):
    """Return the number of times that each path is opened to be read."""
    counts = collections.Counter()

    def counting(function):
        def count(path, *arguments, **options):
            counts[str(path)] += 1
            return function(path, *arguments, **options)

        return count

    monkeypatch.setattr(builtins, "open", counting(builtins.open))
    monkeypatch.setattr(files, "open_file", counting(files.open_file))
    return counts


def question(context, answer, number):
    answers = [{"text": answer, "answer_start": context.index(answer)}] if answer else []
    entry = {"id": f"q{number}", "question": "what ?", "answers": answers}
    return {"context": context, "qas": [{**entry, "is_impossible": not answers}]}


def squad(answers):
    paragraphs = [question("the bill is high", answer, n) for n, answer in enumerate(answers)]
    return json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]})


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


CHOICE = {"prompt": "the", "choices": ["bill", "app"]}
# By task type: suffix, training rows, dev rows, further settings.
FILES = {
    "classification": (".csv", "text,label\na,x\nb,y\n", "text,label\nc,y\n", {}),
    "regression": (".tsv", "text\tlabel\na\t1\nb\t2\n", "text\tlabel\nc\t3\n", {}),
    "sst2": (".tsv", "sentence\tlabel\na\t0\nb\t1\n", "sentence\tlabel\nc\t1\n", {}),
    "tagging": (".conll", "a\tO\nb\tB-X\n", "b\tB-X\n", {}),
    "conll": (".jsonl", lines({"tokens": ["a"], "tags": ["B-X"]}), "a\tB-X\n", {}),
    "span_qa": (
        ".json",
        squad(["bill", None]),
        squad(["high"]),
        {"max_seq_length": 12, "max_query_length": 4},
    ),
    "multiple_choice": (".jsonl", lines({**CHOICE, "label": 0}), lines({**CHOICE, "label": 1}), {}),
    "anomaly": (
        ".csv",
        "text,label\na,x\n",
        "text,label\nb,x\nc,y\n",
        {"normal_labels": ("x",), "latent_dim": 3},
    ),
}


@pytest.mark.parametrize("task", FILES)
def test_check_labels_and_examples_read_a_file_once(task, huggingface_dir, tmp_path, opened):
    suffix, train, dev, options = FILES[task]
    paths = {"train": tmp_path / f"train{suffix}", "dev": tmp_path / f"dev{suffix}"}
    paths["train"].write_text(train)
    paths["dev"].write_text(dev if suffix != ".jsonl" or task != "conll" else train + train)
    settings = small.settings(huggingface_dir, paths, tmp_path / "run", task=task, **options)
    opened.clear()
    data = settings.check()
    training = read(settings, data, print, tf.distribute.get_strategy())
    assert [opened[name] for name in training.names] == [1, 1]
    assert training.digests == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.values()
    }
    for path, examples in zip(paths.values(), training.examples, strict=True):
        assert training.task.load_examples(path) == examples


@pytest.mark.medium
def test_a_run_opens_its_files_once(huggingface_dir, complaints, tmp_path, opened):
    second = tmp_path / "second.csv"
    second.write_text("text,label\nthe screen,hardware\n")
    settings = small.settings(huggingface_dir, complaints, tmp_path / "run", epochs=1)
    values = {**vars(settings), "dev": (*settings.dev, str(second))}
    settings = FinetuneSettings(**values)
    opened.clear()
    finetune(settings, data=settings.check())
    assert [opened[path] for path in (settings.train, *settings.dev)] == [1, 1, 1]


def test_rows_for_fit_are_read_once(complaints, opened):
    rows = read_examples(complaints["train"])
    assert rows.labels == tuple(sorted(small.TEXTS)) and len(rows.y) == 27
    assert opened[str(complaints["train"])] == 1


def test_files_that_cannot_be_trained_on_are_read(tmp_path):
    one = small.write_rows(tmp_path / "one.csv", [("t", "a"), ("u", "a")])
    rows = read_examples(one)
    assert (rows.y, rows.labels) == (["a", "a"], ("a",))
    (tmp_path / "none.jsonl").write_text(lines({"text": "a b", "entities": []}))
    rows = read_examples(tmp_path / "none.jsonl", "tagging")
    assert (rows.y, rows.labels) == ([[]], ())
    for normal, expected in ((["b"], [1, 1]), (["a", "b"], [0, 0])):
        assert read_examples(one, "anomaly", normal_labels=normal).y == expected
    with pytest.raises(UserError, match="one.csv: labels: a. Set normal_labels to those of normal"):
        read_examples(one, "anomaly")


UNLABELLED = {
    "classification": ("text", ["a"], "a"),
    "similarity": ("text", ["a"], "a"),
    "tagging": ("text", ["a"], "a"),
    "span_qa": ("question", ["a", "b"], "a"),
    "ranking": ("texts", ["a", "b"], ["b"]),
}


@pytest.mark.parametrize("task_type", UNLABELLED)
def test_rows_without_labels_are_read(task_type, tmp_path):
    headers = {"span_qa": ("question", "context"), "ranking": ("query", "text")}
    name, row, expected = UNLABELLED[task_type]
    small.write_rows(tmp_path / "a.csv", [row], headers.get(task_type, ("text",)))
    rows = read_examples(tmp_path / "a.csv", task_type, labelled=False)
    assert rows.x[name] == [expected] and (rows.y, rows.labels) == ([], ())
    with pytest.raises(UserError, match="text_colums: unknown option"):
        read_examples(tmp_path / "a.csv", task_type, labelled=False, text_colums=("a",))


@pytest.mark.parametrize("option", [{"text_column": "body"}, {"text_columns": ("body",)}])
def test_a_column_of_tagged_texts_has_the_same_names_without_labels(option, tmp_path):
    entity = {"start": 0, "end": 1, "type": "X"}
    (tmp_path / "a.jsonl").write_text(lines({"body": "a b", "entities": [entity]}))
    for labelled in (True, False):
        rows = read_examples(tmp_path / "a.jsonl", "tagging", labelled=labelled, **option)
        assert rows.x == {"text": ["a b"]}


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", ["label_colum", "text_column"])
def test_unknown_options_are_refused_in_one_line(name, labelled, complaints):
    message = f"^{name}: unknown option; expected fields of classification$"
    with pytest.raises(UserError, match=message):
        read_examples(complaints["train"], labelled=labelled, **{name: "body"})


@pytest.mark.slow
def test_runs_of_a_sweep_and_an_evaluation_open_their_files_once(
    huggingface_dir, complaints, tmp_path, opened, capsys
):
    settings = small.settings(huggingface_dir, complaints, tmp_path / "sweep", epochs=1)
    settings = dataclasses.replace(settings, seeds=("1", "2"))
    opened.clear()
    sweep(settings, data=settings.check())
    assert [opened[path] for path in (settings.train, *settings.dev)] == [1, 1]
    run = os.path.join(settings.output_dir, "seed-1")
    evaluation = evaluate.EvaluateSettings(run=run, data=settings.train)
    opened.clear()
    evaluate.main(evaluation, evaluation.check())
    assert opened[settings.train] == 1 and "accuracy" in capsys.readouterr().out


def test_rows_are_parsed_when_they_are_needed_and_kept(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\na,x\nb\nc,y\n"))
    parsed = []

    def read_one_by_one(file):
        assert isinstance(file, DataFile)
        for row in read_rows(file, ("text",)):
            parsed.append(row)
            yield row

    rows = FileRows(path, read_one_by_one)
    os.remove(path)
    assert not parsed and next(iter(rows)).texts == {"text": "a"} and len(parsed) == 1
    first, bad, last = rows
    assert list(rows) == [first, bad, last] == parsed
    assert isinstance(bad, BadRow) and bad.location == f"{path}:3" and str(rows) == str(path)


def test_rows_before_an_error_of_the_file_are_never_taken_for_all_rows(tmp_path):
    (tmp_path / "a.csv").write_text('text\na\n"b\n')
    rows = FileRows(tmp_path / "a.csv", lambda file: read_rows(file, ("text",)))
    for _ in range(2):
        with pytest.raises(UserError, match="a.csv"):
            list(rows)


def test_paths_that_no_run_can_record_are_refused(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")
    with open(path, "w") as file:
        file.write("text,label\na,x\n")
    with pytest.raises(UserError, match=r"caf\\udce9.csv': expected a path in UTF-8; rename"):
        next(read_rows(path, ("text",)))
    for name in ("init_from", "teacher"):
        paths = {"train": __file__, "init_from": "model", "output_dir": "run", name: path}
        with pytest.raises(UserError, match=f"--{name}: expected UTF-8"):
            FinetuneSettings(task="classification", **paths)
    with pytest.raises(UserError, match="--input: expected UTF-8"):
        WriteShardsSettings(input=(path,), vocab="vocab.txt", output_dir="shards")


def test_a_dev_file_with_the_training_rows_is_named_before_its_bad_rows(
    huggingface_dir, complaints, tmp_path
):
    copy = tmp_path / "copy.csv"
    complaints["train"].write_text("text,label\na\n")
    copy.write_bytes(complaints["train"].read_bytes())
    paths = {**complaints, "dev": copy}
    settings = small.settings(huggingface_dir, paths, tmp_path / "run")
    with pytest.raises(UserError, match=r"copy.csv: same content as --train="):
        settings.check()


def test_a_file_may_be_learned_with_and_without_its_labels(huggingface_dir, complaints, tmp_path):
    settings = small.settings(
        huggingface_dir,
        complaints,
        tmp_path / "run",
        unlabelled=(str(complaints["train"]),),
        teacher=str(huggingface_dir),
    )
    data = settings.read_data()
    (labelled, _), (unlabelled,) = (tuple(of.values()) for of in data)
    assert {row.label for row in labelled} == set(small.TEXTS)
    assert {row.label for row in unlabelled} == {None}
    assert [row.texts for row in labelled] == [row.texts for row in unlabelled]
