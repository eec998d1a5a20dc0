"""Creation of the task of a `TaskModel` from the options of `from_pretrained`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bert_tf.errors import UserError
from bert_tf.system.scalars import to_python
from tasks.finetuning.settings import task_defaults

if TYPE_CHECKING:
    from bert_tf.weights.sources import PretrainedWeights
    from tasks.base.task import Task
    from tasks.model.task_model import TaskModel

COMMON_OPTIONS = (
    "max_seq_length",
    "seed",
    "dtype",
    "do_lower_case",
    "frozen_layers",
    "keep_head",
)


def check_options(model_class: type[TaskModel], options: Mapping[str, Any]) -> None:
    """Raise UserError at the first option that a model class does not have."""
    for name in options:
        if name not in model_class.options:
            raise UserError(
                f"{name}: unknown option of {model_class.__name__}; expected one of "
                f"{', '.join((*model_class.options, *COMMON_OPTIONS))}"
            )


def create_task(
    model_class: type[TaskModel],
    pretrained: PretrainedWeights,
    max_seq_length: int | None,
    options: Mapping[str, Any],
) -> Task:
    """Create the task of a model class for pretrained weights.

    Args:
        model_class: Defines the task and its default length.
        pretrained: The weights, whose positions limit the length.
        max_seq_length: Maximum tokens per sequence; `None` for the default.
        options: Options of the task.

    Raises:
        UserError: If the length or an option is wrong.
    """
    max_seq_length, options = to_python(max_seq_length), to_python(dict(options))
    limit = pretrained.config.max_position_embeddings
    if max_seq_length is None:
        of_task = task_defaults(model_class.task_class.kind)["max_seq_length"]
        max_seq_length = min(model_class.max_seq_length_default or of_task, limit)
    if type(max_seq_length) is not int or not 4 <= max_seq_length <= limit:
        raise UserError(
            f"max_seq_length={max_seq_length!r:.80}: expected 4 to {limit}, the number of "
            f"positions of {pretrained.origin}"
        )
    return model_class.task_class.from_options(max_seq_length=max_seq_length, **options)


def warn_of_other_head(pretrained: PretrainedWeights, task: Task) -> None:
    """Warn if a task gets a new head although the weights have one, of another task or labels."""
    if pretrained.task is None:
        return
    try:
        pretrained.head_for(task.to_dict(), keep=True)
    except UserError as error:
        warnings.warn(
            f"{error}; the model has a new head, which is random before training (keep_head=False "
            "omits this warning)",
            stacklevel=3,
        )


def warn_if_untrained(model: TaskModel) -> None:
    """Warn before the predictions of a new head, which are random."""
    if model.has_new_head:
        warnings.warn(
            f"{type(model).__name__}: predictions of an untrained head are random; call fit or "
            "train, or load weights with a head",
            stacklevel=3,
        )
