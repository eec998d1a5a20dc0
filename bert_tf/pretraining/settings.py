"""The settings of pretraining, a field a flag. Free of TensorFlow."""

import dataclasses

from bert_tf import files
from bert_tf.command import flag
from bert_tf.config import MODEL_SIZES, BertConfig
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.weights import sources


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    """What bert_tf.pretrain does; the defaults are the published recipe (Devlin et al. 2019, A.2).

    Raises UserError, naming the flag, on a value that cannot be.
    """

    shards: tuple[str, ...] = flag("folders of shards, one a phase")
    output_dir: str = flag("run directory to make, or to go on with")
    model_size: str | None = flag(
        "a published size", None, choices=tuple(MODEL_SIZES), former_name="preset"
    )
    config: str | None = flag("bert_config.json of another size", None)
    init_from: str | None = flag("pretrained weights to begin with, and their size", None)
    eval_shards: str | None = flag("folder of held-out shards", None)
    phase_steps: tuple[str, ...] = flag("steps of each phase; their sum is the whole", ())
    num_train_steps: int = flag("steps, where there is one phase", 1_000_000)
    global_batch_size: int = flag("examples a step, over all replicas", 256)
    gradient_accumulation_steps: int = flag(
        "parts that a replica works through its share of a step in, one after the other", 1
    )
    learning_rate: float = flag("peak learning rate", 1e-4)
    warmup_steps: int = flag("steps over which the learning rate rises", 10_000)
    schedule: str = flag(
        "the fall of the learning rate: counted from step 0, as released, or from the peak",
        "released",
        choices=("released", "continuous"),
    )
    optimizer: str = flag("AdamW as released, or LAMB", "adamw", choices=("adamw", "lamb"))
    weight_decay_rate: float = flag("decay, off for biases and LayerNorm", 0.01)
    bias_correction: bool = flag("Adam's bias correction (the released code has none)", False)
    seed: int = flag("seed of the weights, the order of the data and dropout", 0)
    strategy: str = flag(
        "one device, a replica a local GPU, the processes of TF_CONFIG, or a replica a TPU core",
        "none",
        choices=("none", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = flag("which TPU: its name, its grpc:// address, or that of this machine", "local")
    steps_per_execution: int = flag(
        "steps that TensorFlow makes before Python looks again", 1, former_name="steps_per_call"
    )
    precision: str = flag(
        "matrix products in training; tf32: float32 with rounded factors, on GPUs and TPUs",
        "float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    gradient_checkpointing: bool = flag(
        "compute layers again in the backward pass: less memory, more time", False
    )
    eval_every: int | None = flag("steps between evaluations; by default only the end", None)
    eval_batches: int | None = flag(
        "batches of 64 held-out examples to evaluate on; by default all", None
    )
    save_every: int = flag("steps between checkpoints", 1000)
    log_every: int = flag("steps between lines of progress", 100)
    dry_run: bool = flag("three steps of a toy model through every stage, and no run", False)

    def __post_init__(self):
        if sum(value is not None for value in (self.model_size, self.config, self.init_from)) != 1:
            raise UserError("--model_size, --config, --init_from: wanted one of them, for the size")
        for name, minimum in (
            ("num_train_steps", 1),
            ("global_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("steps_per_execution", 1),
            ("warmup_steps", 0),
            ("save_every", 1),
            ("log_every", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < minimum:
                raise UserError(f"--{name}={getattr(self, name)}: wanted at least {minimum}")
        if self.seed >= 2**32:
            raise UserError(f"--seed={self.seed}: wanted less than 2**32")
        for name in ("eval_every", "eval_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name}={value}: wanted at least 1")
        if not self.learning_rate > 0:
            raise UserError(f"--learning_rate={self.learning_rate}: wanted a number over 0")
        if not self.weight_decay_rate >= 0:
            raise UserError(f"--weight_decay_rate={self.weight_decay_rate}: wanted 0 or more")
        if len(self.phase_steps) not in (0, len(self.shards)) or (
            len(self.shards) > 1 and not self.phase_steps
        ):
            raise UserError(
                f"--phase_steps={','.join(self.phase_steps)}: wanted a number for each of "
                f"--shards={','.join(self.shards)}"
            )
        for steps in self.phase_steps:
            if not steps.isdecimal() or int(steps) < 1:
                raise UserError(f"--phase_steps={','.join(self.phase_steps)}: wanted whole numbers")
        if self.config and not files.exists(self.config):
            raise UserError(f"--config={self.config}: no such file")

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        for directory in filter(None, (*self.shards, self.eval_shards)):
            if not files.is_remote(directory):
                Manifest.load(directory).vocabulary()
        if self.config and not files.is_remote(self.config):
            BertConfig.load(self.config)
        if self.init_from:
            sources.check(self.init_from)
        if not self.dry_run:
            Run.check_resume(self.output_dir, self.recorded())

    def recorded(self):
        """The settings that train.json keeps: all but where the run lies."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name != "output_dir"}

    @property
    def phase_ends(self):
        """The step at which each phase ends; the last is the end of all."""
        ends = []
        for steps in map(int, self.phase_steps or (str(self.num_train_steps),)):
            ends.append(steps + (ends[-1] if ends else 0))
        return ends
