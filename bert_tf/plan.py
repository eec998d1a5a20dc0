"""Estimate the memory, time and traffic of pretraining before it is started.

    python -m bert_tf.plan --model_size=large --tokens=3.3e9 --global_batch_size=256 \
        --devices=8 --device=a100 --precision=bfloat16

For --device=cpu the matrix products of this machine are measured first, which takes seconds. The
rates of the other devices come from data sheets and published results.
"""

import dataclasses

from bert_tf import command
from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.errors import UserError
from bert_tf.planning.devices import DEVICES
from bert_tf.planning.memory import StepSizes
from bert_tf.planning.report import training_lines
from bert_tf.planning.training import Training, estimate

VOCAB_SIZE = 30_522


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """Flags of the command."""

    tokens: float = command.flag("tokens of the training, with padding", bounds={">": 0})
    model_size: str | None = command.flag("published size", None, choices=tuple(MODEL_SIZES))
    config: str | None = command.flag("bert_config.json of the model", None)
    global_batch_size: int = command.flag("examples per step", 256, bounds={">=": 1})
    replica_batch_size: int | None = command.flag(
        "examples per forward pass of a device; by default the most that fit",
        None,
        bounds={">=": 1},
    )
    max_seq_length: int = command.flag("tokens per example", 128, bounds={">=": 8})
    max_predictions_per_seq: int | None = command.flag(
        "masked tokens per example; by default 15% of --max_seq_length", None, bounds={">=": 1}
    )
    devices: int = command.flag("number of devices", 1, bounds={">=": 1})
    device: str = command.flag("type of the devices", "cpu", choices=(*DEVICES, "cpu"))
    precision: str = command.flag(
        "precision of matrix products", "float32", choices=("float32", "tf32", "bfloat16")
    )
    gradient_checkpointing: bool = command.flag("recompute activations", False)

    def __post_init__(self) -> None:
        command.check_bounds(self)
        if (self.model_size is None) == (self.config is None):
            raise UserError("--model_size, --config: expected exactly one of them")
        if self.global_batch_size % self.devices:
            raise UserError(
                f"--global_batch_size={self.global_batch_size}: expected a multiple of --devices="
                f"{self.devices}"
            )

    def bert_config(self) -> BertConfig:
        """Return the model's configuration."""
        if self.model_size is not None:
            return dataclasses.replace(MODEL_SIZES[self.model_size], vocab_size=VOCAB_SIZE)
        return BertConfig.load(str(self.config))

    def check(self) -> None:
        """Check the configuration without TensorFlow; raises UserError."""
        config = self.bert_config()
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at most "
                f"{config.max_position_embeddings}, the positions of the model"
            )


def main(settings: PlanSettings) -> None:
    """Print the estimate."""
    config, length = settings.bert_config(), settings.max_seq_length
    per_device = settings.global_batch_size // settings.devices
    if settings.device == "cpu":
        from bert_tf.planning.calibration import measure_processor

        device = measure_processor(config, per_device * length, settings.precision)
        print(
            f"this processor: {device.flops[settings.precision] / 1e9:,.0f} GFLOP/s in "
            f"{settings.precision}, {device.bandwidth / 1e9:.1f} GB/s"
        )
    else:
        device = DEVICES[settings.device]
    sizes = StepSizes(
        config,
        settings.replica_batch_size or per_device,
        length,
        settings.max_predictions_per_seq or -(-15 * length // 100),
        settings.precision,
        settings.gradient_checkpointing,
    )
    training = Training(
        sizes, settings.global_batch_size, settings.tokens, settings.devices, device
    )
    result = estimate(training)
    if not settings.replica_batch_size and 0 < result.largest_batch < per_device:
        sizes = dataclasses.replace(sizes, examples=result.largest_batch)
        training = dataclasses.replace(training, sizes=sizes)
        result = estimate(training)
    for line in training_lines(training, result):
        print(line)


if __name__ == "__main__":
    command.run_main(
        main, PlanSettings, __doc__, imports_tensorflow=lambda settings: settings.device == "cpu"
    )
