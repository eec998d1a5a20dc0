"""Fine-tuning from files: reads data and weights, and trains in a run directory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from bert_tf.runs.run import Run
from bert_tf.train.distribution import (
    is_chief,
    make_strategy,
    names_lost_worker,
    resolve_precision,
    use_precision,
)
from bert_tf.weights.sources import read_pretrained
from tasks.base.task import task_class
from tasks.data.readers.rows import raise_bad_rows
from tasks.finetuning.settings import DataRows, FinetuneSettings
from tasks.model.loading import model_class
from tasks.model.task_model import TaskModel
from tasks.training.distillation import Distillation, read_teacher
from tasks.training.settings import KEEP_HEAD
from tasks.training.training_run import TrainingRun


@names_lost_worker
def finetune(
    settings: FinetuneSettings,
    log: Callable[[str], None] = lambda line: None,
    strategy: tf.distribute.Strategy | None = None,
    data: DataRows | None = None,
) -> Run:
    """Train, or resume training, in `settings.output_dir`; return the open run.

    Args:
        settings: Values of the flags of one run.
        log: Callable that takes log lines.
        strategy: Replaces the strategy of `settings.strategy`.
        data: The rows of the data files, if `settings.check` has read them already.

    Raises:
        UserError: Data, weights or the output directory do not match the settings.
        Interrupted: Ctrl-C or SIGTERM; the state was saved.
    """
    # First of all, because a multi-worker strategy must be created before TensorFlow runs anything.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu, log=log)
    settings = dataclasses.replace(
        settings, precision=resolve_precision(settings.precision, strategy)
    )
    with Run.writing(settings.output_dir, is_chief(strategy)):
        training = read(settings, data or settings.read_data(), log, strategy)
        run = training.open_run()
        model = create_model(settings, training, run)
        return training.train(model.serving.pipeline, model.record, model.has_new_head, run)


def read(
    settings: FinetuneSettings,
    data: DataRows,
    log: Callable[[str], None],
    strategy: tf.distribute.Strategy,
) -> TrainingRun:
    """Read the data; the training file determines the labels, which dev files are checked for."""
    kind, options = settings.task_options()
    started = Run.exists(settings.output_dir)
    weights = settings.output_dir if started else settings.init_from
    options = {**task_class(kind).options_of_weights(weights), **options}
    task = task_class(kind).from_data(data.labelled[settings.train], **options)
    names = (settings.train, *settings.dev)
    # Without a teacher, a file without labels has been refused.
    first = next(iter(raise_bad_rows(data.labelled[settings.train])), None)
    is_labelled = not (first and first.label is None and task.can_learn_unlabelled(first.texts))
    return TrainingRun(
        settings=settings,
        task=task,
        names=names,
        examples=[
            task.load_examples(data.labelled[path], is_labelled or path != settings.train)
            for path in names
        ],
        digests=data.digests,
        rows=f"--train, --dev{', --unlabelled' * bool(settings.unlabelled)}: the files",
        recorded=settings.recorded(),
        output_dir=settings.output_dir,
        strategy=strategy,
        log=log,
        distillation=_distillation(settings, data, task, strategy),
    )


def _distillation(settings, data, task, strategy):
    """Return the teacher and the unlabelled rows, or `None` without a teacher."""
    if settings.teacher is None:
        return None
    return Distillation(
        read_teacher(settings.teacher, task.kind, strategy),
        settings.distill_temperature,
        settings.distill_alpha,
        [task.load_examples(data.unlabelled[path], labelled=False) for path in settings.unlabelled],
    )


def create_model(settings: FinetuneSettings, training: TrainingRun, run: Run | None) -> TaskModel:
    """Create the model: of pretrained weights, or of a run, whose checkpoint is restored later."""
    options: dict[str, Any] = {
        "seed": settings.seed,
        "frozen_layers": settings.frozen_layers,
        "dtype": use_precision(settings.precision),
    }
    create, task = model_class(training.task), training.task
    if run is None:
        pretrained = read_pretrained(settings.init_from, settings.do_lower_case)
        settings.check_fits(pretrained.config, pretrained.origin)
        keep_head = KEEP_HEAD[settings.keep_head]
        with training.strategy.scope():
            model = create.from_weights(pretrained, task, keep_head=keep_head, **options)
        if pretrained.task:
            which = "new" if model.has_new_head else "kept"
            training.log(f"head: {which}, {pretrained.source} is of task {_of(pretrained.task)}")
        return model
    keras.utils.set_random_seed(settings.seed)
    with training.strategy.scope():
        return create(task, run.config, run.vocabulary, **options)


def _of(task):
    """Return the type and the labels of a task, given as in task.json, for the log."""
    labels = task.get("labels")
    return task["kind"] + (f" with labels {', '.join(labels):.200}" if labels else "")
