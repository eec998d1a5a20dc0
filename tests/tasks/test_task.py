"""Members that every task type defines."""

import dataclasses

import pytest

from tasks.base.registry import task_class
from tasks.base.task import Postprocessor, Reader, Task
from tasks.base.task_types import TASK_TYPES
from tasks.types.masked_lm import MaskedLmTask
from tasks.types.regression import RegressionPostprocessor, RegressionTask

OF_TRAINED_TASKS = ("losses", "from_data", "targets")
OF_TRAINED_POSTPROCESSORS = ("best_metric", "metrics")


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_registered_task_types_define_all_members(kind):
    of_kind = task_class(kind)
    assert of_kind.kind == kind and not of_kind.__abstractmethods__
    task = of_kind.__new__(of_kind)  # Fields are not needed.
    for part, names in (
        (of_kind, OF_TRAINED_TASKS),
        (type(task.postprocessor), OF_TRAINED_POSTPROCESSORS),
        (type(task.reader), ("encode_label",)),
    ):
        base = next(owner for owner in part.__mro__ if owner in (Task, Postprocessor, Reader))
        owners = part.__mro__[: part.__mro__.index(base)]
        assert set(names) <= {key for owner in owners for key in vars(owner)}


def test_a_part_without_an_abstract_member_cannot_be_created():
    class WithoutMargin(RegressionPostprocessor):
        margin = Postprocessor.margin

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithoutEncode(RegressionTask):
        encode = Task.encode

    task = RegressionTask(max_seq_length=8)
    with pytest.raises(TypeError, match="abstract method '?margin"):
        WithoutMargin(task)
    with pytest.raises(TypeError, match="abstract method '?encode"):
        WithoutEncode(max_seq_length=8)


def test_a_pretrained_run_is_not_trained_as_a_task():
    task = MaskedLmTask(max_seq_length=8)
    with pytest.raises(NotImplementedError):
        task.postprocessor.best_metric  # noqa: B018
    assert task.tunable_fields == ()
