"""Errors visible in flags and files, which every command reports before importing TensorFlow."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.conftest import COMMANDS, ROOT

# Runs commands in one process in which importing TensorFlow fails, and prints each outcome.
DRIVER = """
import contextlib, io, json, runpy, sys
results = []
for module, *arguments in json.load(sys.stdin):
    sys.argv, err = [module, *arguments], io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(module, run_name="__main__")
            status = "returned"
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            status = repr(error)
    results.append([status, err.getvalue()])
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory, config, vocabulary):
    """Write weights, rows, a run with two checkpoints, and damaged variants of the other inputs."""
    directory = tmp_path_factory.mktemp("early")
    small.write_huggingface(directory / "weights", config, vocabulary)
    small.write_complaints(directory)
    (directory / "copy.csv").write_bytes((directory / "train.csv").read_bytes())
    small.write_rows(directory / "other.csv", [("a", "b")], ("words", "label"))
    (directory / "late.csv").write_text("text,label\na,x\nb,y\nc\n")
    (directory / "bad.jsonl").write_text('{"txt": 1}\n{\n')
    (directory / "late.jsonl").write_text('{"txt": 1}\n{"text": "a"}\n')
    (directory / "taken").mkdir()
    (directory / "taken" / "file").write_text("")
    (directory / "no_model").mkdir()
    shutil.copytree(directory / "weights", directory / "broken")
    (directory / "broken" / "vocab.txt").unlink()
    task = ClassificationTask(labels=("x", "y"), max_seq_length=8)
    settings = small.settings(
        directory / "weights",
        {"train": directory / "train.csv", "dev": directory / "dev.csv"},
        directory / "run",
    )
    train = {"settings": settings.recorded(), "data": {}}
    run = Run.create(directory / "run", config, vocabulary, train, task.to_dict())
    run.checkpoints.save(3, model_variables(task.build_model(config)))
    for name, text in (("config.json", '{"vocab_size": '), ("vocab.txt", "the\n")):
        broken = directory / f"broken_{name}"
        Run.create(broken, config, vocabulary, {}).checkpoints.save(0, {"a": 1.0})
        (broken / name).write_text(text)
    (directory / "published" / "1" / "assets.extra").mkdir(parents=True)
    (directory / "published" / "1" / "saved_model.pb").write_bytes(b"")
    shutil.copy(run.file("task.json"), directory / "published" / "1" / "assets.extra")
    np.save(directory / "v.npy", np.zeros((9, 12), np.float32))
    (directory / "shards").mkdir()
    (directory / "shards" / "manifest.json").write_text('{"settings"')
    return directory


FINETUNE = {
    "task": "classification",
    "train": "{}/train.csv",
    "dev": "{}/dev.csv",
    "init_from": "{}/weights",
    "output_dir": "{}/new",
    "max_seq_length": 12,
}
LIKE_RUN = {
    "output_dir": "{}/run",
    "global_batch_size": 8,
    "epochs": 2,
    "learning_rate": 0.01,
}
PREDICT = {"run": "{}/run", "input": "{}/dev.csv", "output": "{}/answers.jsonl"}
EXTRACT = {"model": "{}/weights", "input": "{}/dev.csv", "output": "{}/vectors.npy"}
SHARDS = {"run": "{}/run", "input": "{}/dev.csv", "output_dir": "{}/shards_of_rows"}
VECTORS = {"model": "{}/weights", "input": "{}/dev.csv", "output_dir": "{}/shards_of_rows"}
SEARCH = {"model": "{}/weights", "input": "{}/dev.csv", "vectors": "{}/v.npy", "query": "a"}
MINE = {
    "run": "{}/weights",
    "pairs": "{}/dev.csv",
    "corpus": "{}/train.csv",
    "output": "{}/mined.jsonl",
}
ATTENTION = {"run": "{}/weights", "text": "a", "output": "{}/x.png"}
PRETRAIN = {"shards": "{}/shards", "model_size": "tiny", "output_dir": "{}/new"}
CASES = [
    ("tasks.finetune", {**FINETUNE, "dev": "{}/train.csv"}, "same content as --train="),
    ("tasks.finetune", {**FINETUNE, "dev": "{}/dev.csv,{}/copy.csv"}, "--dev=", "copy.csv: same"),
    ("tasks.finetune", {**FINETUNE, "text_column": "body"}, "no column 'body'; the columns are"),
    ("tasks.finetune", {**FINETUNE, "dev": "{}/other.csv"}, "other.csv:2: no column 'text'"),
    ("tasks.finetune", {**FINETUNE, "train": "{}/late.csv"}, "late.csv:4: expected 2 fields"),
    ("tasks.finetune", {**FINETUNE, "train": "{}/weights/config.json"}, "a file that ends in"),
    ("tasks.finetune", {**FINETUNE, "task": "cola"}, "a file that ends in .tsv"),
    ("tasks.finetune", {**FINETUNE, "task": "squad"}, "train.csv:2: no column 'question'"),
    ("tasks.finetune", {**FINETUNE, "task": "tagging"}, "tags in a column file or in .jsonl"),
    ("tasks.finetune", {**FINETUNE, "task": "swag"}, "train.csv:2: no column 'sent1'"),
    ("tasks.finetune", {**FINETUNE, "init_from": "{}/no_model"}, "no model found"),
    ("tasks.finetune", {**FINETUNE, "init_from": "{}/absent"}, "absent: no such directory"),
    ("tasks.finetune", {**FINETUNE, "init_from": "{}/broken"}, "vocab.txt: no such file"),
    ("tasks.finetune", {**FINETUNE, "max_seq_length": 17}, "at most 16, the"),
    ("tasks.finetune", {**FINETUNE, "max_seq_length": 8, "frozen_layers": 3}, "at most 2, the"),
    ("tasks.finetune", {**FINETUNE, "init_from": "{}/broken_config.json"}, "not JSON"),
    ("tasks.finetune", {**FINETUNE, "output_dir": "{}/taken"}, "contains other files"),
    ("tasks.finetune", {**FINETUNE, **LIKE_RUN, "seed": 1}, "--seed: was 0 when"),
    ("tasks.finetune", {**FINETUNE, **LIKE_RUN, "task": "regression"}, "run of task 'classificati"),
    ("tasks.finetune", {**FINETUNE, **LIKE_RUN, "seeds": "1,2"}, "contains a single run"),
    ("tasks.finetune", {**FINETUNE, "devices": 8}, "--devices: requires --dry_run"),
    (
        "tasks.finetune",
        {**FINETUNE, "dry_run": "true", "strategy": "multi_worker", "output_dir": "{}/taken"},
        "contains other files",
    ),
    ("bert_tf.plan", {**FINETUNE, "train": "{}/late.csv"}, "late.csv:4: expected 2 fields"),
    ("bert_tf.plan", {**FINETUNE, "devices": 3}, "--devices=3: expected 1 with --strategy=none"),
    ("bert_tf.pretrain", {**PRETRAIN, "device": "t4"}, "--device: requires --dry_run"),
    ("tasks.evaluate", {"run": "{}/run", "data": "{}/other.csv"}, "other.csv:2: no column 'text'"),
    ("tasks.evaluate", {"run": "{}/taken", "data": "{}/dev.csv"}, "no model found"),
    ("tasks.evaluate", {"run": "{}/broken_vocab.txt", "data": "{}/dev.csv"}, "vocab.txt:"),
    ("tasks.evaluate", {"run": "{}/run", "data": "{}/taken"}, "corpus.jsonl: no such file"),
    ("tasks.mine_negatives", MINE, "dev.csv:2: no column 'anchor'"),
    ("tasks.mine_negatives", {**MINE, "output": "{}/mined.csv"}, "expected a .jsonl file"),
    ("tasks.predict", {**PREDICT, "run": "{}/absent"}, "absent: no such directory"),
    ("tasks.predict", {**PREDICT, "checkpoint": "step-3"}, "expected one of step-00000003"),
    ("tasks.predict", {**PREDICT, "input": "{}/other.csv"}, "other.csv:2: no column 'text'"),
    ("tasks.predict", {**PREDICT, "input": "{}/bad.jsonl"}, "'txt'; none of 2 rows can be read"),
    ("tasks.predict", {**SHARDS, "input": "{}/bad.jsonl"}, "'txt'; none of 2 rows can be read"),
    ("tasks.extract", {**VECTORS, "input": "{}/bad.jsonl"}, "'txt'; none of 2 rows can be read"),
    ("tasks.predict", {**PREDICT, "output": "{}/a.tsv"}, ".tsv is a GLUE submission"),
    ("tasks.predict", {**PREDICT, "output": "{}/a.parquet"}, "a.parquet: expected a .jsonl file"),
    ("tasks.predict", {**PREDICT, "output": "{}/a.jsonl.gz"}, "jsonl.gz: expected a .jsonl file"),
    ("tasks.predict", {**SHARDS, "input": "{}/other*.csv"}, "other.csv:2: no column 'text'"),
    ("tasks.predict", {**SHARDS, "input": "{}/absent*.csv"}, "absent*.csv: no such file"),
    ("tasks.predict", {**SHARDS, "output": "{}/out.jsonl"}, "expected --output or --output_dir"),
    ("tasks.predict", {**SHARDS, "runner": "dask"}, "--runner=dask: value should be one of"),
    ("tasks.predict", {**PREDICT, "num_workers": 2}, "--num_workers: requires --output_dir"),
    ("tasks.predict", {**SHARDS, "run": "{}/published", "checkpoint": "best"}, "expected a run"),
    ("tasks.extract", {**VECTORS, "text_column": "body"}, "no column 'body'"),
    ("tasks.extract", {**VECTORS, "num_shards": 0}, "--num_shards=0: expected an integer"),
    ("tasks.extract", {**EXTRACT, "text_column": "body"}, "no column 'body'"),
    ("tasks.extract", {**EXTRACT, "input": "{}/late.csv"}, "late.csv:4: expected 2 fields"),
    ("tasks.extract", {**EXTRACT, "model": "{}/no_model"}, "no model found"),
    ("tasks.search", {**SEARCH, "text_column": "body"}, "no column 'body'"),
    ("tasks.search", {**SEARCH, "model": "{}/no_model"}, "no model found"),
    ("bert_tf.plan", {"model_size": "base", "tokens": 1, "max_seq_length": 513}, "at most 512"),
    ("bert_tf.fill_mask", {"model": "{}/no_model", "text": "a [MASK]"}, "no model found"),
    ("bert_tf.plot_attention", {**ATTENTION, "run": "{}/no_model"}, "no model found"),
    ("bert_tf.plot_attention", {**ATTENTION, "head": "7"}, "--head=7: expected an integer in"),
    ("export.export_saved_model", {"run": "{}/taken", "output_dir": "{}/m"}, "no model found"),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m [x]"},
        "expected a path without * ? [ and \\",
    ),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m", "precision": "int8", "portable": "true"},
        "--precision=int8: has no standard operations",
    ),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m", "dev": "{}/absent"},
        "expected with --precision=int8 only",
    ),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m", "max_metric_drop": 0.1},
        "--max_metric_drop=0.1: expected with --precision=int8 only",
    ),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m", "precision": "int8", "dev": "{}/absent"},
        "no such file",
    ),
    (
        "export.export_saved_model",
        {"run": "{}/run", "output_dir": "{}/m", "checkpoint": "step-00000004"},
        "--checkpoint=step-00000004: no complete checkpoint",
    ),
    ("export.export_litert", {"run": "{}/taken", "output": "{}/m.tflite"}, "no model found"),
    ("export.export_litert", {"run": "{}/run", "output": "{}/v.npy"}, "already exists"),
    ("export.request", {"litert": "{}/v.npy", "input": "text=a"}, "not a LiteRT model"),
    ("export.request", {"model_dir": "{}/absent", "input": "text=a"}, "no such directory"),
    ("bert_tf.convert", {"from": "{}/no_model", "to": "{}/new"}, "no model found"),
    ("bert_tf.pretrain", {**PRETRAIN, "shards": "{}/absent"}, "expected a directory written by"),
    ("bert_tf.pretrain", PRETRAIN, "manifest.json: "),
    ("bert_tf.pretrain", {**PRETRAIN, "shards": ""}, "--shards is required"),
    (
        "bert_tf.pretrain",
        {"shards": "{}/shards", "config": "", "output_dir": "{}/new"},
        "expected exactly one of them",
    ),
    ("bert_tf.inspect_shards", {"shards": "{}/shards"}, "manifest.json: "),
    (
        "bert_tf.inspect_shards",
        {"shards": "{}/shards", "vocab": "{}/broken_vocab.txt/vocab.txt"},
        "1 entries without [PAD]",
    ),
    (
        "bert_tf.write_shards",
        {"input": "{}/*.nothing", "vocab": "{}/weights/vocab.txt", "output_dir": "{}/new"},
        "nothing",
    ),
    ("bert_tf.learn_vocab", {"input": "{}/*.nothing", "output": "{}/v.txt"}, "nothing"),
]


def command_line(directory, module, flags):
    return [
        module,
        *(f"--{name}={str(flags[name]).replace('{}', str(directory))}" for name in flags),
    ]


def came_to(directory, command_lines):
    """Return [(status, stderr)] of commands, none of which may import TensorFlow."""
    (directory / "poison").mkdir(exist_ok=True)
    (directory / "poison" / "tensorflow.py").write_text("raise ImportError('it is not time yet')\n")
    path = os.pathsep.join([str(directory / "poison"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(command_lines),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_errors_that_need_no_tensorflow_are_reported_before_its_import(directory):
    before = sorted(directory.rglob("*"))
    results = came_to(directory, [command_line(directory, *case[:2]) for case in CASES])
    for (module, flags, *messages), (status, said) in zip(CASES, results, strict=True):
        assert status == 2, (module, flags, status, said)
        assert said.count("\n") == 1 and "Traceback" not in said
        for message in messages:
            assert message in said, (module, flags, said)
    assert {case[0] for case in CASES} == set(COMMANDS)
    left = {path for path in directory.rglob("*") if "poison" not in path.parts} - set(before)
    assert not left


def test_valid_flags_and_files_lead_to_the_import_of_tensorflow(directory):
    """Run the same flags and files without their errors as a control."""
    right = [
        ("tasks.finetune", FINETUNE),
        ("tasks.finetune", {**FINETUNE, **LIKE_RUN}),
        ("tasks.finetune", {**FINETUNE, "seeds": "1,2"}),
        ("tasks.evaluate", {"run": "{}/run", "data": "{}/dev.csv"}),
        ("tasks.predict", PREDICT),
        ("tasks.predict", {**PREDICT, "input": "{}/late.jsonl"}),
        ("tasks.extract", EXTRACT),
        ("tasks.mine_negatives", {**MINE, "anchor_column": "text", "positive_column": "label"}),
        ("export.export_saved_model", {"run": "{}/run", "output_dir": "{}/m"}),
        ("export.export_litert", {"run": "{}/run", "output": "{}/m.tflite"}),
        ("bert_tf.convert", {"from": "{}/run", "to": "{}/new"}),
    ]
    for status, said in came_to(directory, [command_line(directory, *case) for case in right]):
        assert "it is not time yet" in str(status), (status, said)
    assert not pathlib.Path(directory / "new").exists()
