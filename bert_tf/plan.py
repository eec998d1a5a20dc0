"""Estimate the memory, time and traffic of pretraining, fine-tuning or serving beforehand.

    bert-tf plan --model_size=large --tokens=3.3e9 --global_batch_size=256 --devices=8
    --device=a100 --precision=bfloat16

    bert-tf plan --model_size=base --serve --max_seq_length=64

With --task, --train and the other flags of bert-tf finetune it is the dry run of that command.
Rates of devices come from data sheets and published results, those of a processor are typical ones;
--calibrate measures the matrix products of this machine, which takes seconds.
"""

import dataclasses
import re
import runpy
import sys

from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.errors import UserError
from bert_tf.planning.devices import STRATEGIES, Device, PlannedDevices
from bert_tf.planning.estimates import Training, estimate, estimate_serving
from bert_tf.planning.memory import StepSizes
from bert_tf.system import command

TEXTS_PER_REQUEST = (1, 16, 64)


@dataclasses.dataclass(frozen=True)
class _Model:
    """Flags on the model and its training."""

    tokens: float | None = command.flag(
        "tokens of the pretraining, with padding; required without --serve", None, bounds={">": 0}
    )
    serve: bool = command.flag("estimate serving instead of pretraining", False)
    model_size: str | None = command.flag("published size", None, choices=tuple(MODEL_SIZES))
    config: str | None = command.flag("bert_config.json of the model", None)
    global_batch_size: int = command.flag("examples per step", 256, bounds={">=": 1})
    replica_batch_size: int | None = command.flag(
        "examples per forward pass of a device; by default the most that fit",
        None,
        bounds={">=": 1},
    )
    max_seq_length: int = command.flag(
        "tokens per example; with --serve those of a text", 128, bounds={">=": 2}
    )
    max_predictions_per_seq: int | None = command.flag(
        "masked tokens per example; by default 15% of --max_seq_length", None, bounds={">=": 1}
    )
    precision: str = command.flag(
        "precision of matrix products; int8 with --serve only",
        "float32",
        choices=("float32", "tf32", "bfloat16", "float16", "int8"),
    )
    gradient_checkpointing: bool = command.flag("recompute activations", False)
    strategy: str | None = command.flag(
        "distribution strategy; by default none for one device, tpu for TPUs, otherwise mirrored",
        None,
        choices=STRATEGIES,
    )
    calibrate: bool = command.flag("measure the rates of this machine's processor", False)


@dataclasses.dataclass(frozen=True)
class PlanSettings(PlannedDevices, _Model):
    """Flags of the command."""

    def __post_init__(self) -> None:
        command.check_bounds(self)
        if (self.model_size is None) == (self.config is None):
            raise UserError("--model_size, --config: expected exactly one of them")
        if self.serve == (self.tokens is not None):
            raise UserError("--tokens, --serve: expected exactly one of them")
        if self.precision == "int8" and not (self.serve and self.device == "cpu"):
            raise UserError("--precision=int8: expected with --serve and --device=cpu only")
        if self.calibrate and self.device != "cpu":
            raise UserError(f"--calibrate: expected with --device=cpu only, not {self.device}")
        if not self.serve:
            self.check_devices(self.chosen_strategy, self.global_batch_size)

    @property
    def chosen_strategy(self) -> str:
        """The strategy, or its default."""
        of_many = "mirrored" if self.devices > 1 else "none"
        return self.strategy or ("tpu" if self.device.startswith("tpu") else of_many)

    def bert_config(self) -> BertConfig:
        """Return the model's configuration."""
        if self.model_size is not None:
            return MODEL_SIZES[self.model_size]
        return BertConfig.load(str(self.config))

    def check(self) -> None:
        """Check the configuration without TensorFlow; raises UserError."""
        config = self.bert_config()
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at most "
                f"{config.max_position_embeddings}, the positions of the model"
            )

    def rates(self, tokens: int) -> Device:
        """Return the device, measured with this number of tokens if --calibrate is given."""
        device = self.typical()
        if self.calibrate:
            from bert_tf.planning.devices import measure_processor

            config = self.bert_config()
            device = measure_processor(config, tokens, self.precision, training=not self.serve)
        return self.linked(device, self.chosen_strategy)


def main(settings: PlanSettings) -> None:
    """Print the estimate."""
    for line in (_serving if settings.serve else _training)(settings):
        print(line)


def _training(settings):
    """Yield the report of a pretraining."""
    from bert_tf.planning.report import device_line, training_lines

    length = settings.max_seq_length
    per_device = settings.global_batch_size // settings.devices
    device = settings.rates(per_device * length)
    sizes = StepSizes(
        settings.bert_config(),
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
    yield device_line(device, settings.precision, settings.calibrate)
    yield from training_lines(training, result)


def _serving(settings):
    """Yield the report of a served model."""
    from bert_tf.planning.report import device_line, serving_lines

    config, length, precision = settings.bert_config(), settings.max_seq_length, settings.precision
    results = []
    for texts in TEXTS_PER_REQUEST:
        device = settings.rates(texts * length)
        results.append(estimate_serving(config, length, texts, device, precision))
    yield device_line(device, precision, settings.calibrate)
    yield from serving_lines(results, length, device)


def _is_finetuning(arguments):
    return any(re.match(r"--?task(=|$)", argument) for argument in arguments)


if __name__ == "__main__":
    if _is_finetuning(sys.argv[1:]):
        # A name, since bert_tf imports nothing from tasks, which read labelled files.
        sys.argv.append("--dry_run")
        runpy.run_module("tasks.finetune", run_name="__main__", alter_sys=True)
    else:
        command.run_main(
            main, PlanSettings, __doc__, imports_tensorflow=lambda settings: settings.calibrate
        )
