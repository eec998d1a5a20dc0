"""Training of a `TaskModel` on rows in a run directory, with the loop of tasks.finetune."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bert_tf.errors import UserError, argument_names
from bert_tf.runs.run import Run
from bert_tf.system.scalars import to_python
from bert_tf.train.distribution import is_chief, names_lost_worker, use_precision
from tasks.data.examples import Examples
from tasks.finetuning.settings import task_defaults
from tasks.model import fitting
from tasks.model.labelled_rows import examples_of, inputs_of, is_token_ids
from tasks.training.distillation import Distillation
from tasks.training.settings import TrainingSettings, recorded
from tasks.training.teacher import read_teacher
from tasks.training.training_run import TrainingRun

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

_FIELDS = {
    field.name: field
    for field in dataclasses.fields(TrainingSettings)
    if not field.metadata.get("of_model")
}


@names_lost_worker
def train(
    model: TaskModel,
    x: Any,
    y: Any = None,
    dev: Any = (),
    *,
    output_dir: str | os.PathLike[str],
    teacher: str | os.PathLike[str] | TaskModel | None = None,
    unlabelled: Any = None,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> None:
    """Train a model on rows, or resume it, in a run directory that all commands read.

    The same call resumes after an interruption, with the same bits. The model gets the weights of
    the best checkpoint, and the values tuned for it.

    Args:
        model: The model.
        x: Rows, see `tasks.model.fitting.fit`.
        y: Labels, see `tasks.model.fitting.fit`.
        dev: Rows that select the best checkpoint and tune thresholds: (x, y), `Rows` or a dataset;
            or a list of these, of which the first one does.
        output_dir: Run directory, created or resumed.
        teacher: Model whose outputs are learned, or its run or SavedModel (docs/distillation.md).
        unlabelled: Rows without labels, which are learned from the teacher alone.
        log: Receives progress lines.
        **settings: Fields of `TrainingSettings`, such as epochs, learning_rate and patience. Seed,
            frozen layers and precision are those of the model by default.

    Raises:
        UserError: If rows, settings or the run directory do not fit.
        Interrupted: After Ctrl-C or SIGTERM; the state is saved.
    """
    with argument_names():
        if is_token_ids(x):
            raise UserError("x: expected strings, received token ids; use fit")
        strategy, task = model.distribute_strategy, model.task.with_tuned({})
        if teacher is not None:
            is_path = isinstance(teacher, str | os.PathLike)
            settings["teacher"] = os.fspath(teacher) if is_path else "model"
        chosen = _settings_of(model, settings)
        chosen.check_teacher_fits(task.kind)
        examples = [examples_of(task, x, y), *_dev_examples(task, dev)]
        numbers = range(1, len(examples))
        names = ["train", *(f"dev{number if number > 1 else ''}" for number in numbers)]
        fitting.select_training_examples(task, examples[0])
        digests, distillation = _digests(names, examples), None
        if unlabelled is not None:
            if teacher is None:
                raise UserError("unlabelled: requires teacher")
            rows = Examples(task.reader.columns(inputs_of(unlabelled)), [])
            digests |= _digests(["unlabelled"], [rows])
        if teacher is not None:
            distillation = Distillation(
                read_teacher(teacher, task.kind, strategy),
                chosen.distill_temperature,
                chosen.distill_alpha,
                [] if unlabelled is None else [rows],
            )
        training = TrainingRun(
            settings=chosen,
            task=task,
            names=names,
            examples=examples,
            digests=digests,
            rows="x, dev: the rows",
            recorded=recorded(
                {"dev": names[1:], **{name: getattr(chosen, name) for name in _FIELDS}}
            ),
            output_dir=os.fspath(output_dir),
            strategy=strategy,
            log=log,
            distillation=distillation,
        )
        if chosen.patience and not examples[1:]:
            raise UserError("patience: requires dev")
        with Run.writing(output_dir, is_chief(strategy)):
            run = training.open_run()
            if run and not _is_started_with(run, model):
                raise UserError(
                    f"{run.path}: was started with another model; choose a new output_dir"
                )
            model.preprocessor.task = task
            if chosen.frozen_layers not in (None, model.frozen_layers):
                model.freeze(chosen.frozen_layers)
            run = training.train(model, run)
            source = training.open_best(run)
    source.assign(source.read(), model.network)
    model.preprocessor.task, model.source = source.task, source
    model.has_new_head = False


def _settings_of(model: TaskModel, given: dict[str, Any]) -> TrainingSettings:
    """Return the settings; by default those of the model and of its task type."""
    for name in given:
        if name not in _FIELDS:
            raise UserError(f"{name}: unknown setting; expected one of {', '.join(_FIELDS)}")
    policy = model.dtype_policy.name
    of_task = task_defaults(model.task.kind)
    defaults = {
        **{name: of_task[name] for name in of_task.keys() & _FIELDS},
        "seed": model.seed,
        "frozen_layers": model.frozen_layers,
        "precision": {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}.get(
            policy, "float32"
        ),
    }
    settings = TrainingSettings(**to_python({**defaults, **given}))
    settings.check_fits(model.config, model.record.get("origin", "the model"))
    if use_precision(settings.precision) != policy:
        raise UserError(
            f"precision={settings.precision!r}: does not fit a model with dtype={policy!r}; pass "
            "dtype to from_pretrained instead"
        )
    return settings


def _dev_examples(task, dev):
    """Return the examples of each dev data."""
    several = dev if isinstance(dev, list) else [dev] if dev != () else []
    try:
        return [fitting.labelled_rows(task, one) for one in several]
    except UserError as error:
        raise UserError(f"dev: {error}") from None


def _digests(names: Sequence[str], examples: Sequence[Examples]) -> dict[str, str]:
    """Return the sha256 of texts, labels and weights by name."""
    digests = {}
    for name, data in zip(names, examples, strict=True):
        digest = hashlib.sha256()
        for row in zip(*data.texts.values(), *[data.labels] * bool(data.labels), strict=True):
            digest.update(repr(row).encode())
        digest.update(repr(data.weights).encode())
        digests[name] = digest.hexdigest()
        if "train" in digests and name != "train" and digests[name] == digests["train"]:
            raise UserError(f"{name}: same rows as x; expected rows that training does not use")
    return digests


def _is_started_with(run: Run, model: TaskModel) -> bool:
    """Whether a run was created by training a model of the same weights."""
    origins = run.train.get("origin"), model.record.get("origin")
    return run.config == model.config and (
        run.vocabulary.sha256 == model.vocabulary.sha256 and origins[0] == origins[1]
    )
