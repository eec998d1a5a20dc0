"""The recipe of fine-tuning, from files to a run directory."""

import dataclasses
import hashlib
import math
import pathlib

import keras

from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import POLICIES, make_layout, make_strategy
from bert_tf.train.loop import Loop
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.step import TrainStep
from bert_tf.weights.sources import read_pretrained
from tasks.catalog import task_class
from tasks.evaluation import Evaluator
from tasks.examples import EncodedExamples
from tasks.pipeline import Pipeline


def finetune(settings, say=lambda line: None, strategy=None):
    """Trains what the FinetuneSettings say, or goes on with it; returns the open Run.

    `say` takes lines of progress; `strategy` overrides the flag's with one made by the caller.
    Raises UserError on data, weights or an output directory that do not fit, Interrupted after
    Ctrl-C or SIGTERM.
    """
    # Data: what task do the rows show, and do the dev files fit it?
    data_set = settings.data_set()
    task = task_class(data_set.kind).from_data(
        settings.train,
        text_columns=data_set.text_columns,
        label_column=data_set.label_column,
        labels=data_set.labels,
        max_seq_length=settings.max_seq_length,
    )
    train, *devs = (task.read(path) for path in (settings.train, *settings.dev))
    steps_per_epoch = math.ceil(len(train) / settings.global_batch_size)
    num_train_steps = steps_per_epoch * settings.epochs

    # The run that is there, or pretrained weights for a new one.
    run = source = None
    if Run.is_at(settings.output_dir) and Run(settings.output_dir).checkpoints.steps():
        run = Run.open(settings.output_dir)
        run.check_resumable(_recorded(settings), task.to_dict())
        if run.train["data"] != _data_hashes(settings):
            raise UserError(
                f"--train, --dev: the files are not those that {run.path} began with; name a new "
                "--output_dir"
            )
        if _is_finished(run, num_train_steps, settings):
            best = run.checkpoints.chosen_step()
            say(f"{run.path}: finished at step {num_train_steps}, nothing to do; best step {best}")
            return run
        for line in run.changes():
            say(line)
    else:
        source = read_pretrained(settings.init_from, settings.do_lower_case)
        _check_fits(source, task)
    config, vocabulary = (run or source).config, (run or source).vocabulary

    # Model and optimizer. The seed makes the head's first weights; with it the rows are put in
    # order, and dropout draws its noise.
    keras.utils.set_random_seed(settings.seed)
    strategy = strategy or make_strategy(settings.strategy)
    replicas = strategy.num_replicas_in_sync
    if settings.global_batch_size % replicas:
        raise UserError(
            f"--global_batch_size={settings.global_batch_size}: does not divide by the "
            f"{replicas} replicas"
        )
    with strategy.scope():
        model = task.build_model(config, POLICIES[settings.precision])
        warmup_steps = int(settings.warmup_proportion * num_train_steps)
        schedule = WarmupLinearDecay(
            settings.learning_rate,
            num_train_steps,
            warmup_steps,
            continuous=settings.schedule == "continuous",
        )
        optimizer = AdamW(
            schedule, settings.weight_decay_rate, bias_correction=settings.bias_correction
        )
        optimizer.build(model.trainable_variables)

    # Text to token ids, with what will serve.
    tokenizer = Tokenizer(vocabulary, config.do_lower_case, config.strip_accents)
    pipeline = Pipeline(task, tokenizer, model)
    layout = make_layout(strategy)
    encoded = EncodedExamples.encode(train, pipeline, layout)
    encoded_devs = [EncodedExamples.encode(dev, pipeline, layout) for dev in devs]

    # All that can be wrong has been looked at: now a new run may be made.
    if source is not None:
        source.assign_to(model)
        origins = {"data": _data_hashes(settings), "origin": source.origin_in(model)}
        record = {"settings": _recorded(settings), **origins}
        run = Run.create(settings.output_dir, config, vocabulary, record, task.to_dict())
    say(
        f"{task.kind}: {len(train)} rows, "
        f"{', '.join(f'{len(dev)} dev rows' for dev in devs) or 'no dev rows'}; "
        f"labels {', '.join(task.labels)}"
    )
    say(
        f"{model.count_params():,} parameters from {run.train['origin']}; "
        f"{'uncased' if config.do_lower_case else 'cased'}; {num_train_steps} steps of "
        f"{settings.global_batch_size} "
        f"on {replicas} replica{'s' * (replicas > 1)}"
    )

    # The loop.
    evaluator = Evaluator(task, model, strategy)

    def evaluate():
        results = [evaluator.metrics(dev) for dev in encoded_devs]
        metrics = {
            f"dev{number if number > 1 else ''}_{name}": value
            for number, result in enumerate(results, start=1)
            for name, value in result.items()
        }
        return results[0][task.best_metric], metrics

    Loop(
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
        say,
        evaluate if devs else None,
        steps_per_epoch,
    ).train()
    say(f"finished: {run.path}, best checkpoint step {run.checkpoints.chosen_step()}")
    return run


def _check_fits(source, task):
    """Raises UserError where weights have too few positions or segments for a task."""
    if task.max_seq_length > source.config.max_position_embeddings:
        raise UserError(
            f"--max_seq_length={task.max_seq_length}: {source.origin} has "
            f"{source.config.max_position_embeddings} positions"
        )
    if len(task.input_names) > source.config.type_vocab_size:
        raise UserError(f"--text_b_column: {source.origin} knows one segment only, no pairs")


def _recorded(settings):
    """The settings that train.json keeps: all but where the run lies."""
    return {
        name: value for name, value in dataclasses.asdict(settings).items() if name != "output_dir"
    }


def _data_hashes(settings):
    return {
        path: hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        for path in (settings.train, *settings.dev)
    }


def _is_finished(run, num_train_steps, settings):
    steps = run.checkpoints.steps()
    return (
        bool(steps)
        and steps[-1] == num_train_steps
        and (not settings.dev or "score" in run.checkpoints.info(steps[-1]))
    )
