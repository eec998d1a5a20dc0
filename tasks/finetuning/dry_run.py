"""Dry run of fine-tuning: all checks of the real run, and an estimate from the lengths of its rows.

It reads files and weights, creates the model and tokenizes the rows, and writes nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable

from bert_tf.planning.devices import measure_processor, planned_precision
from bert_tf.planning.estimates import Finetuning, estimate_finetuning
from bert_tf.planning.report import device_line, finetuning_lines
from bert_tf.train.distribution import make_strategy, resolve_precision
from bert_tf.train.losses import BatchLoss
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import create_model, read
from tasks.finetuning.settings import DataRows, FinetuneSettings


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
    training = read(of_run, data or settings.read_data(), log, strategy)
    model = create_model(of_run, training, training.open_run())
    train, *devs = training.encode(model.serving.pipeline)
    learned = (train, *training.encode_unlabelled(model.serving.pipeline))
    samples = [sample for data in learned for sample in window_lengths(data)]
    device = settings.typical()
    precision = planned_precision(settings.precision, device)
    if settings.device == "cpu":
        tokens = sum(map(sum, samples)) * of_run.global_batch_size // max(len(samples), 1)
        device = measure_processor(model.config, tokens, precision)
    return Finetuning(
        config=model.config,
        samples=samples,
        dev_samples=[sample for dev in devs for sample in window_lengths(dev)],
        epochs=of_run.epochs,
        global_batch_size=of_run.global_batch_size,
        devices=settings.devices,
        device=settings.linked(device, settings.strategy),
        precision=precision,
        frozen_layers=settings.frozen_layers,
        static_length=training.task.max_seq_length if settings.strategy == "tpu" else None,
        is_frozen=training.task.trains_on_vectors,
        runs=len(runs),
        accumulation_steps=of_run.gradient_accumulation_steps,
        is_cached=of_run.gradient_accumulation_steps > 1
        and any(isinstance(loss, BatchLoss) for loss in training.task.losses.values()),
    )


def window_lengths(encoded: EncodedExamples) -> list[list[int]]:
    """Return the tokens of each window by sample; samples without windows are left out."""
    lengths_W = encoded.windows.packed.input_ids.row_lengths().numpy().tolist()
    splits = encoded.sample_splits.tolist()
    samples = (lengths_W[first:last] for first, last in itertools.pairwise(splits))
    return [sample for sample in samples if sample]
