"""Members that every task type defines."""

import dataclasses

import pytest

from tasks.base.task import Task, task_class
from tasks.base.task_types import TASK_TYPES
from tasks.types.masked_lm import MaskedLmTask
from tasks.types.regression import RegressionTask

OF_TRAINED_TASKS = ("losses", "best_metric", "metrics", "encode_label")


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_registered_task_types_define_all_members(kind):
    of_kind = task_class(kind)
    assert of_kind.kind == kind and not of_kind.__abstractmethods__
    owners = of_kind.__mro__[: of_kind.__mro__.index(Task)]
    defined = {key for owner in owners for key in vars(owner)}
    assert {*OF_TRAINED_TASKS, "description", "outputs"} <= defined


def test_a_task_without_an_abstract_member_cannot_be_created():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithoutEncode(RegressionTask):
        encode = Task.encode

    with pytest.raises(TypeError, match="abstract method '?encode"):
        WithoutEncode(max_seq_length=8)


def test_a_pretrained_run_is_not_trained_as_a_task():
    task = MaskedLmTask(max_seq_length=8)
    assert task.best_metric == "loss"
    assert not task.tunable_fields
