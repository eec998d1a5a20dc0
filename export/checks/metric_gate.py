"""Comparison of a task's metric between the trained model and its int8 graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_flat
from export.package.documents import MetricChange
from tasks.data.examples import EncodedExamples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel


def check(
    model: TaskModel,
    pipeline: Pipeline,
    dev: str,
    max_drop: float,
    log: Callable[[str], None] = lambda line: None,
) -> MetricChange:
    """Evaluate the trained model and the pipeline that was exported on labelled rows of a file.

    Warnings of the task, such as of labels that its metrics cannot measure, are logged.

    Raises:
        UserError: If a row is bad, or the metric drops by more than `max_drop`, or if it is 0
            before, as on rows of one number, and cannot drop.
    """
    # Flat, because XLA does not compile the products of the graph.
    encoded = EncodedExamples.encode(model.task.load_examples(dev), model.serving.pipeline, to_flat)
    name, strategy = model.task.best_metric, tf.distribute.get_strategy()
    of_trained, of_served = (
        Evaluator(model.task, network, strategy, log=log).metrics(encoded)
        for network in (model.network, pipeline.model)
    )
    for line in (*model.task.label_warnings(encoded), model.task.warning(of_trained)):
        if line:
            log(f"warning: {dev}: {line}")
    trained, served = of_trained[name], of_served[name]
    if trained <= 0 and max_drop < 100:
        raise UserError(
            f"not published: {name} of {dev} is {100 * trained:.2f} for the trained model, so that "
            "no drop can be measured; name other rows with --dev, or export another precision"
        )
    change = MetricChange(name, os.path.basename(dev), trained, served)
    # Written so that a metric that is not a number fails.
    if not change.drop <= max_drop:
        raise UserError(
            f"not published: {name} of {dev} drops by {change.drop:.2f} points, from "
            f"{100 * trained:.2f} to {100 * served:.2f}; expected at most {max_drop}, see "
            "--max_metric_drop, or export another precision"
        )
    return change


def dev_file(model: TaskModel) -> str:
    """Return the first dev file of a model's run.

    Raises:
        UserError: If the run has none, or has rows in Python, or it is no longer there.
    """
    settings = model.source.run.train.get("settings", {}) if model.source else {}
    path = next(iter(settings.get("dev") or ()), None)
    if path is None:
        raise UserError(
            "--precision=int8: expected --dev=FILE, labelled rows; the run has no dev set"
        )
    if path == "dev" and "train" not in settings:  # As `TaskModel.train` names its rows.
        raise UserError(
            "--precision=int8: expected --dev=FILE, labelled rows; the run was trained on rows in "
            "Python"
        )
    if not os.path.isfile(path):
        raise UserError(
            f"--precision=int8: the run's dev file {path} does not exist; set --dev=FILE"
        )
    return path
