"""Files of other versions: new fields have their defaults, unknown ones are named in one line."""

import json
import pathlib
import re
import zipfile

import pytest

from bert_tf import UserError
from bert_tf.data.manifest import Manifest
from bert_tf.data.settings import WriteShardsSettings
from bert_tf.runs.run import Run
from bert_tf.storage import format_versions
from bert_tf.system import command
from bert_tf.weights import heads
from export.litert import archive
from tasks.base.task import task_from_dict
from tasks.graph.published import (
    EXPORT_OF_VERSION,
    TASK_OF_VERSION,
    published_device,
    published_task,
)
from tasks.prediction.outputs import OutputManifest
from tasks.types.classification.text_classifier import ClassificationTask
from tests.corpus import settings_of

TASK = ClassificationTask(labels=("a", "b"), max_seq_length=8)


def edit(path, **changes):
    path = pathlib.Path(path)
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: value for k, value in values.items() if value is not ...}))


@pytest.fixture
def run(tmp_path, config, vocabulary):
    run = Run.create(
        tmp_path / "run", config, vocabulary, {"settings": {"seed": 1}}, TASK.to_dict()
    )
    run.checkpoints.save(3, {"x": [1.0]})
    return run


@pytest.fixture
def written(run, tmp_path):
    """Return the files that carry a version, and what reads them."""
    settings = settings_of({"input": "x", "vocab": "vocab.txt"}, tmp_path / "shards")
    manifest = Manifest.planned(settings.output_dir, settings, run.vocabulary, {}, {})
    (tmp_path / "shards").mkdir()
    manifest.save({})
    output = {"settings": {}, "versions": {}, "model": [], "input": []}
    outputs = OutputManifest.planned(str(tmp_path / "outputs"), "predictions", "jsonl", 2, output)
    (tmp_path / "outputs").mkdir()
    outputs.save({})
    published = tmp_path / "version" / TASK_OF_VERSION
    published.parent.mkdir(parents=True)
    published.write_text((tmp_path / "run" / "task.json").read_text())
    return {
        tmp_path / "run" / "train.json": lambda: Run.open(run.path),
        tmp_path / "run" / "task.json": lambda: task_from_dict(Run.open(run.path).task),
        pathlib.Path(run.checkpoints.path(3)) / "checkpoint.json": lambda: run.checkpoints.info(3),
        tmp_path / "shards" / "manifest.json": lambda: Manifest.load(tmp_path / "shards"),
        tmp_path / "outputs" / "manifest.json": lambda: outputs.finished(),
        published: lambda: task_from_dict(published_task(str(tmp_path / "version"))),
    }


def test_every_file_carries_its_version_and_is_read_without(written):
    for path, read in written.items():
        assert json.loads(path.read_text())["format_version"] == format_versions.VERSION, path
        read()
        edit(path, format_version=...)
        read()
        edit(path, format_version=format_versions.VERSION + 1)
        read()


def test_a_litert_file_carries_its_version(tmp_path, config, vocabulary):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"\0\0\0\0" + archive.IDENTIFIER)
    archive.Contents(config, TASK.to_dict(), vocabulary).append_to(path)
    with zipfile.ZipFile(path) as contents:
        version = json.loads(contents.read("task.json"))["format_version"]
    assert version == format_versions.VERSION
    assert task_from_dict(archive.Contents.read(path).task) == TASK


def test_an_unknown_field_of_a_newer_version_is_named(written):
    for path, read in written.items():
        edit(path, format_version=99, invented=1)
        with pytest.raises(UserError, match="unknown field invented.*; .*update bert_tf") as raised:
            read()
        assert "\n" not in str(raised.value), path
        edit(path, format_version=0, invented=...)
        with pytest.raises(UserError, match='"format_version" is 0; expected an integer >= 1'):
            read()
        edit(path, format_version="9")
        with pytest.raises(UserError, match="\"format_version\" is '9'; expected an integer"):
            read()
        edit(path, format_version=1)


def test_a_run_keeps_no_version_among_its_values(run):
    run = Run.open(run.path)
    run.check_resumable({"seed": 1}, TASK.to_dict())
    assert "format_version" not in {*run.train, *run.task, *run.checkpoints.info(3)}
    run.checkpoints.set_tuned(3, {"values": {}, "metrics": {}})
    assert "format_version" not in run.checkpoints.info(3)


def test_a_task_of_an_earlier_version_has_the_defaults_of_newer_fields():
    values = TASK.to_dict()
    del values["focal_gamma"], values["truncation"]
    assert task_from_dict(values) == TASK
    with pytest.raises(UserError, match="task.json: no field max_seq_length; expected it of cl"):
        task_from_dict({name: values[name] for name in values if name != "max_seq_length"})
    with pytest.raises(UserError, match="task.json: unknown field newer; expected balanced_samp"):
        task_from_dict({**values, "newer": 1})


def test_a_flag_that_was_added_since_a_run_had_its_default(run):
    run = Run.open(run.path)
    defaults = {"layer_decay": 1.0}
    run.check_resumable({"seed": 1, "layer_decay": 1.0}, TASK.to_dict(), defaults)
    with pytest.raises(UserError, match="--layer_decay: was 1.0 when .* is now 0.9"):
        run.check_resumable({"seed": 1, "layer_decay": 0.9}, TASK.to_dict(), defaults)


def test_flags_of_other_versions_are_compared_by_their_defaults():
    defaults = command.defaults(WriteShardsSettings)
    assert defaults["num_shards"] == 64 and "vocab" not in defaults
    now = {"num_shards": 64, "seed": 3, "input": ("a",)}
    format_versions.check_same_settings("DIR", {"seed": 3, "input": ["a"]}, now, defaults)
    format_versions.check_same_settings(
        "DIR", {**now, "input": ["a"]}, {"seed": 3, "input": "a"}, {}, {"input", "num_shards"}
    )
    with pytest.raises(UserError, match="--num_shards: was 64 when DIR was created, is now 65"):
        format_versions.check_same_settings("DIR", {}, {"num_shards": 65}, defaults)
    with pytest.raises(UserError, match="--input: was a,b when DIR was created, is now a,c; pass"):
        format_versions.check_same_settings("DIR", {"input": ["a", "b"]}, {"input": ("a", "c")}, {})
    with pytest.raises(UserError, match="DIR: was created with --newer=2, which this version"):
        format_versions.check_same_settings("DIR", {"newer": 2}, {}, defaults)


def test_a_converted_task_of_an_earlier_version_is_restored():
    record = {**TASK.to_dict(), "thresholds": [0.3]}
    template = {"kind": "classification", **heads.TEMPLATES["classification"], **TASK.to_dict()}
    del record["focal_gamma"]
    values = heads.record_of(record)
    assert heads._recorded(values, template, 8, {}) == {**record, "focal_gamma": 0.0}
    with pytest.warns(UserWarning, match="recorded task, whose field newer is unknown"):
        values = heads.record_of({**record, "newer": 1})
        assert heads._recorded(values, template, 8, {}) == template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": ...}, 'task.json: no "kind"'),
        ({"kind": 5}, 'task.json: "kind" is 5; expected a string'),
        ({"max_seq_length": "8"}, "\"max_seq_length\" is '8'; expected an integer"),
        ({"file_format": []}, '"file_format" is []; expected a string'),
        ({"label_column": ["a"]}, "\"label_column\" is ['a']; expected a string"),
        ({"text_columns": 5}, '"text_columns" is 5; expected a list'),
        ({"text_columns": []}, '"text_columns" is []; expected names of columns'),
        ({"text_columns": [["a"]]}, "\"text_columns\" is [['a']]; expected names of columns"),
        ({"pair_columns": ["a"]}, "\"pair_columns\" is ['a']; expected names of columns"),
    ],
)
def test_a_damaged_task_is_reported_when_it_is_read(run, written, tmp_path, change, message):
    edit(run.file("task.json"), **change)
    edit(tmp_path / "version" / TASK_OF_VERSION, **change)
    for read in (lambda: Run.open(run.path), lambda: published_task(str(tmp_path / "version"))):
        with pytest.raises(UserError, match=re.escape(message)):
            read()


def test_a_damaged_record_of_an_export_is_reported(tmp_path):
    (tmp_path / EXPORT_OF_VERSION).parent.mkdir()
    (tmp_path / EXPORT_OF_VERSION).write_text("{}")
    with pytest.raises(UserError, match=r'export\.json: no "device"'):
        published_device(tmp_path)
