"""Base class of the postprocessors: from the outputs of a model to predictions and metrics.

Shape suffixes: N examples.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf

    from tasks.base.plots import Plot
    from tasks.base.task import Task
    from tasks.data.examples import Arrays, EncodedExamples, Examples, Tensors
    from tasks.data.windows import Windows

TaskT = TypeVar("TaskT", bound="Task")


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """Description of a served output, and its comparison between two precisions.

    Attributes:
        description: What it is, for people.
        compared: In a lower precision, near ties may change the order of candidates: the part of a
            row that still has to be equal: "all", the "first" entry, or "none".
        in_near_ties: Whether it still has to be equal where the prediction is a near tie.
        is_log_odds: Whether it is an unbounded difference of logits. Where it is large, a
            difference hardly changes the probability, so a lower precision is compared by that.
        is_vector: Whether its tolerance is relative, for values of any size.
    """

    description: str
    compared: Literal["all", "first", "none"] = "all"
    in_near_ties: bool = False
    is_log_odds: bool = False
    is_vector: bool = False


@dataclasses.dataclass(frozen=True)
class SignatureSpec:
    """Description of a served signature.

    Attributes:
        description: What it returns, for people.
        inputs: Description by the name of the input.
        outputs: Specification by the name of the output, in reading order.
        has_margin: Whether its predictions have near ties, which `Pipeline.margin` measures.
        splits_texts: Whether it splits long texts into windows.
    """

    description: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, OutputSpec]
    has_margin: bool = False
    splits_texts: bool = False


class Postprocessor(abc.ABC, Generic[TaskT]):
    """Base class of the postprocessors of the task types.

    Args:
        task: The task, with labels and tuned values.
    """

    description: ClassVar[str]  # What the task predicts, for people.
    # Of all outputs that `predictions` may return, in reading order.
    outputs: ClassVar[Mapping[str, OutputSpec]]

    def __init__(self, task: TaskT) -> None:
        self.task = task

    @abc.abstractmethod
    def predictions(
        self, texts: Tensors, windows: Windows, outputs: Tensors
    ) -> dict[str, tf.Tensor]:
        """Return what is served, `(N, ...)` by name, in the graph."""

    @abc.abstractmethod
    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the probability by which each prediction leads the second best one, `(N,)`."""

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove the padding that a batch adds from one prediction, `{name: JSON value}`."""
        return row

    # Evaluation, of tasks with labels.

    @property
    def best_metric(self) -> str:
        """Name of the metric that selects the best checkpoint."""
        raise NotImplementedError

    def metric_inputs(self, outputs: Arrays) -> Arrays:
        """Reduce the outputs of a batch to the arrays that `metrics` needs.

        They are kept for all batches of an evaluation, so they should be small.
        """
        return outputs

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the metrics of all examples of a dataset, by name."""
        raise NotImplementedError

    def report(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Any]:
        """Return tables that an evaluation reports in addition to metrics, as lists by name."""
        return {}

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return the plots of an evaluation, by file name without suffix."""
        return {}

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a one-line warning about how to read these metrics, or `None`."""
        return None

    # Tuning.

    def check_dev(self, examples: Examples) -> list[str]:
        """Check the labels of the first dev file before anything is tokenized.

        Returns:
            One warning per tunable field that these labels cannot tune well.

        Raises:
            UserError: If they cannot tune a field at all.
        """
        return []

    def tune(self, data: EncodedExamples, outputs: Arrays) -> TaskT:
        """Return the task with its tunable fields fitted to dev data."""
        return self.task

    def tuning_warnings(self, data: EncodedExamples, outputs: Arrays) -> list[str]:
        """Return one warning per tunable field that this dev data cannot tune."""
        return []
