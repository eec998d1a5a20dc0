"""Members that every task type defines."""

import dataclasses

import pytest

from tasks.masked_lm import MaskedLm
from tasks.registry import TASK_TYPES, task_class
from tasks.regression import Regression
from tasks.task import Task

OF_TRAINED_TASKS = ("best_metric", "losses", "from_data", "targets", "metrics")


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_registered_task_types_define_all_members(kind):
    of_kind = task_class(kind)
    assert of_kind.kind == kind and not of_kind.__abstractmethods__
    for name in OF_TRAINED_TASKS:
        assert name in {
            key for owner in of_kind.__mro__[: -len(Task.__mro__)] for key in vars(owner)
        }


def test_a_task_without_an_abstract_member_cannot_be_created():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithoutMargin(Regression):
        margin = Task.margin

    with pytest.raises(TypeError, match="abstract method margin"):
        WithoutMargin(max_seq_length=8)


def test_a_pretrained_run_is_not_trained_as_a_task():
    task = MaskedLm(max_seq_length=8)
    with pytest.raises(NotImplementedError):
        task.best_metric  # noqa: B018
    assert task.tunable_fields == ()
