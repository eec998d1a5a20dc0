"""Lines of text for estimates."""

import dataclasses
from collections.abc import Iterator, Mapping

from bert_tf.planning.training import Estimate, Training, estimate

LONG_LENGTH, SHORT_LENGTH = 512, 128


def memory_lines(memory: Mapping[str, int]) -> Iterator[str]:
    """Yield one line per component of `step_memory` that takes memory."""
    width = max(map(len, memory))
    for name, size in memory.items():
        if size:
            yield f"  {name:{width}}  {size / 1e9:8.2f} GB"


def training_lines(training: Training, result: Estimate) -> Iterator[str]:
    """Yield the report of an estimate: memory, time, traffic, disk and cheaper settings."""
    sizes, devices = training.sizes, training.devices
    yield f"memory per device, {sizes.examples} examples of {sizes.length} tokens at once:"
    yield from memory_lines(result.memory)
    total = result.memory["peak"] + result.memory.get("process", 0)
    verdict = "fits into" if result.fits else "DOES NOT FIT into"
    yield (
        f"  {total / 1e9:.1f} GB {verdict} {training.device.memory / 1e9:.0f} GB; the largest "
        f"batch that fits: {result.largest_batch}"
    )
    yield "time:"
    yield f"  steps             {result.num_steps:,} of {training.global_batch_size} examples"
    yield f"  forward passes    {result.accumulation_steps} per step and device"
    yield f"  seconds per step  {result.step_seconds:.3g}"
    rate = training.global_batch_size * sizes.length / result.step_seconds
    yield f"  tokens per second {rate:,.0f}"
    yield f"  hours             {_hours(result)}; device-hours {_hours(result, devices)}"
    if devices > 1:
        yield (
            f"  gradients         {result.all_reduce_bytes / 1e9:.2f} GB sent per device and step, "
            f"{result.all_reduce_seconds / result.step_seconds:.1%} of the time"
        )
    yield "disk:"
    yield f"  shards            {result.shard_bytes / 1e9:,.1f} GB for all tokens once"
    yield f"  checkpoint        {result.checkpoint_bytes / 1e9:.2f} GB, of which a run keeps two"
    cheaper = list(_cheaper(training, result))
    if cheaper:
        yield "cheaper:"
        yield from cheaper


def _hours(result, devices=1):
    return f"{devices * result.seconds / 3600:,.1f}"


def _cheaper(training, result):
    """Yield settings that take at least 3% less time or make the training fit."""
    sizes = training.sizes
    options = {
        "--precision=bfloat16": {"precision": "bfloat16"},
        "--precision=tf32": {"precision": "tf32"},
    }
    if sizes.gradient_checkpointing:
        options["no --gradient_checkpointing"] = {"gradient_checkpointing": False}
    for name, changes in options.items():
        other = estimate(dataclasses.replace(training, sizes=dataclasses.replace(sizes, **changes)))
        if other.fits and other.seconds < 0.97 * result.seconds:
            yield f"  {name}: {_hours(other)} hours, {other.memory['peak'] / 1e9:.1f} GB"
    if sizes.length == LONG_LENGTH:
        predictions = sizes.predictions * SHORT_LENGTH // LONG_LENGTH
        short = dataclasses.replace(sizes, length=SHORT_LENGTH, predictions=predictions)
        phase = estimate(dataclasses.replace(training, sizes=short, tokens=0.9 * training.tokens))
        hours = (phase.seconds + 0.1 * result.seconds) / 3600
        yield f"  90% of the tokens in sequences of {SHORT_LENGTH}: {hours:,.1f} hours"
    if not result.fits and result.largest_batch:
        yield f"  --gradient_accumulation_steps, {result.largest_batch} examples at once: it fits"
    elif not result.fits and not sizes.gradient_checkpointing:
        yield "  --gradient_checkpointing: less memory for activations"
