"""Fine-tuning from files: reads data and weights, and trains in a run directory.

A dry run does all checks of the real run and estimates its cost from the lengths of its rows. It
creates the model and tokenizes the rows, and writes nothing.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from bert_tf.model.dense import initial_weights_seed
from bert_tf.planning.devices import measure_processor, planned_precision
from bert_tf.planning.estimates import Finetuning, estimate_finetuning
from bert_tf.planning.report import device_line, finetuning_lines
from bert_tf.runs.run import Run
from bert_tf.train.distribution import (
    check_alike,
    is_chief,
    is_multi_worker,
    make_strategy,
    names_lost_worker,
    resolve_precision,
    use_precision,
)
from bert_tf.train.losses import compares_examples
from bert_tf.weights.sources import read_pretrained
from tasks.base.task import task_class
from tasks.data.examples import EncodedExamples
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
        training, run, model = prepare(settings, data or settings.read_data(), log, strategy)
        return training.train(model.serving.pipeline, model.record, run)


def prepare(
    settings: FinetuneSettings,
    data: DataRows,
    log: Callable[[str], None],
    strategy: tf.distribute.Strategy,
) -> tuple[TrainingRun, Run | None, TaskModel]:
    """Read data and weights; return the training, the run to resume, if any, and the model."""

    @functools.cache
    def weights():
        return read_pretrained(settings.init_from, settings.do_lower_case)

    has_trained_pooler = True
    if Run.has_checkpoint(settings.output_dir):
        source = Run.open(settings.output_dir).task
    else:
        source = weights().embedder if settings.keep_head == "false" else weights().run_task
        has_trained_pooler = weights().has_trained_pooler
    training = read(settings, data, log, strategy, source, has_trained_pooler)
    run = training.open_run()
    return training, run, _create_model(settings, training, run, weights)


def read(
    settings: FinetuneSettings,
    data: DataRows,
    log: Callable[[str], None],
    strategy: tf.distribute.Strategy,
    source: Mapping[str, Any] | None = None,
    has_trained_pooler: bool = True,
) -> TrainingRun:
    """Read the data; the training file determines the labels, which dev files are checked for.

    For `source` and `has_trained_pooler`, of the weights, see `Task.options_from`.
    """
    kind, options = settings.task_options()
    lines: list[str] = []
    brought = task_class(kind).options_from(
        source or {}, options, has_trained_pooler, log=lines.append
    )
    options = {**brought, **options}
    task = task_class(kind).from_data(data.labelled[settings.train], **options)
    names = (settings.train, *settings.dev)
    # Without a teacher, a file without labels has been refused.
    first = next(iter(raise_bad_rows(data.labelled[settings.train])), None)
    is_labelled = not (first and first.label is None and task.can_learn_unlabelled(first.texts))
    training = TrainingRun(
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
    for line in lines:
        training.log(line)
    return training


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


def _create_model(settings, training, run, weights):
    """Create the model: of pretrained weights, or of a run, whose checkpoint is restored later."""
    options: dict[str, Any] = {
        "seed": settings.seed,
        "frozen_layers": settings.frozen_layers,
        "dtype": use_precision(settings.precision),
    }
    create, task = model_class(training.task), training.task
    if run is None:
        pretrained = weights()
        settings.check_fits(pretrained.config, pretrained.origin)
        if is_multi_worker(training.strategy):
            check_alike(training.strategy, pretrained.sha256)
        keep_head = KEEP_HEAD[settings.keep_head]
        with training.strategy.scope():
            model = create.from_weights(pretrained, task, keep_head=keep_head, **options)
        if pretrained.task:
            which = "new" if model.has_new_head else "kept"
            training.log(f"head: {which}, {pretrained.source} is of task {_of(pretrained.task)}")
        return model
    with training.strategy.scope(), initial_weights_seed(settings.seed):
        return create(task, run.config, run.vocabulary, **options)


def _of(task):
    """Return the type and the labels of a task, given as in task.json, for the log."""
    labels = task.get("labels")
    return task["kind"] + (f" with labels {', '.join(labels):.200}" if labels else "")


def dry_run(
    settings: FinetuneSettings,
    log: Callable[[str], None] = lambda line: None,
    data: DataRows | None = None,
) -> None:
    """Check a fine-tuning or a sweep, and log its estimated memory and time.

    The devices in the settings are those of the estimate. Arguments as of `finetune`.

    Raises:
        UserError: As `finetune`.
    """
    plan = plan_of(settings, log, data)
    log(device_line(plan.device, plan.precision, is_measured=True))
    for line in finetuning_lines(plan, estimate_finetuning(plan)):
        log(line)
    log("dry run: checked files, weights and output directory; nothing was created")


def plan_of(
    settings: FinetuneSettings, log: Callable[[str], None], data: DataRows | None = None
) -> Finetuning:
    """Check a fine-tuning and return what is estimated; raises UserError as `finetune`."""
    runs = settings.runs()
    of_run = next(iter(runs.values()))
    # The devices of the estimate need not exist here, so that the strategy is that of one device.
    strategy = make_strategy("none")
    of_run = dataclasses.replace(of_run, precision=resolve_precision(of_run.precision, strategy))
    training, _, model = prepare(of_run, data or settings.read_data(), log, strategy)
    if training.distillation:
        training.distillation.teacher.check_size(training.task.vector_size(model.config))
    train, *devs = training.encode(model.serving.pipeline)
    learned = (train, *training.encode_unlabelled(model.serving.pipeline))
    samples = [sample for data in learned for sample in window_lengths(data)]
    device = settings.typical()
    precision = planned_precision(settings.precision, device)
    if settings.device == "cpu":
        tokens = sum(map(sum, samples)) * of_run.global_batch_size // max(len(samples), 1)
        device = measure_processor(model.config, tokens, precision)
    steps_per_epoch = math.ceil(max(len(samples), 1) / of_run.global_batch_size)
    return Finetuning(
        config=model.config,
        samples=samples,
        dev_samples=[sample for dev in devs for sample in window_lengths(dev)],
        epochs=of_run.total_steps(steps_per_epoch) / steps_per_epoch,
        global_batch_size=of_run.global_batch_size,
        devices=settings.devices,
        device=settings.linked(device, settings.strategy),
        precision=precision,
        frozen_layers=settings.frozen_layers,
        static_length=training.task.max_seq_length if settings.strategy == "tpu" else None,
        is_frozen=not model.encoder.trainable,
        runs=len(runs),
        accumulation_steps=of_run.gradient_accumulation_steps,
        is_cached=of_run.gradient_accumulation_steps > 1
        and compares_examples(training.task.losses.values()),
    )


def window_lengths(encoded: EncodedExamples) -> list[list[int]]:
    """Return the tokens of each window by sample; samples without windows are left out."""
    lengths_W = encoded.windows.packed.input_ids.row_lengths().numpy().tolist()
    splits = encoded.sample_splits.tolist()
    samples = (lengths_W[first:last] for first, last in itertools.pairwise(splits))
    return [sample for sample in samples if sample]
