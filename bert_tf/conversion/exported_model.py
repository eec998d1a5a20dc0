"""A model as the formats of other libraries hold it: encoder, heads, labels, and what is lost.

Shape suffixes: H hidden size, C outputs of the head.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.weights import heads, name_map
from bert_tf.weights.sources import PretrainedWeights

# Fields of task.json that change predictions, with the values of what other libraries do.
_PREDICTION_FIELDS = {
    "max_seq_length": None,
    "doc_stride": None,
    "max_query_length": None,
    "max_answer_length": None,
    "may_be_impossible": False,
    "text_columns": ["text"],
    "temperature": None,
    "thresholds": None,
    "threshold": None,
    "null_threshold": None,
    "rare_label": None,
    "unescape_html": False,
    "truncation": "head",
    "layers": "last",
    "pooling": None,
}


@dataclasses.dataclass(frozen=True)
class Head:
    """The dense layer of a fine-tuned model.

    Attributes:
        kind: "classification", "regression", "tagging", "span_qa" or "multiple_choice".
        kernel: float32 `(H, C)`.
        bias: float32 `(C,)`.
        labels: Names of the C outputs, or ().
        multi_label: Whether each label of a classification has a sigmoid of its own.
    """

    kind: str
    kernel: np.ndarray
    bias: np.ndarray
    labels: tuple[str, ...] = ()
    multi_label: bool = False

    @property
    def part(self) -> str:
        """Return the component of the name table."""
        return "span_classifier" if self.kind == "span_qa" else "classifier"

    def config_values(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the outputs."""
        values: dict[str, Any] = {}
        if self.kind in ("classification", "tagging"):
            values["id2label"] = {str(number): name for number, name in enumerate(self.labels)}
            values["label2id"] = {name: number for number, name in enumerate(self.labels)}
        if self.kind == "classification":
            values["problem_type"] = (
                "multi_label_classification" if self.multi_label else "single_label_classification"
            )
        if self.kind == "regression":
            # Without id2label, transformers would take two outputs.
            values |= {
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
                "problem_type": "regression",
            }
        return values


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """Weights to write in another format.

    Attributes:
        pretrained: Encoder, vocabulary and pretraining heads.
        head: The head of a fine-tuned model, or `None`.
        task: The task as in task.json, with tuned values, or `None`. Without `head` no other format
            has its type.
    """

    pretrained: PretrainedWeights
    head: Head | None = None
    task: dict[str, Any] | None = None

    @property
    def max_seq_length(self) -> int | None:
        """Tokens per text of a fine-tuned model."""
        return self.task["max_seq_length"] if self.head and self.task else None

    @property
    def dropped(self) -> list[str]:
        """Fields of the task that a format without a place for it drops, such as "threshold=2"."""
        task = self.task or {}
        detector = ["the anomaly detector"] if task.get("kind") == "anomaly" else []
        return detector + [
            f"{name}={task[name]}"
            for name, usual in _PREDICTION_FIELDS.items()
            if task.get(name, usual) != usual and task[name] is not None
        ]

    def config_values(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the head and its task."""
        if self.head is None or self.task is None:
            return {}
        return {**self.head.config_values(), **heads.record_of(self.task)}

    @property
    def pretraining_heads(self) -> tuple[str, ...]:
        """Return the pretraining heads to write; a fine-tuned model has none."""
        if self.head is not None:
            return ()
        return tuple(part for part in self.pretrained.heads if part in name_map.HEADS)

    def tensors(self, column: str, parts: Iterable[str]) -> dict[str, np.ndarray]:
        """Return tensors by the names and in the orientation of a format.

        Args:
            column: Field of `name_map.Names` with the names of the format.
            parts: Components to include.

        Raises:
            UserError: A weight is missing or of the wrong shape, or has no name in the format.
        """
        weights = self.pretrained.weights
        if self.head is not None:
            weights = {**weights, heads.KERNEL: self.head.kernel, heads.BIAS: self.head.bias}
        return name_map.export_tensors(self.pretrained.config, column, weights, parts)


def from_pretrained(pretrained: PretrainedWeights, path: str | os.PathLike[str]) -> ExportedModel:
    """Return weights as a model to write.

    Args:
        pretrained: The weights, with the head of a fine-tuned model.
        path: The source, which may be a run with another task.
    """
    task = pretrained.task
    if task is None:
        return ExportedModel(pretrained, None, Run.open(path).task if Run.exists(path) else None)
    return ExportedModel(pretrained, _head(task, pretrained.weights), task)


def _head(task, weights):
    """Return the head of a task, with two logits for two labels."""
    kernel, bias = weights[heads.KERNEL], weights[heads.BIAS]
    labels, multi_label = tuple(task.get("labels", ())), bool(task.get("multi_label"))
    if task["kind"] == "classification" and not multi_label and len(labels) == 2:
        # softmax([-x/2, x/2])[1] equals sigmoid(x), and x/2 - -x/2 is x without rounding.
        kernel = np.concatenate([-kernel / 2, kernel / 2], axis=1)
        bias = np.concatenate([-bias / 2, bias / 2])
    return Head(task["kind"], kernel, bias, labels, multi_label)


def check_fixed_values(pretrained: PretrainedWeights, library: str, **required: Any) -> None:
    """Check values of the configuration that another library cannot change.

    Args:
        pretrained: The model.
        library: Name of the library, for the error message.
        **required: Its fixed values by field of `BertConfig`.

    Raises:
        UserError: A value differs. The message names it.
    """
    for name, value in required.items():
        actual = getattr(pretrained.config, name)
        if actual != value:
            raise UserError(
                f"{pretrained.source}: {name} is {actual!r}, but {library} has {value!r} only; "
                "expected another --format, such as huggingface"
            )


def write_vocabulary(model: ExportedModel, path: pathlib.Path) -> None:
    """Write the vocabulary to a file whose directory may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.pretrained.vocabulary.to_bytes())
