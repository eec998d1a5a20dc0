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
# An update reads weight, gradient and both moments, and writes all but the gradient.
_ACCESSES_OF_UPDATE = 7
# The arithmetic between the products of a step, as a fraction of their time (docs/performance.md).
ELEMENTWISE = 0.15


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


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated cost of a training. Times are in seconds, sizes in bytes.

    Attributes:
        memory: Memory of a replica by component, with "peak" and, on a processor, "process".
        fits: Whether the peak fits into the device.
        largest_batch: Most examples per forward pass that fit.
        accumulation_steps: Forward passes per step and replica.
        num_steps: Training steps.
        step_seconds: Time of a step.
        all_reduce_seconds: Part of it that sums gradients.
        all_reduce_bytes: Bytes that each device sends per step.
        shard_bytes: Shards that contain the tokens once.
        checkpoint_bytes: One checkpoint.
    """

    memory: dict[str, int]
    fits: bool
    largest_batch: int
    accumulation_steps: int
    num_steps: int
    step_seconds: float
    all_reduce_seconds: float
    all_reduce_bytes: float
    shard_bytes: float
    checkpoint_bytes: float

    @property
    def seconds(self) -> float:
        """Time of the training."""
        return self.num_steps * self.step_seconds


def flops_per_token(config: BertConfig, length: int, predictions: int) -> float:
    """Return the floating-point operations of a training step per token.

    Counts matrix products only: a multiply-add is 2 operations, the backward pass twice the forward
    pass. The masked language model head runs on the predictions alone.

    Args:
        config: Model size.
        length: Tokens per sequence, which attention spans.
        predictions: Masked positions per sequence.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * hidden**2 + 2 * hidden * inner)
    attention = layers * 2 * length * hidden
    head = predictions / length * (hidden**2 + hidden * config.vocab_size)
    return 3 * 2 * (weights + attention + head)


def estimate(training: Training) -> Estimate:
    """Estimate the cost of a training."""
    sizes, device = training.sizes, training.device
    config = sizes.config
    memory = step_memory(sizes)
    available = device.memory * (USABLE_MEMORY if device.is_accelerator else 1)
    if not device.is_accelerator:
        memory["process"] = process_memory(config)
        available -= memory["process"]
    parameters = count_parameters(config)
    per_replica = training.global_batch_size / training.devices
    accumulation = math.ceil(per_replica / sizes.examples)
    traffic = 0.0
    if training.devices > 1:
        # A ring: each device sends all but one part twice.
        traffic = 2 * (training.devices - 1) / training.devices * parameters * _FLOAT32
    reduce_seconds = traffic / device.link
    seconds = per_replica * example_seconds(sizes, device)
    seconds += _ACCESSES_OF_UPDATE * parameters * _FLOAT32 / device.bandwidth + reduce_seconds
    examples = training.tokens / sizes.length
    return Estimate(
        memory=memory,
        fits=memory["peak"] <= available,
        largest_batch=largest_batch(sizes, available),
        accumulation_steps=accumulation,
        num_steps=math.ceil(examples / training.global_batch_size),
        step_seconds=seconds,
        all_reduce_seconds=reduce_seconds,
        all_reduce_bytes=traffic,
        shard_bytes=examples * example_bytes(sizes.length, sizes.predictions),
        checkpoint_bytes=3 * _FLOAT32 * parameters,
    )


def example_seconds(sizes: StepSizes, device: Device) -> float:
    """Return the time of forward and backward pass per example on one device."""
    flops = sizes.length * flops_per_token(sizes.config, sizes.length, sizes.predictions)
    flops *= 4 / 3 if sizes.gradient_checkpointing else 1
    rate = device.flops[sizes.precision] * device.efficiency[sizes.precision]
    # Efficiencies contain the arithmetic between the products, the rate of a processor does not.
    return flops / rate * (1 if device.is_accelerator else 1 + ELEMENTWISE)


def example_bytes(length: int, predictions: int) -> float:
    """Return the bytes of an example in shards: varints of 1 to 3 bytes, and float32 weights."""
    return 160 + 4.1 * length + 7.3 * predictions
