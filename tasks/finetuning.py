"""Fine-tuning recipe, from data files to a run directory."""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from bert_tf import checkpoints
from bert_tf.errors import UserError
from bert_tf.layout import to_padded
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import (
    barrier,
    check_alike,
    choose_layout,
    from_chief,
    is_chief,
    make_strategy,
    names_lost_worker,
    use_precision,
)
from bert_tf.train.loop import TrainingLoop
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.step import TrainStep
from bert_tf.weights.sources import read_pretrained
from tasks.evaluation import Evaluator, FeatureExamples
from tasks.examples import EncodedExamples
from tasks.pipeline import Pipeline
from tasks.registry import task_class
from tasks.settings import FinetuneSettings
from tasks.tuning import task_at


@names_lost_worker
def finetune(
    settings: FinetuneSettings,
    log: Callable[[str], None] = lambda line: None,
    strategy: tf.distribute.Strategy | None = None,
) -> Run:
    """Train, or resume training, in `settings.output_dir`.

    Args:
        settings: Values of the flags.
        log: Callable that takes log lines.
        strategy: Replaces the strategy of `settings.strategy`.

    Returns:
        The open run.

    Raises:
        UserError: Data, weights or the output directory do not match the settings.
        Interrupted: Ctrl-C or SIGTERM; the state was saved.
    """
    # First of all, because a multi-worker strategy must be created before TensorFlow runs anything.
    strategy = strategy or make_strategy(settings.strategy, tpu=settings.tpu)
    with Run.writing(settings.output_dir, is_chief(strategy)):
        return _finetune(settings, log, strategy)


def _finetune(settings, log, strategy):
    """Fine-tune; the caller holds the run directory."""
    chief = is_chief(strategy)
    if not chief:
        log = _ignore

    replicas = strategy.num_replicas_in_sync
    if settings.global_batch_size % replicas:
        raise UserError(
            f"--global_batch_size={settings.global_batch_size}: expected a multiple of the "
            f"{replicas} replicas"
        )
    hashes = settings.data_hashes()

    # Data. The training file determines the task's labels; dev files are checked against them.
    kind, options = settings.task_options()
    task = task_class(kind).from_data(settings.train, **options)
    train, *devs = (task.reader.load_examples(path) for path in (settings.train, *settings.dev))
    for examples in (train, *devs):
        if examples.skipped_rows:
            log(examples.skipped_rows_message())
    num_rows, train = len(train), task.select_training_examples(train)
    if devs:
        for line in task.postprocessor.check_dev(devs[0]):
            log(f"warning: {settings.dev[0]}: {line}")

    # Resume an existing run, or start from pretrained weights.
    check_alike(strategy, [settings.recorded(), hashes])
    run = source = None
    if from_chief(strategy, lambda: Run.has_checkpoint(settings.output_dir)):
        run = Run.open(settings.output_dir, is_writer=chief)
        run.check_resumable(settings.recorded(), task.to_dict(), task.tunable_fields)
        if run.train.get("data") != hashes:
            raise UserError(
                f"--train, --dev: the files differ from those that {run.path} was started with; "
                "choose a new --output_dir"
            )
    else:
        source = read_pretrained(settings.init_from, settings.do_lower_case)
        settings.check_fits(source.config, source.origin)
        if len(task.input_names) > source.config.type_vocab_size:
            raise UserError(
                f"{', '.join(task.input_names)}: pairs require two segments, but {source.origin} "
                "has one"
            )
    config, vocabulary = (run or source).config, (run or source).vocabulary

    # Model and optimizer. The seed determines the head's initial weights here, and later the order
    # of the rows and the dropout masks.
    keras.utils.set_random_seed(settings.seed)
    with strategy.scope():
        model = task.build_model(config, use_precision(settings.precision))
    if settings.frozen_layers is not None:
        model.encoder.freeze(settings.frozen_layers)

    # Tokenize with the pipeline that is exported for serving, so that both see the same ids.
    tokenizer = Tokenizer.from_config(config, vocabulary)
    pipeline = Pipeline(task, tokenizer, model)
    layout = choose_layout(strategy)
    # Padded batches get one static shape, because they are compiled by XLA.
    encoded, *encoded_devs = (
        EncodedExamples.encode(examples, pipeline, layout, static_shape=layout is to_padded)
        for examples in (train, *devs)
    )
    evaluator = Evaluator(task, model, strategy)
    if task.trains_on_vectors:
        encoded, *encoded_devs = (
            FeatureExamples(data, evaluator, log) for data in (encoded, *encoded_devs)
        )
    steps_per_epoch = math.ceil(len(encoded) / settings.global_batch_size)
    num_train_steps = steps_per_epoch * settings.epochs
    with strategy.scope():
        schedule = WarmupLinearDecay(
            settings.learning_rate,
            num_train_steps,
            int(settings.warmup_proportion * num_train_steps),
            continuous=settings.schedule == "continuous",
        )
        optimizer = AdamW(
            schedule,
            settings.weight_decay_rate,
            bias_correction=settings.bias_correction,
            layer_decay=settings.layer_decay,
        )
        optimizer.build(model.trainable_variables)

    # Create the run directory only now, after all checks, so that user errors leave no directory.
    if source is not None:
        source.assign_to(model)
        task.init_head(model, encoded)
        entries = {
            "settings": settings.recorded(),
            "data": hashes,
            "origin": source.origin_in(model),
        }
        if chief:
            Run.create(settings.output_dir, config, vocabulary, entries, task.to_dict())
        barrier(strategy)
        run = Run.open(settings.output_dir, is_writer=chief)
    elif from_chief(strategy, lambda: _is_finished(run, num_train_steps, settings)):
        best = from_chief(strategy, run.checkpoints.best_or_latest_step)
        newest = run.checkpoints.steps()[-1]
        log(f"{run.path}: finished at step {newest}, nothing to do; best step {best}")
        return run
    else:
        for line in run.changes():
            log(line)
    log(_summary(task, encoded, encoded_devs, num_rows - len(train)))
    for path, data in zip((settings.train, *settings.dev), (encoded, *encoded_devs), strict=True):
        for line in task.label_warnings(data):
            log(f"{path}: {line}")
    log(
        f"{model.count_params():,} parameters from {run.train.get('origin')}; "
        f"{'uncased' if config.do_lower_case else 'cased'}; {num_train_steps} steps of "
        f"{settings.global_batch_size} samples on {replicas} replica{'s' * (replicas > 1)}"
    )

    # Train; the best checkpoint is selected by the first dev file.
    def evaluate():
        results = [evaluator.metrics(dev) for dev in encoded_devs]
        return results[0][task.postprocessor.best_metric], _by_dev(results)

    TrainingLoop(
        run,
        TrainStep(model, task.losses, optimizer, strategy, settings.seed),
        lambda step: encoded.training_batches(
            global_batch_size=settings.global_batch_size,
            num_epochs=settings.epochs,
            seed=settings.seed,
            first_step=step,
            num_replicas=replicas,
        ),
        num_train_steps,
        settings.save_every,
        settings.log_every,
        log,
        evaluate if devs else None,
        steps_per_epoch,
        patience=settings.patience,
    ).train()
    best = from_chief(strategy, run.checkpoints.best_or_latest_step)
    if devs:
        _finish(run, task, evaluator, encoded_devs, best, settings.dev[0], log)
    barrier(strategy)
    log(f"finished: {run.path}, best checkpoint step {best}")
    return run


def _finish(run, task, evaluator, devs, best, first_file, log):
    """Tune the task on dev with the best checkpoint, save the values, and log the metrics."""
    metrics = run.checkpoints.info(best)["metrics"]
    if task.tunable_fields:
        # The model holds the weights of the last step; tuning applies to the best checkpoint.
        directory = run.checkpoints.path(best)
        checkpoints.assign(
            checkpoints.model_variables(evaluator.model),
            checkpoints.read(directory),
            directory,
            ignore=checkpoints.OPTIMIZER_STATE,
        )
        outputs = [evaluator.outputs(dev) for dev in devs]
        warnings = task.postprocessor.tuning_warnings(devs[0], outputs[0])
        task = task.postprocessor.tune(devs[0], outputs[0])
        metrics = _by_dev(
            [
                task.postprocessor.metrics(dev, of_dev)
                for dev, of_dev in zip(devs, outputs, strict=True)
            ]
        )
        values = {name: getattr(task, name) for name in task.tunable_fields}
        run.checkpoints.set_tuned(
            best,
            {
                "values": values,
                "metrics": metrics,
                "file": first_file,
                "sha256": run.train["data"][first_file],
                "warnings": warnings,
            },
        )
        tuned = ", ".join(f"{name} {value}" for name, value in values.items())
        scores = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log(f"tuned on dev: {tuned}; {scores}")
        for line in warnings:
            log(f"warning: {first_file}: {line}")
        run.log_metrics({"step": best, **{f"tuned_{k}": v for k, v in metrics.items()}})
    warning = task.postprocessor.warning(
        {name.removeprefix("dev_"): value for name, value in metrics.items()}
    )
    if warning:
        log(f"warning: {warning}")


def _by_dev(results):
    return {
        f"dev{number if number > 1 else ''}_{name}": value
        for number, result in enumerate(results, start=1)
        for name, value in result.items()
    }


def _ignore(line):
    """Discard a log line; only the chief logs."""


def _summary(task, train, devs, num_unused):
    """Return a log line with the task type and the numbers of rows and windows."""
    counts = ", ".join(f"{len(dev.examples)} dev rows" for dev in devs) or "no dev rows"
    windows = f" in {len(train)} windows" if len(train) != len(train.examples) else ""
    unused = f", {num_unused} more {task.unused}" if num_unused else ""
    rows = f"{len(train.examples)} rows{windows}{unused}"
    return f"{task.kind}: {rows}, {counts}{task.description()}"


def _is_finished(run, num_train_steps, settings):
    """Whether the run is trained and evaluated, and its task is tuned."""
    if not run.is_finished(num_train_steps, bool(settings.dev), settings.patience):
        return False
    return (
        not settings.dev or not task_at(run, run.checkpoints.best_or_latest_step()).untuned_fields
    )
