"""Rate and memory of a served model, from a roofline of the device."""

import dataclasses

from bert_tf.config import BertConfig
from bert_tf.model.bucketing import SHORT_TOKENS, TOKENS_PER_CHUNK
from bert_tf.planning.devices import Device
from bert_tf.planning.memory import StepSizes, inference_memory, served_bytes
from bert_tf.planning.training import add_process, forward_seconds, usable_memory


@dataclasses.dataclass(frozen=True)
class ServingEstimate:
    """Estimated cost of a request.

    Attributes:
        texts: Texts per request.
        memory: Memory in bytes by component.
        fits: Whether the peak fits into the device.
        request_seconds: Time of a request, one request at a time.
        weights_fraction: Part of the time that reads the weights.
    """

    texts: int
    memory: dict[str, int]
    fits: bool
    request_seconds: float
    weights_fraction: float

    @property
    def texts_per_second(self) -> float:
        """Rate of one device."""
        return self.texts / self.request_seconds


def estimate_serving(
    config: BertConfig, length: float, texts: int, device: Device, precision: str = "float32"
) -> ServingEstimate:
    """Estimate a request: the weights are read from memory once, then each text is computed.

    Args:
        config: Model.
        length: Tokens per text, with [CLS] and [SEP].
        texts: Texts per request.
        device: The device.
        precision: "float32", "tf32", "bfloat16" or "int8".
    """
    sizes = StepSizes(config, texts, length, 0, precision)
    reading = served_bytes(config, precision, layers_only=True) / device.bandwidth
    seconds = reading + texts * forward_seconds(sizes, device)
    is_short = texts == 1 and length <= SHORT_TOKENS
    of_chunk = min(texts, max(1, int(TOKENS_PER_CHUNK // length)))
    memory = inference_memory(
        config,
        round(of_chunk * length),
        round(of_chunk * length**2),
        precision,
        is_packed=not device.is_accelerator and (precision in ("bfloat16", "int8") or is_short),
    )
    return ServingEstimate(
        texts=texts,
        memory=add_process(memory, device, config),
        fits=memory["peak"] <= usable_memory(device, config),
        request_seconds=seconds,
        weights_fraction=reading / seconds,
    )
