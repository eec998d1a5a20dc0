"""Peak rates of devices, and the part of them that training BERT reaches.

Peak rates and bandwidths are those of the vendors' data sheets, for dense products. Efficiencies of
V100 and A100 are computed from published throughputs of BERT-large in TensorFlow (NVIDIA,
DeepLearningExamples, TensorFlow2/LanguageModeling/BERT, container 21.02); `PUBLISHED` lists them.
No result with this package on these devices is known. Efficiencies of other devices are
assumptions: that of A100 for H100 and TPU v4, that of V100 for T4.
"""

import dataclasses
from collections.abc import Mapping

_A100, _V100_FLOAT32 = 0.36, 0.80


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or the processor of this machine.

    Attributes:
        memory: Bytes.
        flops: Floating-point operations per second of matrix products, by precision.
        efficiency: Fraction of `flops` that a training step reaches, by precision.
        bandwidth: Bytes per second of the memory.
        link: Bytes per second that one device sends to another one of the same machine.
        is_accelerator: Whether the process's own memory is on another device.
    """

    memory: float
    flops: Mapping[str, float]
    efficiency: Mapping[str, float]
    bandwidth: float
    link: float
    is_accelerator: bool = True


def _accelerator(gigabytes, flops, efficiency, bandwidth, link):
    return Device(gigabytes * 1e9, flops, efficiency, bandwidth, link)


_TENSOR_CORES = {"float32": _V100_FLOAT32, "tf32": 0.43, "bfloat16": _A100}
_WITHOUT_BFLOAT16 = dict.fromkeys(("float32", "tf32", "bfloat16"), _V100_FLOAT32)

DEVICES = {
    "h100": _accelerator(
        80, {"float32": 67e12, "tf32": 494e12, "bfloat16": 989e12}, _TENSOR_CORES, 3.35e12, 450e9
    ),
    "a100": _accelerator(
        80, {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}, _TENSOR_CORES, 2.04e12, 300e9
    ),
    # Products in bfloat16 have no units of their own on V100 and T4.
    "v100": _accelerator(
        32, dict.fromkeys(_WITHOUT_BFLOAT16, 15.7e12), _WITHOUT_BFLOAT16, 0.9e12, 150e9
    ),
    "t4": _accelerator(
        16, dict.fromkeys(_WITHOUT_BFLOAT16, 8.1e12), _WITHOUT_BFLOAT16, 0.32e12, 16e9
    ),
    # float32 takes six passes of the bfloat16 units.
    "tpu-v4": _accelerator(
        32,
        {"float32": 46e12, "tf32": 275e12, "bfloat16": 275e12},
        dict.fromkeys(_WITHOUT_BFLOAT16, _A100),
        1.2e12,
        300e9,
    ),
}

# Sequences per second of BERT-large on one device: device, precision, length, published.
PUBLISHED = (
    ("a100", "bfloat16", 128, 485.59),  # float16 there, at the same peak rate.
    ("a100", "bfloat16", 512, 96.52),
    ("a100", "tf32", 128, 282.98),
    ("a100", "tf32", 512, 54.92),
    ("v100", "float32", 128, 841.72 / 16),
    ("v100", "float32", 512, 180 / 16),
)


def processor(memory: float, flops: float, bandwidth: float) -> Device:
    """Return the device of this machine's processor, whose rates were measured."""
    every = ("float32", "tf32", "bfloat16")
    return Device(
        memory,
        dict.fromkeys(every, flops),
        dict.fromkeys(every, 1.0),
        bandwidth,
        link=1e9,
        is_accelerator=False,
    )
