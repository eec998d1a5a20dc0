"""Loading of `TaskModel`s of any task type."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import keras

import tasks
from bert_tf.errors import UserError, argument_names
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.weights.sources import PretrainedWeights, read_pretrained
from tasks.base.task import Task, task_from_dict
from tasks.graph.run_checkpoint import RunCheckpoint, masked_lm_task
from tasks.model.task_model import TaskModel


@argument_names()
def load_model(
    path: str | os.PathLike[str],
    *,
    checkpoint: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
) -> TaskModel:
    """Load a fine-tuned model of any task type, which its head decides.

        load_model("RUN").predict_rows(["My invoice is wrong."])
        load_model("ProsusAI/finbert").predict_rows(["Profits rose."])

    Args:
        path: Run directory, file written by `TaskModel.save`, or what `bert-tf convert` reads:
            directory of another library, or id of a model of the Hugging Face hub. Without another
            head, its masked language model is loaded.
        checkpoint: Name of a directory in the run's checkpoints; by default the best, else the
            latest.
        custom_objects: Functions and classes of your own in a .keras file by name, such as a loss
            that the model was compiled with. See `keras.saving.load_model`.
        compile: Whether the model of a .keras file is compiled as it was saved. A run directory
            has neither optimizer nor loss.

    Returns:
        The model. Its `source` is the checkpoint of a run directory.

    Raises:
        UserError: If it is none of these, or is damaged, or has no head; or if a checkpoint of
            anything but a run is asked for.
    """
    if str(path).endswith(".keras"):
        if checkpoint is not None:
            raise UserError(
                f"checkpoint={checkpoint!r}: expected with a run directory only, received {path}"
            )
        return _load_file(path, custom_objects, compile)
    path = os.fspath(path)
    if checkpoint is None and not Run.exists(path):
        pretrained, task = read_fine_tuned(path)
        return model_class(task).from_weights(pretrained, task)
    source = RunCheckpoint.open(path, checkpoint)
    weights = source.read()
    source = dataclasses.replace(source, task=source.task.for_weights(weights))
    record = source.run.train
    trained = record.get("has_trained_pooler", True)
    model = model_class(source.task)(
        source.task,
        source.run.config,
        source.run.vocabulary,
        record={"origin": source.origin, "has_trained_pooler": trained},
        has_new_head=record.get("has_new_head", False),
        frozen_layers=record.get("settings", {}).get("frozen_layers"),
        untrained=record.get("untrained"),
    )
    source.assign(weights, model.network)
    model.source = source
    return model


def read_fine_tuned(path: str) -> tuple[PretrainedWeights, Task]:
    """Read weights of another library with a head, and its task, as a run made of them has them.

    Raises:
        UserError: There is no model, or it has no head that is supported.
    """
    pretrained = read_pretrained(path)
    if pretrained.unsupported_embedder:
        raise UserError(pretrained.unsupported_embedder)
    if pretrained.run_task:
        return pretrained, task_from_dict(pretrained.run_task)
    if "masked_lm" not in pretrained.heads:
        raise UserError(
            f"{path}: expected a fine-tuned model, an embedder or a masked language model, "
            f"received {pretrained.source} without a head; run bert-tf finetune --init_from={path}"
        )
    return pretrained, masked_lm_task(pretrained.config)


def model_class(task: Task) -> type[TaskModel]:
    """Return the model class of a task, which is in the task's module."""
    return next(found for found in TaskModel.__subclasses__() if found.task_class is type(task))


def _load_file(path, custom_objects, compile):
    """Return the model of a .keras file."""
    _import_class(path)
    try:
        model = keras.saving.load_model(path, custom_objects=custom_objects, compile=compile)
        if isinstance(model, TaskModel):
            # Keras loads a file without assets.
            model.vocabulary.check_size(model.config.vocab_size, where="vocab.txt")
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if found := re.match(r"Could not locate (function|class) '.*?'", reason):
            raise UserError(
                f"{path}: {found[0]}; pass it in custom_objects of load_model, or compile=False if "
                "it is a loss or metric"
            ) from None
        # With its cause, which may be in a class of the user.
        raise UserError(f"{path}: cannot be loaded, may be damaged: {reason:.300}") from error
    return model


def _import_class(path):
    """Import the class of a .keras file, which registers it with Keras."""
    try:
        with files.open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            values = json.loads(archive.read("config.json"))
        if not isinstance(values, dict):
            raise ValueError("config.json is no object")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a .keras file: {error}") from None
    name = str(values.get("registered_name")).removeprefix("bert_tf>")
    if name in tasks.__all__:  # Otherwise a class of the user, who has imported it.
        getattr(tasks, name)
