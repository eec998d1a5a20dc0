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
from bert_tf.storage import files
from tasks.base.task import Task
from tasks.graph.run_checkpoint import RunCheckpoint
from tasks.model.task_model import TaskModel


@argument_names()
def load_model(
    path: str | os.PathLike[str],
    *,
    checkpoint: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
) -> TaskModel:
    """Load a run directory or a .keras file of any task type.

        load_model("RUN").predict_rows(["My invoice is wrong."])

    Args:
        path: Run directory, or file written by `TaskModel.save`.
        checkpoint: Name of a directory in the run's checkpoints; by default the best, else the
            latest.
        custom_objects: Functions and classes of your own in a .keras file by name, such as a loss
            that the model was compiled with. See `keras.saving.load_model`.
        compile: Whether the model of a .keras file is compiled as it was saved. A run directory
            has neither optimizer nor loss.

    Returns:
        The model. Its `source` is the checkpoint of a run directory.

    Raises:
        UserError: If it is neither, or is damaged, or if a file is given with a checkpoint.
    """
    if str(path).endswith(".keras"):
        if checkpoint is not None:
            raise UserError(
                f"checkpoint={checkpoint!r}: expected with a run directory only, received {path}"
            )
        return _load_file(path, custom_objects, compile)
    source = RunCheckpoint.open(os.fspath(path), checkpoint)
    weights = source.read()
    source = dataclasses.replace(source, task=source.task.for_weights(weights))
    record = source.run.train
    model = model_class(source.task)(
        source.task,
        source.run.config,
        source.run.vocabulary,
        record={"origin": source.origin},
        has_new_head=record.get("has_new_head", False),
        frozen_layers=record.get("settings", {}).get("frozen_layers"),
        untrained=record.get("untrained"),
    )
    source.assign(weights, model.network)
    model.source = source
    return model


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
