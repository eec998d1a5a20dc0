"""Rate and memory of a served model, from a roofline of the device."""

import dataclasses

from bert_tf.config import BertConfig
from bert_tf.model.bucketing import SHORT_TOKENS, TOKENS_PER_CHUNK
from bert_tf.planning.devices import Device
from bert_tf.planning.memory import StepSizes, inference_memory, served_bytes
from bert_tf.planning.training import add_process, forward_seconds, usable_memory


@dataclasses.dataclass(frozen=True)
class Serving:
    """A served model and its device.

    Attributes:
        config: Model.
        length: Tokens per text, with [CLS] and [SEP].
        texts: Texts per request.
        device: The device.
        precision: "float32", "tf32", "bfloat16" or "int8".
    """

    config: BertConfig
    length: float
    texts: int
    device: Device
    precision: str = "float32"


@dataclasses.dataclass(frozen=True)
class ServingEstimate:
    """Estimated cost of a request.

    Attributes:
        memory: Memory in bytes by component.
        fits: Whether the peak fits into the device.
        request_seconds: Time of a request, one request at a time.
        texts_per_second: Rate of one device.
        weights_fraction: Part of the time that reads the weights.
    """

    memory: dict[str, int]
    fits: bool
    request_seconds: float
    texts_per_second: float
    weights_fraction: float


def estimate_serving(serving: Serving) -> ServingEstimate:
    """Estimate a request: the weights are read from memory once, then each text is computed."""
    config, device = serving.config, serving.device
    sizes = StepSizes(config, serving.texts, serving.length, 0, serving.precision)
    reading = served_bytes(config, serving.precision, layers_only=True) / device.bandwidth
    seconds = reading + serving.texts * forward_seconds(sizes, device)
    texts = min(serving.texts, max(1, int(TOKENS_PER_CHUNK // serving.length)))
    memory = inference_memory(
        config,
        round(texts * serving.length),
        round(texts * serving.length**2),
        serving.precision,
        is_packed=_is_packed(serving),
    )
    return ServingEstimate(
        memory=add_process(memory, device, config),
        fits=memory["peak"] <= usable_memory(device, config),
        request_seconds=seconds,
        texts_per_second=serving.texts / seconds,
        weights_fraction=reading / seconds,
    )


def _is_packed(serving):
    if serving.device.is_accelerator:
        return False
    is_short = serving.texts == 1 and serving.length <= SHORT_TOKENS
    return serving.precision in ("bfloat16", "int8") or is_short
