"""Flags of tasks.finetune: their task types, defaults and help."""

import dataclasses

import pytest

from bert_tf.errors import UserError
from bert_tf.system import command
from tasks.base.task import task_class
from tasks.base.task_types import TASK_TYPES
from tasks.finetuning.settings import FinetuneSettings
from tasks.types.question_answering import QuestionAnsweringTask

FLAGS = {field.name: field for field in dataclasses.fields(FinetuneSettings)}
OPTIONS = {name: field for name, field in FLAGS.items() if "tasks" in field.metadata}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train.csv"
    path.touch()
    return str(path)


def settings(path, **values):
    return FinetuneSettings(
        **{"task": "classification", "train": path, "init_from": "x", "output_dir": "y", **values}
    )


def test_flags_name_only_registered_task_types():
    for field in FLAGS.values():
        assert set(field.metadata.get("tasks", ())) <= set(TASK_TYPES), field.name
        assert set(field.metadata.get("defaults", TASK_TYPES)) == set(TASK_TYPES), field.name


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_options_are_fields_of_their_task_with_the_same_default(kind):
    fields = {field.name: field for field in dataclasses.fields(task_class(kind))}
    for name, option in OPTIONS.items():
        if kind not in option.metadata["tasks"]:
            assert name not in fields, name
        elif name not in ("text_column", "text_b_column"):  # They become `text_columns`.
            # Without a default, `from_data` derives the value.
            default = fields[name].default
            if option.default is not None and default is not dataclasses.MISSING:
                assert default == option.default, name


def test_the_defaults_in_the_help_are_those_of_the_task_types():
    shown = command._help(FinetuneSettings, "")
    for name, text in (
        ("max_seq_length", "(default 128; span_qa 384; ranking 256)"),
        ("global_batch_size", "(default 32; ranking 8; anomaly 128; similarity 64)"),
        ("epochs", "(default 3; anomaly 20; similarity 1)"),
        ("learning_rate", "(default 5e-5; ranking 2e-5; anomaly 0.003)"),
        ("doc_stride", f"(span_qa: default {QuestionAnsweringTask.doc_stride})"),
    ):
        (line,) = (line for line in shown.splitlines() if line.startswith(f"  --{name}  "))
        assert line.endswith(text)


def test_defaults_depend_on_the_task_type(path):
    for task, expected in (
        ("sst2", (128, 32, 3, 5e-5)),
        ("squad", (384, 32, 3, 5e-5)),
        ("anomaly", (128, 128, 20, 3e-3)),
    ):
        of_task = settings(path, task=task, dev=(path,))
        names = ("max_seq_length", "global_batch_size", "epochs", "learning_rate")
        assert tuple(getattr(of_task, name) for name in names) == expected
    assert settings(path, epochs=7).epochs == 7


def test_given_options_are_passed_to_their_task_type_and_rejected_by_others(path):
    of_squad = settings(path, task="squad", doc_stride=5, max_answer_length=30)
    expected = {"max_seq_length": 384, "may_be_impossible": False, "doc_stride": 5}
    assert of_squad.task_options() == ("span_qa", expected)
    assert of_squad.recorded()["max_answer_length"] == 30
    with pytest.raises(UserError, match="--doc_stride: not supported by --task=sst2"):
        settings(path, task="sst2", doc_stride=5)
