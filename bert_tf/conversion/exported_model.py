"""A model as the formats of other libraries hold it: encoder, heads, labels, and what is lost."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.weights import heads, name_map, sentence_transformers
from bert_tf.weights.sources import PretrainedWeights

# What a writer returns: tensors of encoder and heads by name, as read back, and descriptions of
# what the format does not hold.
Written = tuple[dict[str, np.ndarray], list[str]]
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
    "truncation": "head",
    "layers": "last",
    "pooling": "pooled",
    "scheme": "bio",
    "dense_units": [],
    "normalize": False,
    "default_prompt": None,
    "similarity": "cosine",
    "activation": "identity",
}


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """Weights to write in another format."""

    # The weights; a head of two labels has two logits. Its `task` is that of the head, or
    # `None`.
    pretrained: PretrainedWeights
    # The task as in task.json, with tuned values, or `None`. Without a head no other format
    # has its type.
    task: dict[str, Any] | None

    @property
    def kind(self) -> str | None:
        """The task type of the head, or `None`."""
        return self.pretrained.task["kind"] if self.pretrained.task else None

    @property
    def heads(self) -> tuple[str, ...]:
        """Components beside the encoder: the head of a task, or those of pretraining."""
        if self.kind:
            return ("span_classifier" if self.kind == "span_qa" else "classifier",)
        return tuple(part for part in self.pretrained.heads if part in name_map.HEADS)

    @property
    def dropped(self) -> list[str]:
        """Fields of the task that a format without a place for it drops, such as "threshold=2".

        Also its head, if no other format has the task type.
        """
        task = self.task or {}
        is_alone = not self.kind and self.pretrained.embedder is None
        head = [f"the {heads.name_of(task['kind'])}"] if task and is_alone else []
        return head + [
            f"{name}={task[name]}"
            for name, usual in _PREDICTION_FIELDS.items()
            if task.get(name, usual) != usual and task[name] is not None
        ]

    def config_values(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the head, its outputs and its task."""
        task = self.pretrained.task
        if task is None:
            return {}
        values: dict[str, Any] = {}
        labels = task.get("labels", ())
        if self.kind == "classification":
            several = "multi" if task.get("multi_label") else "single"
            values["problem_type"] = f"{several}_label_classification"
        elif self.kind in ("regression", "ranking"):
            values["problem_type"] = "regression"
            labels = ["LABEL_0"]  # Without id2label, transformers would take two outputs.
        if labels:
            values["id2label"] = {str(number): name for number, name in enumerate(labels)}
            values["label2id"] = {name: number for number, name in enumerate(labels)}
        return {**values, **heads.record_of(task, self.pretrained.weights)}

    def tensors(self, column: str, parts: Iterable[str]) -> dict[str, np.ndarray]:
        """Return components by the names and in the orientation of a column of `name_map.Names`."""
        return name_map.export_tensors(
            self.pretrained.config, column, self.pretrained.weights, parts
        )


def from_pretrained(pretrained: PretrainedWeights, path: str | os.PathLike[str]) -> ExportedModel:
    """Return weights as a model to write; their source `path` may be a run with another task."""
    task = pretrained.task
    if pretrained.embedder is not None:
        fields = ("kind", "max_seq_length", "text_columns", *sentence_transformers.FIELDS)
        embedder = {name: pretrained.embedder.get(name) for name in fields}
        return ExportedModel(pretrained, embedder)
    if task is None:
        if Run.exists(path):
            run = Run.open(path)
            task = run.tuned_task(run.checkpoints.best_or_latest_step())
        return ExportedModel(pretrained, task)
    if task["kind"] not in heads.CLASSES:  # A task type of the user's.
        return ExportedModel(dataclasses.replace(pretrained, task=None), task)
    if task.get("pooling", "pooled") != "pooled":
        raise UserError(
            f"{pretrained.source}: no other format has a classifier of the mean of the tokens; "
            "export it (bert-tf export_saved_model), or train it with --pooling=pooled"
        )
    if heads.is_binary(task):
        # softmax([-x/2, x/2])[1] equals sigmoid(x), and x/2 - -x/2 is x without rounding.
        head = {
            name: np.concatenate([-array / 2, array / 2], axis=-1)
            for name, array in pretrained.weights.items()
            if name in (heads.KERNEL, heads.BIAS)
        }
        pretrained = dataclasses.replace(pretrained, weights={**pretrained.weights, **head})
    return ExportedModel(pretrained, task)
