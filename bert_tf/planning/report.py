"""Lines of text for estimates."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from bert_tf.planning.devices import Device
from bert_tf.planning.estimates import (
    Finetuning,
    FinetuningEstimate,
    PretrainingEstimate,
    ServingEstimate,
    Training,
    estimate,
)

LONG_LENGTH, SHORT_LENGTH = 512, 128


def device_line(device: Device, precision: str, is_measured: bool) -> str:
    """Return the rates that an estimate is based on."""
    rate, efficiency = device.flops[precision], device.efficiency[precision]
    if device.is_accelerator:
        source = f"peak of the data sheet, of which BERT reaches {efficiency:.0%}"
    else:
        source = "measured here" if is_measured else "typical, --calibrate measures it"
    return (
        f"device: {rate / 1e9:,.0f} GFLOP/s in {precision} ({source}), "
        f"{device.bandwidth / 1e9:,.0f} GB/s of memory"
    )


def memory_lines(memory: Mapping[str, int]) -> Iterator[str]:
    """Yield one line per component of `step_memory` that takes memory."""
    width = max(map(len, memory))
    for name, size in memory.items():
        if size:
            yield f"  {name:{width}}  {size / 1e9:8.2f} GB"


def training_lines(training: Training, result: PretrainingEstimate) -> Iterator[str]:
    """Yield the report of an estimate: memory, time, traffic, disk and cheaper settings."""
    sizes, devices = training.sizes, training.devices
    yield f"memory per device, {sizes.examples} examples of {sizes.length} tokens at once:"
    yield from memory_lines(result.memory)
    verdict = _verdict(result, training.device)
    yield f"{verdict}; the largest batch that fits: {result.largest_batch}"
    yield "time:"
    yield f"  steps             {result.num_steps:,} of {training.global_batch_size} examples"
    yield f"  forward passes    {result.accumulation_steps} per step and device"
    yield f"  seconds per step  {result.step_seconds:.3g}"
    rate = training.global_batch_size * sizes.length / result.step_seconds
    yield f"  tokens per second {rate:,.0f}"
    yield f"  hours             {_hours(result)}; device-hours {_hours(result, devices)}"
    yield from _traffic(result, devices)
    yield "disk:"
    yield f"  shards            {result.shard_bytes / 1e9:,.1f} GB for all tokens once"
    yield (
        f"  checkpoint        {result.checkpoint_bytes / 1e9:.2f} GB, of which a run keeps two, "
        "and the best one with --eval_shards"
    )
    cheaper = list(_cheaper(training, result))
    if cheaper:
        yield "cheaper:"
        yield from cheaper


def finetuning_lines(plan: Finetuning, result: FinetuningEstimate) -> Iterator[str]:
    """Yield the report of a fine-tuning."""
    counts = [len(sample) for sample in plan.samples]
    tokens = sum(map(sum, plan.samples))
    yield (
        f"{len(counts):,} samples of {tokens / len(counts):.1f} tokens on average, at most "
        f"{max(map(sum, plan.samples))}"
    )
    yield f"memory per device, {result.most_tokens:,} tokens at once:"
    yield from memory_lines(result.memory)
    batch = f"; the largest batch of the longest samples: {result.largest_batch}"
    yield _verdict(result, plan.device) + batch * (not plan.is_frozen)
    yield "time:"
    yield f"  steps             {result.num_steps:,} of {plan.global_batch_size} samples"
    if plan.is_frozen:
        yield "  encoder           runs once per sample; the steps after it are not estimated"
    else:
        yield f"  tokens per step   {result.tokens_per_step:,.0f}, without padding"
        yield f"  seconds per step  {result.step_seconds:.3g}"
    yield f"  evaluations       {_duration(result.evaluation_seconds)}"
    of_runs = f" of {plan.runs} runs" * (plan.runs > 1)
    hours = f"{plan.devices * result.seconds / 3600:,.2f}"
    yield f"  total             {_duration(result.seconds)}{of_runs}; device-hours {hours}"
    yield from _traffic(result, plan.devices)
    yield f"disk: {result.checkpoint_bytes / 1e9:.2f} GB per checkpoint, of which a run keeps three"


def serving_lines(
    results: Sequence[ServingEstimate], length: float, device: Device
) -> Iterator[str]:
    """Yield the report of a served model for several numbers of texts per request."""
    largest = results[-1]
    yield f"memory per device, {largest.texts} texts of {length:g} tokens per request:"
    yield from memory_lines(largest.memory)
    yield _verdict(largest, device)
    yield "texts per request   milliseconds   texts per second   reading weights"
    for result in results:
        yield (
            f"{result.texts:17}   {1000 * result.request_seconds:12,.1f}   "
            f"{result.texts_per_second:16,.1f}   {result.weights_fraction:15.0%}"
        )


def _verdict(result, device):
    total = result.memory["peak"] + result.memory.get("process", 0)
    verdict = "fits into" if result.fits else "DOES NOT FIT into"
    return f"  {total / 1e9:.1f} GB {verdict} {device.memory / 1e9:.0f} GB"


def _traffic(result, devices):
    if devices > 1 and result.step_seconds:
        yield (
            f"  gradients         {result.all_reduce_bytes / 1e9:.2f} GB sent per device and step, "
            f"{result.all_reduce_seconds / result.step_seconds:.1%} of the time"
        )


def _duration(seconds):
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 3600:,.2f} hours"


def _hours(result, devices=1):
    hours = devices * result.seconds / 3600
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _cheaper(training, result):
    """Yield settings that take at least 3% less time or make the training fit."""
    sizes, flops = training.sizes, training.device.flops
    # Most devices have the same rate for both.
    half = "float16" if flops.get("float16", 0) > flops.get("bfloat16", 0) else "bfloat16"
    options = {
        f"--precision={precision}": {"precision": precision}
        for precision in (half, "tf32")
        if precision in flops
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
