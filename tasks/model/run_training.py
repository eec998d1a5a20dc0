"""Training of a `TaskModel` in a run directory."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.system.scalars import to_python
from bert_tf.train.distribution import DTYPE_POLICIES, is_chief, names_lost_worker, use_precision
from tasks.data.examples import Examples
from tasks.model.labelled_rows import evaluation_examples, examples_of, inputs_of, is_token_ids
from tasks.training.distillation import Distillation, Teacher, model_teacher, read_teacher
from tasks.training.settings import TrainingSettings, recorded
from tasks.training.training_run import TrainingRun, digests_of

_UNFINISHED = ", unfinished"
# The origin of weights as `load_model` or `train` left them.
_OF_RUN = re.compile(rf"run (?P<path>.+?)(/checkpoints/step-\d+|(?P<unfinished>{_UNFINISHED}))")
# Fields of `TrainingSettings` that are arguments of `train`.
_SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(TrainingSettings)
    if not field.metadata.get("of_model")
)


@names_lost_worker
def train(
    model: Any,
    x: Any,
    y: Any,
    dev: Any,
    output_dir: str | os.PathLike[str],
    teacher: Any,
    unlabelled: Any,
    log: Callable[[str], None],
    settings: Mapping[str, Any],
) -> None:
    """Train a `TaskModel`, or resume; arguments and errors as of its method `train`."""
    if is_token_ids(x):
        raise UserError("x: expected strings, received token ids; use fit")
    settings = dict(settings)
    strategy, task = model.distribute_strategy, model.preprocessor.task
    if teacher is not None:
        settings["teacher"] = os.fspath(teacher) if _is_path(teacher) else "model"
    chosen = _settings(model, settings)
    chosen.check_teacher_fits(task.kind)
    has_teacher = teacher is not None
    train = examples_of(task, x, y, has_teacher=has_teacher)
    examples = [train, *_dev_examples(task, dev)]
    numbers = range(1, len(examples))
    names = ["train", *(f"dev{number if number > 1 else ''}" for number in numbers)]
    if not len(task.select_training_examples(examples[0])):
        raise UserError("x: expected at least one row to train on, received none")
    digests, distillation, rows = digests_of(names, examples), None, []
    if unlabelled is not None:
        if teacher is None:
            raise UserError("unlabelled: requires teacher")
        rows = [Examples(task.columns(inputs_of(unlabelled)), [])]
        digests |= digests_of(["unlabelled"], rows)
    if teacher is not None:
        distillation = Distillation(
            _teacher(teacher, task.kind, strategy),
            chosen.distill_temperature,
            chosen.distill_alpha,
            rows,
        )
    training = TrainingRun(
        settings=chosen,
        task=task,
        names=names,
        examples=examples,
        digests=digests,
        rows="x, dev: the rows",
        recorded=recorded(
            {"dev": names[1:], **{name: getattr(chosen, name) for name in _SETTINGS}}
        ),
        output_dir=os.fspath(output_dir),
        strategy=strategy,
        log=log,
        distillation=distillation,
    )
    chosen.check_has_dev(bool(examples[1:]))
    with Run.writing(output_dir, is_chief(strategy)):
        run = training.open_run()
        _check_start(model, run)

        def begin():
            model.set_source(f"run {training.output_dir}{_UNFINISHED}", task)
            if chosen.frozen_layers != model.frozen_layers:
                model.freeze(chosen.frozen_layers)

        run = training.train(
            model.serving.pipeline, {**model.record, "origin": model.origin}, run, begin
        )
        source = training.open_best(run)
    source.assign(source.read(), model.network)
    model.set_source(source.origin, source.task)
    model.source = source


def _settings(model, given):
    """Return the settings of `train`; by default those of the model and of its task type."""
    for name in given:
        if name not in _SETTINGS:
            raise UserError(f"{name}: unknown setting; expected one of {', '.join(_SETTINGS)}")
    policy, of_task = model.dtype_policy.name, model.fit_defaults
    defaults = {
        **{name: of_task[name] for name in of_task.keys() & set(_SETTINGS)},
        "seed": model.seed,
        "frozen_layers": model.frozen_layers,
    }
    if given.get("num_train_steps") is not None:
        del defaults["epochs"]
    precision = given.get("precision", "auto")
    if precision == "auto":
        precision = policy.removeprefix("mixed_")
    settings = TrainingSettings(**to_python({**defaults, **given, "precision": precision}))
    if settings.epochs is None and settings.num_train_steps is None:
        raise UserError("epochs=None: expected an integer, or num_train_steps")
    settings.check_fits(model.config, model.record.get("origin", "the model"))
    if DTYPE_POLICIES[settings.precision] != policy:
        raise UserError(
            f"precision={settings.precision!r}: does not fit a model with dtype={policy!r}; "
            "pass dtype to from_pretrained instead"
        )
    use_precision(settings.precision)
    return settings


def _check_start(model, run):
    """Raise UserError unless `train` starts a run, or resumes `run`, with these weights."""
    own = _OF_RUN.match(model.origin)
    is_changed = own and own.end() < len(model.origin)  # By `fit`, for example.
    is_own = run and own and os.path.abspath(own["path"]) == os.path.abspath(run.path)
    is_own = is_own and not is_changed
    if own and own["unfinished"] and not is_own:
        raise UserError(
            f"the model holds weights of an unfinished train in {own['path']}; create it again"
        )
    if run and not (
        (is_own or run.train.get("origin") == model.origin)
        and run.config == model.config
        and run.vocabulary.sha256 == model.vocabulary.sha256
    ):
        raise UserError(f"{run.path}: was started with another model; choose a new output_dir")


def _dev_examples(task, dev):
    """Return the examples of each dev data."""
    is_several = isinstance(dev, list) and not any(isinstance(one, str) for one in dev)
    several = dev if is_several else [] if dev is None else [dev]
    try:
        return [evaluation_examples(task, one) for one in several]
    except UserError as error:
        raise UserError(f"dev: {error}") from None


def _is_path(teacher):
    return isinstance(teacher, str | os.PathLike)


def _teacher(teacher, kind, strategy) -> Teacher:
    """Return the teacher of a model or path."""
    if _is_path(teacher):
        return read_teacher(os.fspath(teacher), kind, strategy)
    return model_teacher(
        teacher.task,
        teacher.network,
        lambda: teacher.serving.pipeline,
        teacher.distribute_strategy,
    )
