"""Settings of pretraining, one field per flag. Does not import TensorFlow."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.planning.devices import STRATEGIES, PlannedDevices
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.command import check_bounds, defaults, flag
from bert_tf.train.settings import compile_flag, deterministic_flag, precision_flag
from bert_tf.weights import sources


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    """Settings of bert-tf pretrain; defaults follow Devlin et al. 2019, A.2. Each field is a flag.

    Raises:
        UserError: A value is invalid; the message starts with the flag.
    """

    shards: tuple[str, ...] = flag("directories of shards, one per phase")
    output_dir: str = flag("run directory to create or resume")
    model_size: str | None = flag("published model size", None, choices=tuple(MODEL_SIZES))
    config: str | None = flag("bert_config.json of a custom model size", None)
    init_from: str | None = flag(
        "pretrained weights to start from, or an id of the Hugging Face hub", None
    )
    eval_shards: str | None = flag("directory of held-out shards", None)
    phase_steps: tuple[str, ...] = flag(
        "training steps per phase, one number per directory of shards", ()
    )
    num_train_steps: int = flag("training steps of a single phase", 1_000_000, bounds={">=": 1})
    global_batch_size: int = flag("examples per step, over all replicas", 256, bounds={">=": 1})
    gradient_accumulation_steps: int = flag(
        "sequential batches per replica and step", 1, bounds={">=": 1}
    )
    learning_rate: float = flag("peak learning rate", 1e-4, bounds={">": 0})
    warmup_steps: int = flag("steps of the linear learning-rate warmup", 10_000, bounds={">=": 0})
    schedule: str = flag(
        "learning-rate decay: counted from step 0 (released: google-research/bert) or from the "
        "end of warmup (continuous: Hugging Face)",
        "released",
        choices=("released", "continuous"),
    )
    optimizer: str = flag(
        "AdamW as released, or LAMB (You et al. 2020)", "adamw", choices=("adamw", "lamb")
    )
    weight_decay_rate: float = flag(
        "weight decay, except for biases and LayerNorm", 0.01, bounds={">=": 0}
    )
    bias_correction: bool = flag("Adam's bias correction (the released code has none)", False)
    # The dropout seed keeps this number in its lower 32 bits.
    seed: int = flag(
        "random seed of initialization, data order and dropout", 0, bounds={">=": 0, "<": 1 << 32}
    )
    strategy: str = flag(
        "one device; one replica per local GPU; the processes in TF_CONFIG; or one replica per "
        "TPU core",
        "none",
        choices=STRATEGIES,
    )
    tpu: str = flag("TPU name or grpc:// address, or local on a TPU VM", "local")
    steps_per_execution: int | None = flag(
        "training steps per tf.function call; by default 20 if XLA compiles the step, otherwise 1",
        None,
        bounds={">=": 1},
    )
    precision: str = precision_flag()
    compile: str = compile_flag()
    deterministic: bool = deterministic_flag()
    gradient_checkpointing: bool = flag(
        "recompute activations in the backward pass: less memory, more time", False
    )
    eval_every: int | None = flag(
        "steps between evaluations; by default only at the end", None, bounds={">=": 1}
    )
    eval_batches: int | None = flag(
        "batches of 64 held-out examples per evaluation; by default all", None, bounds={">=": 1}
    )
    save_every: int = flag("steps between checkpoints", 1000, bounds={">=": 1})
    log_every: int = flag("steps between progress lines", 100, bounds={">=": 1})
    dry_run: bool = flag(
        "run three steps of a toy model through every stage, keep nothing, and print an estimate",
        False,
    )

    def __post_init__(self) -> None:
        if sum(map(bool, (self.model_size, self.config, self.init_from))) != 1:
            raise UserError("--model_size, --config, --init_from: expected exactly one of them")
        check_bounds(self)
        # A single phase may use --num_train_steps instead.
        if len(self.phase_steps or self.shards[:1]) != len(self.shards):
            given = ",".join(self.phase_steps) or "none"
            raise UserError(
                f"--phase_steps: received {given}, expected the steps of each directory of "
                f"--shards={','.join(self.shards)}"
            )
        for steps in self.phase_steps:
            if not steps.isdecimal() or int(steps) < 1:
                raise UserError(
                    f"--phase_steps={','.join(self.phase_steps)}: expected integers >= 1"
                )
        total = self.phase_ends[-1]
        default = defaults(PretrainSettings)["num_train_steps"]
        if self.phase_steps and self.num_train_steps not in (total, default):
            raise UserError(
                f"--num_train_steps={self.num_train_steps}: --phase_steps="
                f"{','.join(self.phase_steps)} are {total} steps in total; omit one of the flags"
            )
        for name in ("eval_every", "eval_batches"):
            if getattr(self, name) is not None and not self.eval_shards:
                raise UserError(f"--{name}={getattr(self, name)}: expected --eval_shards as well")

    def check(self) -> None:
        """Check local shards and the run without TensorFlow; raises UserError.

        Weights and configuration are checked too if a new run would certainly start.
        """
        # Remote paths need TensorFlow's file systems and are checked once it is imported.
        manifests = [
            Manifest.load(directory)
            for directory in (*self.shards, self.eval_shards)
            if directory and not files.is_remote(directory)
        ]
        check_same_objective(manifests)
        for manifest in manifests:
            manifest.check_complete()
            manifest.vocabulary()
        # Workers may see the run's files late; they check it when all see the same.
        is_new, of_run = False, {**self.recorded(), "dry_run": False}
        if self.dry_run or self.strategy != "multi_worker":
            is_new = Run.is_new(self.output_dir, of_run, None, defaults(PretrainSettings))
        if self.dry_run or is_new:
            if self.config and not files.is_remote(self.config):
                load_config(self.config, manifests)
            if self.init_from:
                sources.check(self.init_from)

    def recorded(self) -> dict[str, Any]:
        """Return the settings saved in train.json: all except `output_dir`."""
        names = (field.name for field in dataclasses.fields(PretrainSettings))
        return {name: getattr(self, name) for name in names if name != "output_dir"}

    @property
    def phase_ends(self) -> list[int]:
        """Return the step at which each phase ends; the last one ends the training."""
        ends: list[int] = []
        for steps in map(int, self.phase_steps or (str(self.num_train_steps),)):
            ends.append(steps + (ends[-1] if ends else 0))
        return ends


def check_same_objective(manifests: Iterable[Manifest]) -> None:
    """Raise UserError if some shards have next sentences and others have not."""
    by_kind = {manifest.has_next_sentence: manifest.directory for manifest in manifests}
    if len(by_kind) > 1:
        raise UserError(
            f"--shards, --eval_shards: {by_kind[True]} has next sentences, {by_kind[False]} has "
            "not (--next_sentence of write_shards); expected shards of one kind; pretrain in two "
            "runs, the second with --init_from"
        )


def load_config(path: str, manifests: Iterable[Manifest]) -> BertConfig:
    """Read the file of --config; raises UserError if the shards have ids beyond its table."""
    config = BertConfig.load(path)
    for manifest in manifests:
        if config.vocab_size < manifest.vocab_size:
            raise UserError(
                f"--config={path}: vocab_size is {config.vocab_size}, but the vocabulary of "
                f"{manifest.directory} has {manifest.vocab_size} entries; set it to at least that"
            )
    return config


@dataclasses.dataclass(frozen=True)
class PretrainCommandSettings(PlannedDevices, PretrainSettings):
    """Flags of bert-tf pretrain: its settings, and the devices of the estimate of --dry_run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dry_run:
            parts = self.devices * self.gradient_accumulation_steps
            if self.global_batch_size % parts:
                raise UserError(
                    f"--global_batch_size={self.global_batch_size}: expected a multiple of "
                    f"--devices={self.devices} * --gradient_accumulation_steps="
                    f"{self.gradient_accumulation_steps}"
                )
        self.check_planned(self.dry_run, self.strategy, self.global_batch_size)
