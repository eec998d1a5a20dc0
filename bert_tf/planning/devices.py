"""Devices of estimates: their flags, peak rates and the part of them that training BERT reaches.

Peak rates and bandwidths are those of the vendors' data sheets, for dense products. Efficiencies of
V100 and A100 are computed from published throughputs of BERT-large in TensorFlow (NVIDIA,
DeepLearningExamples, TensorFlow2/LanguageModeling/BERT, container 21.02), with which the tests
compare. That of H100 in bfloat16 is between those measured with this package on an H200, which
computes alike (docs/gpu.md). Efficiencies of other devices are assumptions: that of A100 for TPU
v4, that of V100 for T4.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system.command import flag
from bert_tf.system.processes import count_processors

MAX_ROWS = 2048  # Products of more rows reach the same rate.
ROUNDS, SECONDS = 20, 1.0  # At least. The first calls of a process are up to 30% slower.
_READ_BYTES = 1 << 28
# Of cgroups in version 2 and 1, in the file system of a container.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or the processor of this machine."""

    memory: float  # Bytes.
    # Floating-point operations per second of matrix products, by precision.
    flops: Mapping[str, float]
    # Fraction of `flops` that a training step reaches, by precision.
    efficiency: Mapping[str, float]
    bandwidth: float  # Bytes per second of the memory.
    link: float  # Bytes per second that one device sends to another one of the same machine.
    is_accelerator: bool = True  # Whether the process's own memory is on another device.


def _rates(float32, tf32, half):
    """Return rates or efficiencies by precision; `half` is that of bfloat16 and float16."""
    return {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half}


def _without_bfloat16(float32, float16):
    """Return rates or efficiencies of GPUs whose matrix units multiply float16 only."""
    return {**_rates(float32, float32, float32), "float16": float16}


# Name, gigabytes, rates, efficiencies, bandwidth and link.
_ACCELERATORS = (
    ("h100", 80, _rates(67e12, 494e12, 989e12), _rates(0.80, 0.43, 0.33), 3.35e12, 450e9),
    ("a100", 80, _rates(19.5e12, 156e12, 312e12), _rates(0.80, 0.43, 0.36), 2.04e12, 300e9),
    ("v100", 32, _without_bfloat16(15.7e12, 125e12), _without_bfloat16(0.80, 0.28), 0.9e12, 150e9),
    ("t4", 16, _without_bfloat16(8.1e12, 65e12), _without_bfloat16(0.80, 0.28), 0.32e12, 16e9),
    # float32 takes six passes of the bfloat16 units.
    ("tpu-v4", 32, _rates(46e12, 275e12, 275e12), _rates(0.36, 0.36, 0.36), 1.2e12, 300e9),
)
DEVICES = {
    name: Device(gigabytes * 1e9, flops, efficiency, bandwidth, link)
    for name, gigabytes, flops, efficiency, bandwidth, link in _ACCELERATORS
}

# Rates per core of a processor with AVX-512 and bfloat16, measured on two cores of an AMD EPYC.
_TYPICAL = {"float32": 90e9, "tf32": 90e9, "bfloat16": 180e9, "float16": 90e9}
_TYPICAL_BANDWIDTH = 30e9
# Products in int8 beside those in float32, on a processor with VNNI. Fitted to requests of 16 texts
# of 23 and 52 tokens to a served BERT-base.
INT8_SPEEDUP = 2.9


def planned_precision(precision: str, device: Device) -> str:
    """Return the precision that "auto" selects on a device; any other one unchanged."""
    if precision != "auto":
        return precision
    if not device.is_accelerator:
        return "float32"
    return "bfloat16" if device.flops["bfloat16"] > device.flops["float32"] else "float16"


def processor(memory: float, flops: Mapping[str, float], bandwidth: float) -> Device:
    """Return the device of a processor, with the rates of its products by precision."""
    flops = {**flops, "int8": INT8_SPEEDUP * flops["float32"]} if "float32" in flops else flops
    efficiency = dict.fromkeys(flops, 1.0)
    return Device(memory, flops, efficiency, bandwidth, link=1e9, is_accelerator=False)


def machine_memory() -> int:
    """Return the bytes of this machine's memory, or the limit of a container if that is lower."""
    limits = [files.read_text(path).strip() for path in filter(os.path.exists, _LIMITS)]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(int(limit) for limit in limits if limit != "max")])


def typical_processor() -> Device:
    """Return a processor with typical rates, and the cores and the memory of this machine."""
    flops = {precision: rate * count_processors() for precision, rate in _TYPICAL.items()}
    return processor(machine_memory(), flops, _TYPICAL_BANDWIDTH)


def measure_processor(
    config: BertConfig, tokens: int, precision: str, training: bool = True
) -> Device:
    """Measure the matrix products of a feed-forward layer and the speed of reading memory.

    The products are those of a step or request of `tokens` tokens, in training also those of the
    backward pass. Returns the processor with the rate of this precision, "int8" included.
    """
    import tensorflow as tf

    dtype = tf.bfloat16 if precision == "bfloat16" else tf.float32
    rows = max(1, min(tokens, MAX_ROWS))
    with tf.device("CPU:0"):  # A GPU would be given the operations, and not be waited for.
        x = tf.ones([rows, config.hidden_size], dtype)
        kernel = tf.ones([config.hidden_size, config.intermediate_size], dtype)
        upstream = tf.ones([rows, config.intermediate_size], dtype)
        memory = tf.ones([_READ_BYTES // 4])

    def forward():
        tf.matmul(x, kernel)

    def step():
        # Forward pass, and the gradients of inputs and kernel.
        tf.matmul(x, kernel)
        tf.matmul(upstream, kernel, transpose_b=True)
        tf.matmul(x, upstream, transpose_a=True)

    flops = 2 * rows * config.hidden_size * config.intermediate_size
    rate = 3 * flops / _seconds(step) if training else flops / _seconds(forward)
    bandwidth = _READ_BYTES / _seconds(lambda: tf.reduce_sum(memory))
    # The rate of int8 is derived from that of float32.
    measured = "float32" if precision == "int8" else precision
    return processor(machine_memory(), {measured: rate}, bandwidth)


def _seconds(function: Callable[[], None]) -> float:
    """Return the median time of a call on the processor, after one that is not counted."""
    import tensorflow as tf

    times: list[float] = []
    start = time.perf_counter()
    while len(times) <= ROUNDS or time.perf_counter() - start < SECONDS:
        began = time.perf_counter()
        with tf.device("CPU:0"):
            function()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


STRATEGIES = ("none", "mirrored", "multi_worker", "tpu")


@dataclasses.dataclass(frozen=True)
class PlannedDevices:
    """Devices of an estimate, which this machine need not have; each field is a flag."""

    device: str = flag(
        "type of the estimate's devices; cpu is the processor of this machine",
        "cpu",
        choices=(*DEVICES, "cpu"),
    )
    devices: int = flag("number of the estimate's devices", 1, bounds={">=": 1})
    network_gbps: float = flag(
        "Gbit/s of the network per device of the estimate, for --strategy=multi_worker",
        25.0,
        bounds={">": 0},
    )

    def check_devices(self, strategy: str, global_batch_size: int) -> None:
        """Raise UserError unless the devices fit the strategy and divide the batch."""
        if strategy == "none" and self.devices > 1:
            raise UserError(
                f"--devices={self.devices}: expected 1 with --strategy=none; choose mirrored, "
                "multi_worker or tpu"
            )
        is_tpu = self.device.startswith("tpu")
        if is_tpu != (strategy == "tpu"):
            raise UserError(
                f"--device={self.device}: does not fit --strategy={strategy}; TPUs need "
                "--strategy=tpu, and other devices another one"
            )
        if global_batch_size % self.devices:
            raise UserError(
                f"--global_batch_size={global_batch_size}: expected a multiple of --devices="
                f"{self.devices}"
            )

    def check_planned(self, dry_run: bool, strategy: str, global_batch_size: int) -> None:
        """Check the devices of a dry run; without one, that no flag of the estimate is given."""
        if dry_run:
            self.check_devices(strategy, global_batch_size)
            return
        for field in dataclasses.fields(PlannedDevices):
            if getattr(self, field.name) != field.default:
                raise UserError(f"--{field.name}: requires --dry_run, whose estimate it describes")

    def linked(self, device: Device, strategy: str) -> Device:
        """Return the device with the link that gradients are sent over in a strategy."""
        if strategy != "multi_worker":
            return device
        return dataclasses.replace(device, link=min(device.link, self.network_gbps * 1e9 / 8))

    def typical(self) -> Device:
        """Return the device with typical rates, which are not measured."""
        return typical_processor() if self.device == "cpu" else DEVICES[self.device]
