"""Time and memory of fine-tuning, from the lengths of the rows.

A sample is a row, or all windows of an example that belong together, as in `tasks`. Steps are those
of a random order; tokens are not padded, except for XLA.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bert_tf.config import BertConfig
from bert_tf.model.bucketing import EVALUATION_BATCH_SIZE, bucket_of
from bert_tf.planning.devices import Device
from bert_tf.planning.memory import StepSizes, inference_memory, largest_batch, step_memory
from bert_tf.planning.training import (
    Estimate,
    add_process,
    checkpoint_bytes,
    example_seconds,
    forward_seconds,
    step_overhead,
    usable_memory,
)

# On a processor, steps with batches of other shapes take longer than a repeated step, and as much
# memory again as activations and temporary tensors. The factor is fitted to the recipes that
# benchmarks/scale.py measures.
SHAPES_FACTOR = 1.25
# TensorFlow Text and scikit-learn with its dependencies, which pretraining does not import.
IMPORTS_BYTES = 160_000_000


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """A fine-tuning and the devices that it runs on.

    Attributes:
        config: Model.
        samples: Lengths of the windows of each training sample, in tokens.
        dev_samples: The same of all dev files, which are evaluated after each epoch.
        epochs: Passes over the samples.
        global_batch_size: Samples per step, over all devices.
        devices: Number of devices, each with a replica.
        device: The device.
        precision: "float32", "tf32" or "bfloat16".
        frozen_layers: Lowest layers that are not trained, with the embeddings; `None` for none.
        static_length: Tokens to which every window is padded, as XLA requires, or `None`.
        is_frozen: Whether the encoder runs once per sample, without training.
        runs: Number of runs, one after the other.
        accumulation_steps: Parts of a batch that a device computes one after the other.
        is_cached: Whether a step computes the outputs of all parts before it computes them again
            with their gradients.
    """

    config: BertConfig
    samples: Sequence[Sequence[int]]
    dev_samples: Sequence[Sequence[int]]
    epochs: int
    global_batch_size: int
    devices: int
    device: Device
    precision: str = "float32"
    frozen_layers: int | None = None
    static_length: int | None = None
    is_frozen: bool = False
    runs: int = 1
    accumulation_steps: int = 1
    is_cached: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningEstimate(Estimate):
    """Estimated cost of a fine-tuning; its memory is that of the batch with most tokens.

    Attributes:
        tokens_per_step: Mean over the steps, without padding.
        most_tokens: Tokens of the largest batch of a replica, or of the largest part of one.
        evaluation_seconds: Evaluations of a run.
    """

    tokens_per_step: float
    most_tokens: int
    evaluation_seconds: float


def estimate_finetuning(plan: Finetuning) -> FinetuningEstimate:
    """Estimate the cost of a fine-tuning."""
    steps = math.ceil(len(plan.samples) / plan.global_batch_size)
    order = np.random.default_rng(0).permutation(len(plan.samples))
    parts = plan.accumulation_steps
    per_part = math.ceil(plan.global_batch_size / (plan.devices * parts))
    batches = [
        [
            _sizes(plan, [plan.samples[number] for number in part])
            for part in _split(of_step, per_part)
        ]
        for of_step in _split(order, plan.global_batch_size)
    ]
    memory_of = step_memory if plan.device.is_accelerator else _memory_on_processor
    largest = max((sizes for step in batches for sizes in step), key=_tokens)
    devs = [_sizes(plan, part) for part in _split(plan.dev_samples, EVALUATION_BATCH_SIZE)]
    evaluation = sum(_forward(sizes, plan.device) for sizes in devs) / plan.devices
    if plan.is_frozen:
        memory = _frozen_memory(plan, [*devs, largest])
        forward = sum(_forward(sizes, plan.device) for step in batches for sizes in step)
        step_seconds, traffic, reducing = 0.0, 0.0, 0.0
        seconds = forward / plan.devices + evaluation
    else:
        memory = memory_of(largest)
        overhead, reducing, traffic = step_overhead(largest, plan.devices, plan.device)

        def part_seconds(sizes):
            again = _forward(sizes, plan.device) if plan.is_cached else 0.0
            return sizes.examples * example_seconds(sizes, plan.device) + again

        # Replicas wait for the slowest one.
        products = [
            max(sum(map(part_seconds, of_replica)) for of_replica in _split(step, parts))
            for step in batches
        ]
        factor = 1 if plan.device.is_accelerator else SHAPES_FACTOR
        step_seconds = factor * float(np.mean(products)) + overhead
        evaluation *= plan.epochs
        seconds = plan.epochs * steps * step_seconds + evaluation
    available = usable_memory(plan.device, plan.config)
    longest = plan.static_length or max(max(sample) for sample in plan.samples)
    windows = math.ceil(np.mean([len(sample) for sample in plan.samples]))
    of_longest = dataclasses.replace(largest, examples=1, length=longest, longest=longest)
    most = 0 if plan.is_frozen else largest_batch(of_longest, available, memory_of) // windows
    return FinetuningEstimate(
        memory=add_process(memory, plan.device, plan.config),
        fits=memory["peak"] <= available,
        largest_batch=most * parts,
        num_steps=steps * plan.epochs,
        tokens_per_step=sum(map(sum, plan.samples)) / steps,
        most_tokens=round(_tokens(largest)),
        step_seconds=step_seconds,
        evaluation_seconds=evaluation,
        all_reduce_bytes=traffic,
        all_reduce_seconds=reducing,
        checkpoint_bytes=checkpoint_bytes(largest),
        seconds=plan.runs * seconds,
    )


def _split(values, size):
    return [values[first : first + size] for first in range(0, len(values), size)]


def _sizes(plan, samples):
    """Return the sizes of a batch; the flat layout rounds its tokens up to a bucket."""
    lengths = [length for sample in samples for length in sample]
    if plan.static_length:
        length, longest = plan.static_length, plan.static_length
    else:
        length, longest = bucket_of(sum(lengths)) / len(lengths), bucket_of(max(lengths))
    return StepSizes(
        plan.config,
        len(lengths),
        length,
        predictions=0,
        precision=plan.precision,
        longest=longest,
        frozen_layers=plan.frozen_layers,
    )


def _tokens(sizes):
    return sizes.examples * sizes.length


def _forward(sizes, device):
    return sizes.examples * forward_seconds(sizes, device)


def _memory_on_processor(sizes):
    memory = step_memory(sizes)
    heap = memory["activations"] + memory["temporary tensors of a layer"]
    return {
        **memory,
        "heap of batches of other shapes": heap,
        "TensorFlow Text and scikit-learn": IMPORTS_BYTES,
        "peak": memory["peak"] + heap + IMPORTS_BYTES,
    }


def _frozen_memory(plan, batches):
    largest = max(batches, key=_tokens)
    pairs = largest.examples * largest.attention_length**2
    return inference_memory(plan.config, round(_tokens(largest)), round(pairs), plan.precision)
