"""Checkpoints of runs: where the weights of a `TaskModel` come from, and its tuned values.

Tuned values, thresholds and temperatures, belong to the checkpoint they were fitted to. task.json
describes the requested task and does not change. The values are in checkpoint.json, written in one
atomic write:

    "tuned": {"values": {field of the task: value}, "metrics": {name: value with the tuned values},
              "file": path of the dev file, "sha256": hash of that file, "warnings": [line]}

Weights converted from another program have one checkpoint; task.json has their values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.runs import checkpoints
from bert_tf.runs.run import Run
from bert_tf.weights import name_map
from tasks.base.task import Task, task_from_dict

PRETRAINED = "pretrained"  # Task type of runs without task.json, `MaskedLmTask`.
_DROPOUT = "dropout_seed/"
# Converted weights have no dropout state, which predictions do not use; those of a masked language
# model may have no next sentence head.
_OPTIONAL = (_DROPOUT, "next_sentence/")


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint of a run, with the task whose values were tuned for it.

    Attributes:
        run: The run.
        task: The task. A run that was only pretrained has a `MaskedLmTask`.
        path: Directory of the checkpoint.
        tuned: What was tuned, or `None`.
    """

    run: Run
    task: Task
    path: str
    tuned: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], checkpoint: str | None = None) -> Self:
        """Open a checkpoint, by default the best, else the latest, without reading its weights.

        Raises:
            UserError: If it is not a run, or has no checkpoint of this name.
        """
        run = Run.open(path)
        step = (
            run.checkpoints.step_of(checkpoint)
            if checkpoint
            else run.checkpoints.best_or_latest_step()
        )
        return cls(run, task_at(run, step), run.checkpoints.path(step), tuned_at(run, step))

    @property
    def origin(self) -> str:
        """Origin of weights that are read from it, as in train.json."""
        return f"run {self.path}"

    def read(self) -> dict[str, np.ndarray]:
        """Return the tensors by name, checked before a network of their size is built.

        Raises:
            UserError: If they are damaged, or are not of the run's configuration and task.
        """
        config, values = self.run.config, checkpoints.read(self.path)
        checkpoints.check_shapes(name_map.weight_shapes(config), values, self.path)
        if self.task.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"{self.run.path}: task.json: expected max_seq_length of at most "
                f"{config.max_position_embeddings}, the number of positions in config.json, "
                f"received {self.task.max_seq_length}"
            )
        # A run without a task may be a converted checkpoint that has no pretraining heads.
        if self.run.task is None and not any(name.startswith("masked_lm/") for name in values):
            raise UserError(
                f"{self.run.path}: expected a fine-tuned run or one with pretraining heads, "
                f"received neither; run bert-tf finetune --init_from={self.run.path}"
            )
        return values

    def assign(self, values: Mapping[str, np.ndarray], network: keras.Model) -> None:
        """Assign the tensors of `read` to a network; raises UserError if names or shapes differ."""
        variables = checkpoints.model_variables(network)
        checkpoints.assign(
            {
                name: variable
                for name, variable in variables.items()
                if name in values or not name.startswith(_OPTIONAL)
            },
            values,
            self.path,
            ignore=checkpoints.OPTIMIZER_STATE,
        )

    def is_that_of(self, task: Task, network: keras.Model) -> bool:
        """Return whether a task and a network are those of this checkpoint, bit for bit.

        They are not if the network was trained further, or the task was tuned to other values.
        """
        if task != self.task:
            return False
        try:
            values = checkpoints.read(self.path)
        except UserError:  # Removed since it was loaded.
            return False
        return all(
            name in values and np.array_equal(variable.numpy(), values[name])
            for name, variable in checkpoints.model_variables(network).items()
            if not name.startswith(_DROPOUT) and (name in values or not name.startswith(_OPTIONAL))
        )

    @property
    def untuned(self) -> str | None:
        """One line naming requested fields that are not tuned here, and the remedy; or `None`."""
        # Without dev rows, values that are only tuned because there are some were never requested.
        has_dev = bool(self.run.train.get("settings", {}).get("dev"))
        if not self.task.untuned_fields or (self.task.tunes_without_request and not has_dev):
            return None
        names, best = (
            ", ".join(self.task.untuned_fields),
            self.run.checkpoints.best_or_latest_step(),
        )
        if tuned_at(self.run, best):
            directory = os.path.basename(self.run.checkpoints.path(best))
            remedy = f"was fitted to {directory} only; omit --checkpoint to use that checkpoint"
        elif has_dev:
            remedy = (
                "was never fitted, since the run stopped earlier; run the same bert-tf finetune "
                f"command again (its flags are in {self.run.file('train.json')}) to tune the best "
                "checkpoint"
            )
        else:
            remedy = "was never fitted; call tune(x, y) of the model"
        return f"{self.path}: untuned: {names} {remedy}"


def masked_lm_task(config: BertConfig) -> Task:
    """Return the task of weights without the head of another one."""
    return task_from_dict({"kind": PRETRAINED, "max_seq_length": config.max_position_embeddings})


def tuned_at(run: Run, step: int) -> dict[str, Any] | None:
    """Return what was tuned for the checkpoint at a step, or `None`."""
    tuned = run.checkpoints.info(step).get("tuned")
    if tuned is not None or "settings" in run.train:
        return tuned
    task = _task_of(run)  # Of converted weights.
    values = {name: getattr(task, name) for name in task.tunable_fields}
    return {"values": values, "metrics": {}} if values and not task.untuned_fields else None


def task_at(run: Run, step: int) -> Task:
    """Return the run's task with the values tuned for the checkpoint at a step, if any."""
    return _task_of(run).with_tuned((tuned_at(run, step) or {}).get("values", {}))


def _task_of(run):
    """Return the task of a run without tuned values."""
    if run.task is not None:
        return task_from_dict(run.task)
    task, settings = masked_lm_task(run.config), run.train.get("settings", {})
    # Those of `MaskedLanguageModel.train`, which pretraining does not have.
    known = {field.name for field in dataclasses.fields(task)} & settings.keys()
    options = task.checked({name: settings[name] for name in known}, "train.json")
    return dataclasses.replace(task, **options)
