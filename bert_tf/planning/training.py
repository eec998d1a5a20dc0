"""Time, memory and traffic of pretraining, from a roofline of the device."""

import dataclasses
import math

from bert_tf.config import BertConfig
from bert_tf.planning.devices import Device
from bert_tf.planning.memory import (
    StepSizes,
    count_parameters,
    largest_batch,
    process_memory,
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


@dataclasses.dataclass(frozen=True)
class Training:
    """A training and the devices that it runs on.

    Attributes:
        sizes: Step on one replica, without gradient accumulation.
        global_batch_size: Examples per step, over all devices.
        tokens: Tokens of the training, with padding.
        devices: Number of devices, each with a replica.
        device: The device.
    """

    sizes: StepSizes
    global_batch_size: int
    tokens: float
    devices: int
    device: Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated cost of a training. Times are in seconds, sizes in bytes.

    Attributes:
        memory: Memory of a replica by component, with "peak" and, on a processor, "process".
        fits: Whether the peak fits into the device.
        largest_batch: Most examples per forward pass that fit.
        num_steps: Training steps of a run.
        step_seconds: Mean time of a step.
        seconds: Time of all runs.
        all_reduce_seconds: Part of the step that sums gradients.
        all_reduce_bytes: Bytes that each device sends per step.
        checkpoint_bytes: One checkpoint.
    """

    memory: dict[str, int]
    fits: bool
    largest_batch: int
    num_steps: int
    step_seconds: float
    seconds: float
    all_reduce_seconds: float
    all_reduce_bytes: float
    checkpoint_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingEstimate(Estimate):
    """Estimated cost of a pretraining.

    Attributes:
        accumulation_steps: Forward passes per step and replica.
        shard_bytes: Shards that contain the tokens once.
    """

    accumulation_steps: int
    shard_bytes: float


def flops_per_token(config: BertConfig, length: int, predictions: int) -> float:
    """Return the floating-point operations of a training step per token.

    Counts matrix products only: a multiply-add is 2 operations, the backward pass twice the forward
    pass. Attention spans `length` tokens. The masked language model head runs on the `predictions`
    of a sequence alone.
    """
    return 3 * forward_flops(StepSizes(config, 1, length, predictions)) / length


def estimate(training: Training) -> PretrainingEstimate:
    """Estimate the cost of a pretraining."""
    sizes, device = training.sizes, training.device
    memory, available = step_memory(sizes), usable_memory(device, sizes.config)
    per_replica = training.global_batch_size / training.devices
    overhead, reduce_seconds, traffic = step_overhead(sizes, training.devices, device)
    examples = training.tokens / sizes.length
    num_steps = math.ceil(examples / training.global_batch_size)
    step_seconds = per_replica * example_seconds(sizes, device) + overhead
    return PretrainingEstimate(
        memory=add_process(memory, device, sizes.config),
        fits=memory["peak"] <= available,
        largest_batch=largest_batch(sizes, available),
        accumulation_steps=math.ceil(per_replica / sizes.examples),
        num_steps=num_steps,
        step_seconds=step_seconds,
        seconds=num_steps * step_seconds,
        all_reduce_seconds=reduce_seconds,
        all_reduce_bytes=traffic,
        shard_bytes=examples * example_bytes(sizes.length, sizes.predictions),
        checkpoint_bytes=checkpoint_bytes(sizes),
    )


def usable_memory(device: Device, config: BertConfig) -> float:
    """Return the bytes that a model's tensors may take of a device."""
    if device.is_accelerator:
        return USABLE_MEMORY * device.memory
    return device.memory - process_memory(config)


def add_process(memory: dict[str, int], device: Device, config: BertConfig) -> dict[str, int]:
    """Return components of memory with "process", if it is in the same memory."""
    return memory if device.is_accelerator else {**memory, "process": process_memory(config)}


def checkpoint_bytes(sizes: StepSizes) -> int:
    """Return the bytes of weights and moments."""
    parameters = count_parameters(sizes.config, bool(sizes.predictions))
    return _FLOAT32 * (parameters + 2 * sizes.trained_parameters)


def step_overhead(sizes: StepSizes, devices: int, device: Device) -> tuple[float, float, float]:
    """Return the part of a step that does not grow with the batch.

    Returns:
        Seconds of all but the products, seconds of the sum of gradients, and bytes that a device
        sends.
    """
    gradients = sizes.trained_parameters * _FLOAT32
    # A ring: each device sends all but one part twice.
    traffic = 2 * (devices - 1) / devices * gradients
    reduce_seconds = traffic / device.link
    seconds = _ACCESSES_OF_UPDATE * gradients / device.bandwidth + reduce_seconds
    if not device.is_accelerator:
        seconds += STEP_SECONDS + LAYER_SECONDS * sizes.config.num_hidden_layers
    return seconds, reduce_seconds, traffic


def forward_flops(sizes: StepSizes) -> float:
    """Return the floating-point operations of the matrix products of a forward pass per example."""
    config, length = sizes.config, sizes.length
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = length * layers * (4 * hidden**2 + 2 * hidden * inner)
    attention = layers * 2 * sizes.attention_length**2 * hidden
    head = sizes.predictions * (hidden**2 + hidden * config.vocab_size)
    return 2 * (weights + attention + head)


def forward_seconds(sizes: StepSizes, device: Device, training: bool = False) -> float:
    """Return the time of a forward pass per example on one device."""
    rate = device.flops[sizes.precision] * device.efficiency[sizes.precision]
    seconds = forward_flops(sizes) / rate
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
    return forward_seconds(sizes, device, training=True) * (1 + backward * trained)


def example_bytes(length: float, predictions: int) -> float:
    """Return the bytes of an example in shards: varints of 1 to 3 bytes, and float32 weights."""
    return 160 + 4.1 * length + 7.3 * predictions
