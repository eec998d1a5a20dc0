"""Time, memory and traffic of a training or a served model, from a roofline of the device.

A sample of fine-tuning is a row, or all windows of an example that belong together, as in `tasks`.
Steps are those of a random order; tokens are not padded, except for XLA.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bert_tf.config import BertConfig
from bert_tf.model.bucketing import (
    EVALUATION_BATCH_SIZE,
    SHORT_TOKENS,
    TOKENS_PER_CHUNK,
    bucket_of,
)
from bert_tf.planning.devices import Device
from bert_tf.planning.memory import (
    StepSizes,
    count_parameters,
    inference_memory,
    largest_batch,
    process_memory,
    served_bytes,
    step_memory,
)

_FLOAT32 = 4
# Memory that the runtime, its libraries and fragmentation take of an accelerator.
USABLE_MEMORY = 0.92
# An update reads weight, gradient and both moments, and writes all but the gradient. Before, the
# gradient is read for its norm, and read and written to be clipped.
_ACCESSES_OF_UPDATE = 10
# On a processor: operations of a step, and of a layer, that take as long for few tokens as for
# many. Fitted to steps of 16 and 128 tokens (benchmarks/scale.py).
STEP_SECONDS, LAYER_SECONDS = 5e-3, 0.6e-3
# The arithmetic between the products of a forward pass on a processor: how often as many values of
# float32 could be read from memory. Fitted to benchmarks/scale.py. Dropout of the attention
# probabilities is a part of training alone.
_ACCESSES_OF_ACTIVATION, _ACCESSES_OF_LOGIT = 2, 10
_ACCESSES_OF_SCORE, _ACCESSES_OF_SCORE_WITH_DROPOUT = 2, 8
# On a processor, steps with batches of other shapes take longer than a repeated step, and as much
# memory again as activations and temporary tensors. The factor is fitted to the recipes that
# benchmarks/scale.py measures.
SHAPES_FACTOR = 1.25
# TensorFlow Text and scikit-learn with its dependencies, which pretraining does not import.
IMPORTS_BYTES = 160_000_000


@dataclasses.dataclass(frozen=True)
class Training:
    """A training and the devices that it runs on."""

    sizes: StepSizes  # Step on one replica, or a part of it.
    global_batch_size: int  # Examples per step, over all devices.
    tokens: float  # Tokens of the training, with padding.
    devices: int  # Number of devices, each with a replica.
    device: Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated cost of a training. Times are in seconds, sizes in bytes."""

    # Memory of a replica by component, with "peak" and, on a processor, "process".
    memory: dict[str, int]
    fits: bool  # Whether the peak fits into the device.
    largest_batch: int  # Most examples per forward pass that fit.
    num_steps: int  # Training steps of a run.
    step_seconds: float  # Mean time of a step.
    seconds: float  # Time of all runs.
    all_reduce_seconds: float  # Part of the step that sums gradients.
    all_reduce_bytes: float  # Bytes that each device sends per step.
    checkpoint_bytes: float  # One checkpoint.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingEstimate(Estimate):
    """Estimated cost of a pretraining."""

    accumulation_steps: int  # Forward passes per step and replica.
    shard_bytes: float  # Shards that contain the tokens once.


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """A fine-tuning and the devices that it runs on."""

    config: BertConfig
    samples: Sequence[Sequence[int]]  # Lengths of the windows of each training sample, in tokens.
    # The same of all dev files, which are evaluated after each epoch.
    dev_samples: Sequence[Sequence[int]]
    epochs: float  # Passes over the samples.
    global_batch_size: int  # Samples per step, over all devices.
    devices: int  # Number of devices, each with a replica.
    device: Device
    precision: str = "float32"  # "float32", "tf32", "bfloat16" or "float16".
    # Lowest layers that are not trained, with the embeddings; `None` for none.
    frozen_layers: int | None = None
    # Tokens to which every window is padded, as XLA requires, or `None`.
    static_length: int | None = None
    is_frozen: bool = False  # Whether the encoder runs once per sample, without training.
    runs: int = 1  # Number of runs, one after the other.
    accumulation_steps: int = 1  # Parts of a batch that a device computes one after the other.
    is_cached: bool = False  # Whether a step computes the outputs of all parts twice.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuningEstimate(Estimate):
    """Estimated cost of a fine-tuning; its memory is that of the batch with most tokens."""

    tokens_per_step: float  # Mean over the steps, without padding.
    most_tokens: int  # Tokens of the largest batch of a replica, or of the largest part of one.
    evaluation_seconds: float  # Evaluations of a run.


@dataclasses.dataclass(frozen=True)
class ServingEstimate:
    """Estimated cost of a request."""

    texts: int  # Texts per request.
    memory: dict[str, int]  # Memory in bytes by component.
    fits: bool  # Whether the peak fits into the device.
    request_seconds: float  # Time of a request, one request at a time.
    weights_fraction: float  # Part of the time that reads the weights.

    @property
    def texts_per_second(self) -> float:
        """Rate of one device."""
        return self.texts / self.request_seconds


def estimate(training: Training) -> PretrainingEstimate:
    """Estimate the cost of a pretraining."""
    device = training.device
    sizes = dataclasses.replace(training.sizes, is_compiled=device.is_accelerator)
    per_replica = training.global_batch_size / training.devices
    accumulation_steps = math.ceil(per_replica / sizes.examples)
    at_once, in_parts = (
        dataclasses.replace(sizes, accumulates=accumulates) for accumulates in (False, True)
    )
    memory = step_memory(in_parts if accumulation_steps > 1 else at_once)
    memory, available = _in_memory(memory, device, sizes.config)
    largest = largest_batch(at_once, available)
    if largest < per_replica:  # The batch has to be computed in parts.
        largest = largest_batch(in_parts, available)
    overhead, reduce_seconds, traffic = _step_overhead(sizes, training.devices, device)
    examples = training.tokens / sizes.length
    num_steps = math.ceil(examples / training.global_batch_size)
    step_seconds = per_replica * example_seconds(sizes, device) + overhead
    return PretrainingEstimate(
        memory=memory,
        fits=memory["peak"] <= available,
        largest_batch=largest,
        accumulation_steps=accumulation_steps,
        num_steps=num_steps,
        step_seconds=step_seconds,
        seconds=num_steps * step_seconds,
        all_reduce_seconds=reduce_seconds,
        all_reduce_bytes=traffic,
        shard_bytes=examples * example_bytes(sizes.length, sizes.predictions),
        checkpoint_bytes=_checkpoint_bytes(sizes),
    )


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
        batch = max([*devs, largest], key=_tokens)
        pairs = round(batch.examples * batch.attention_length**2)
        memory = inference_memory(plan.config, round(_tokens(batch)), pairs, plan.precision)
        forward = sum(_forward(sizes, plan.device) for step in batches for sizes in step)
        step_seconds, traffic, reducing = 0.0, 0.0, 0.0
        seconds = forward / plan.devices + evaluation
    else:
        memory = memory_of(largest)
        overhead, reducing, traffic = _step_overhead(largest, plan.devices, plan.device)

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
    memory, available = _in_memory(memory, plan.device, plan.config)
    longest = plan.static_length or max(max(sample) for sample in plan.samples)
    windows = math.ceil(np.mean([len(sample) for sample in plan.samples]))
    of_longest = dataclasses.replace(largest, examples=1, length=longest, longest=longest)
    most = 0 if plan.is_frozen else largest_batch(of_longest, available, memory_of) // windows
    return FinetuningEstimate(
        memory=memory,
        fits=memory["peak"] <= available,
        largest_batch=most * parts,
        num_steps=round(steps * plan.epochs),
        tokens_per_step=sum(map(sum, plan.samples)) / steps,
        most_tokens=round(_tokens(largest)),
        step_seconds=step_seconds,
        evaluation_seconds=evaluation,
        all_reduce_bytes=traffic,
        all_reduce_seconds=reducing,
        checkpoint_bytes=_checkpoint_bytes(largest),
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
        accumulates=plan.accumulation_steps > 1,
        is_compiled=plan.device.is_accelerator,
    )


def _tokens(sizes):
    return sizes.examples * sizes.length


def _forward(sizes, device):
    return sizes.examples * _forward_seconds(sizes, device)


def _memory_on_processor(sizes):
    memory = step_memory(sizes)
    heap = memory["activations"] + memory["temporary tensors of a layer"]
    return {
        **memory,
        "heap of batches of other shapes": heap,
        "TensorFlow Text and scikit-learn": IMPORTS_BYTES,
        "peak": memory["peak"] + heap + IMPORTS_BYTES,
    }


def estimate_serving(
    config: BertConfig, length: float, texts: int, device: Device, precision: str = "float32"
) -> ServingEstimate:
    """Estimate a request: the weights are read from memory once, then each text is computed.

    `length` are tokens per text, with [CLS] and [SEP].
    """
    sizes = StepSizes(config, texts, length, 0, precision)
    reading = served_bytes(config, precision, layers_only=True) / device.bandwidth
    seconds = reading + texts * _forward_seconds(sizes, device)
    is_short = texts == 1 and length <= SHORT_TOKENS
    of_chunk = min(texts, max(1, int(TOKENS_PER_CHUNK // length)))
    is_packed = not device.is_accelerator and (precision in ("bfloat16", "int8") or is_short)
    tokens, pairs = round(of_chunk * length), round(of_chunk * length**2)
    memory = inference_memory(config, tokens, pairs, precision, is_packed)
    memory, available = _in_memory(memory, device, config)
    return ServingEstimate(
        texts=texts,
        memory=memory,
        fits=memory["peak"] <= available,
        request_seconds=seconds,
        weights_fraction=reading / seconds,
    )


def flops_per_token(config: BertConfig, length: int, predictions: int) -> float:
    """Return the floating-point operations of a training step per token.

    Counts matrix products only: a multiply-add is 2 operations, the backward pass twice the forward
    pass. Attention spans `length` tokens. The masked language model head runs on the `predictions`
    of a sequence alone.
    """
    return 3 * _forward_flops(StepSizes(config, 1, length, predictions)) / length


def _in_memory(memory, device, config):
    """Return memory with "process", if it is on the same device, and the bytes for tensors."""
    if device.is_accelerator:
        return memory, USABLE_MEMORY * device.memory
    process = process_memory(config)
    return {**memory, "process": process}, device.memory - process


def _checkpoint_bytes(sizes):
    """Return the bytes of weights and moments."""
    parameters = count_parameters(sizes.config, bool(sizes.predictions))
    return _FLOAT32 * (parameters + 2 * sizes.trained_parameters)


def _step_overhead(sizes, devices, device):
    """Return the part of a step that does not grow with the batch.

    Seconds of all but the products, seconds of the sum of gradients, and bytes that a device sends.
    """
    gradients = sizes.trained_parameters * _FLOAT32
    # A ring: each device sends all but one part twice.
    traffic = 2 * (devices - 1) / devices * gradients
    reduce_seconds = traffic / device.link
    seconds = _ACCESSES_OF_UPDATE * gradients / device.bandwidth + reduce_seconds
    if not device.is_accelerator:
        seconds += STEP_SECONDS + LAYER_SECONDS * sizes.config.num_hidden_layers
    return seconds, reduce_seconds, traffic


def _forward_flops(sizes):
    """Return the floating-point operations of the matrix products of a forward pass per example."""
    config, length = sizes.config, sizes.length
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = length * layers * (4 * hidden**2 + 2 * hidden * inner)
    attention = layers * 2 * sizes.attention_length**2 * hidden
    head = sizes.predictions * (hidden**2 + hidden * config.vocab_size)
    return 2 * (weights + attention + head)


def _forward_seconds(sizes, device, training=False):
    """Return the time of a forward pass per example on one device."""
    rate = device.flops[sizes.precision] * device.efficiency[sizes.precision]
    seconds = _forward_flops(sizes) / rate
    # Efficiencies contain the arithmetic between the products, the rate of a processor does not.
    return seconds + (0 if device.is_accelerator else _elementwise_seconds(sizes, device, training))


def _elementwise_seconds(sizes, device, training):
    config, layers = sizes.config, sizes.config.num_hidden_layers
    # As in `step_memory`, with the output of GELU.
    activations = layers * sizes.length * (8 * config.hidden_size + 2 * config.intermediate_size)
    scores = layers * sizes.attention_length**2 * config.num_attention_heads
    logits = sizes.predictions * config.vocab_size
    accesses = _ACCESSES_OF_ACTIVATION * activations + _ACCESSES_OF_LOGIT * logits
    accesses += (_ACCESSES_OF_SCORE_WITH_DROPOUT if training else _ACCESSES_OF_SCORE) * scores
    return _FLOAT32 * accesses / device.bandwidth


def example_seconds(sizes: StepSizes, device: Device) -> float:
    """Return the time of forward and backward pass per example on one device."""
    # The backward pass has twice the products, and a recomputed forward pass once more.
    backward = 2 + sizes.gradient_checkpointing
    trained = sizes.trained_layers / sizes.config.num_hidden_layers
    return _forward_seconds(sizes, device, training=True) * (1 + backward * trained)


def example_bytes(length: float, predictions: int) -> float:
    """Return the bytes of an example in shards: varints of 1 to 3 bytes, and float32 weights."""
    return 160 + 4.1 * length + 7.3 * predictions
