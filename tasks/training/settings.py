"""Settings of training, without files and task; each field is a flag of bert-tf finetune.

The module is free of TensorFlow, so that wrong flags are reported at once.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.command import check_bounds, check_types, flag
from bert_tf.train.settings import compile_flag, deterministic_flag, precision_flag
from bert_tf.weights import sources
from bert_tf.weights.sentence_transformers import KIND
from tasks.base import task_types
from tasks.graph.published import TASK_OF_VERSION, is_saved_model, published_task

# Settings that runs without a teacher do not record.
DISTILLATION = ("teacher", "distill_temperature", "distill_alpha")

# Values of --keep_head, as `PretrainedWeights.head_for` takes them.
KEEP_HEAD = {"auto": None, "true": True, "false": False}


def format_number(number: float) -> str:
    """Format a number for help and names of directories: "2e-5", where Python writes "2e-05"."""
    return repr(number).replace("e-0", "e-")


def flag_by_task(help: str, name: str, **metadata: Any) -> Any:
    """Return the flag of a setting whose default depends on the task type.

    `help` is without the defaults, which `task_types.DEFAULTS` has by `name`.
    """
    default = task_types.DEFAULTS[name]
    defaults = {kind: task_types.default_settings(kind)[name] for kind in task_types.TASK_TYPES}
    others = "".join(
        f"; {kind} {format_number(value)}" for kind, value in defaults.items() if value != default
    )
    help = f"{help} (default {format_number(default)}{others})"
    return flag(help, None, defaults=defaults, **metadata)


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training of a model.

    A field that is `None` gets the default of the task type, if there is one; `epochs` does not
    with `num_train_steps`. A field with `of_model` is decided when the model is created.

    Raises:
        UserError: If a value is out of range; the message names the flag.
    """

    global_batch_size: int = flag_by_task(
        "examples per step, over all replicas", "global_batch_size", bounds={">=": 1}
    )
    gradient_accumulation_steps: int = flag(
        "parts of a batch that are computed one after the other, which takes less memory",
        1,
        bounds={">=": 1},
    )
    epochs: int | None = flag_by_task("passes over the training rows", "epochs", bounds={">=": 1})
    num_train_steps: int | None = flag(
        "number of training steps, instead of --epochs", None, bounds={">=": 1}
    )
    learning_rate: float = flag_by_task("peak learning rate", "learning_rate", bounds={">": 0})
    warmup_proportion: float = flag(
        "fraction of the steps used for learning rate warmup", 0.1, bounds={">=": 0, "<": 1}
    )
    schedule: str = flag(
        "linear decay of the learning rate: released counts from step 0 (google-research/bert), "
        "continuous from the peak (Hugging Face)",
        "released",
        choices=("released", "continuous"),
    )
    weight_decay_rate: float = flag(
        "weight decay of AdamW, not applied to biases and LayerNorm", 0.01, bounds={">=": 0}
    )
    layer_decay: float = flag(
        "factor on the learning rate from each layer to the one below",
        1.0,
        bounds={">": 0, "<=": 1},
    )
    frozen_layers: int | None = flag(
        "number of lowest layers that are not trained, together with the embeddings",
        None,
        bounds={">=": 0},
    )
    eval_every: int | None = flag(
        "steps between evaluations; default: those of an epoch", None, bounds={">=": 1}
    )
    best_metric: str | None = flag(
        "metric of the first dev file that selects the best checkpoint: NAME as bert-tf evaluate "
        "prints it, NAME:max or NAME:min; NAME alone is NAME:min if it ends with loss or error; "
        "default: that of the task",
        None,
    )
    patience: int | None = flag(
        "evaluations without improvement before training stops", None, bounds={">=": 1}
    )
    bias_correction: bool = flag("bias correction of Adam (google-research/bert has none)", True)
    keep_head: str = flag(
        "the head of fine-tuned weights instead of a new one: auto if task type and labels match",
        "auto",
        choices=tuple(KEEP_HEAD),
        of_model=True,
    )
    teacher: str | None = flag(
        "fine-tuned run, or published SavedModel, whose outputs are learned; of task similarity "
        "also a directory of sentence-transformers (docs/distillation.md)",
        None,
    )
    distill_temperature: float = flag(
        "temperature of the teacher's and the student's logits", 2.0, bounds={">": 0}
    )
    distill_alpha: float = flag(
        "weight of learning from the teacher; the rest is that of the labels",
        0.5,
        bounds={">=": 0, "<=": 1},
    )
    seed: int = flag("seed of head initialization, row order and dropout", 0, bounds={">=": 0})
    strategy: str = flag(
        "one device; one replica per local GPU; several processes from TF_CONFIG; TPU cores",
        "none",
        choices=("none", "mirrored", "multi_worker", "tpu"),
        of_model=True,
    )
    tpu: str = flag("TPU name or grpc:// address, or local", "local", of_model=True)
    precision: str = precision_flag()
    compile: str = compile_flag()
    deterministic: bool = deterministic_flag()
    do_lower_case: bool | None = flag(
        "lower-casing of the text; by default as in the pretrained weights' configuration",
        None,
        of_model=True,
    )
    save_every: int = flag(
        "steps between checkpoints, in addition to one per evaluation", 1000, bounds={">=": 1}
    )
    log_every: int = flag("steps between progress lines", 10, bounds={">=": 1})

    def __post_init__(self) -> None:
        check_types(self, TrainingSettings)
        check_bounds(self)
        if self.seed >= 2**32:
            raise UserError(f"--seed={self.seed}: expected an integer < 2**32")
        if self.epochs is not None and self.num_train_steps is not None:
            raise UserError("--epochs, --num_train_steps: expected one of them, received both")
        for name in DISTILLATION:
            if self.teacher is None and getattr(self, name) != _DEFAULTS[name]:
                raise UserError(f"--{name}: requires --teacher")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of training steps."""
        return self.num_train_steps or steps_per_epoch * (self.epochs or 0)

    def check_has_dev(self, has_dev: bool) -> None:
        """Raise UserError if there is no dev data, but a setting that needs it."""
        for name in ("eval_every", "best_metric", "patience"):
            if getattr(self, name) is not None and not has_dev:
                raise UserError(f"--{name}: requires --dev")

    def check_teacher_fits(self, kind: str) -> None:
        """Check that a teacher, if there is one, fits the task type.

        Raises:
            UserError: If the task type has no teacher, or no temperature.
        """
        if self.teacher is None:
            return
        task_type = task_types.TASK_TYPES.get(kind)
        if task_type and not task_type.has_teacher:
            raise UserError(f"--teacher: not supported by task {kind}, which has no logits")
        default = _DEFAULTS["distill_temperature"]
        if kind in ("regression", KIND) and self.distill_temperature != default:
            raise UserError(f"--distill_temperature: not supported by task {kind}")

    def check_fits(self, config: BertConfig, origin: str) -> None:
        """Check that pretrained weights, which come from `origin`, have enough layers.

        Raises:
            UserError: If they do not.
        """
        if (self.frozen_layers or 0) > config.num_hidden_layers:
            raise UserError(
                f"--frozen_layers={self.frozen_layers}: expected at most "
                f"{config.num_hidden_layers}, the number of layers of {origin}"
            )


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingSettings)}


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are saved in train.json, by name.

    Those of a teacher are left out if there is none, and --keep_head at its default.
    """
    unused = [] if values["teacher"] else [*DISTILLATION, "unlabelled"]
    unused += ["keep_head"] * (values.get("keep_head") == "auto")
    return {name: value for name, value in values.items() if name not in unused}


def parse_best_metric(best_metric: str, known: Collection[str]) -> tuple[str, int]:
    """Return the metric that selects the best checkpoint, and the factor that makes it a score.

    The highest score is the best. The factor of NAME:min is -1, also of NAME alone if it ends with
    loss or error, and otherwise 1.

    Args:
        best_metric: NAME, NAME:min or NAME:max.
        known: Names of the metrics.

    Raises:
        UserError: If there is no such metric.
    """
    name, _, order = best_metric.partition(":")
    if name not in known or order not in ("", "min", "max"):
        raise UserError(
            f"--best_metric={best_metric}: expected a name, or NAME:min or NAME:max, of "
            f"{', '.join(known)}"
        )
    is_smallest = name.endswith(("loss", "error")) if not order else order == "min"
    return name, -1 if is_smallest else 1


# A SavedModel serves the probabilities or values of these; of the others only what is decided.
SERVED_TEACHERS = ("classification", "regression", "multiple_choice")


def check_teacher(path: str, kind: str) -> None:
    """Check that a teacher is a fine-tuned run or a published version of a student's task type.

    That of an embedder may be any embedder.

    Raises:
        UserError: It is not.
    """
    if kind == KIND and not Run.exists(path):
        sources.check(path, as_embedder=True)
        if not sources.embedder_settings(path):
            raise UserError(
                f"--teacher={path}: expected a run of task {kind} or a directory of "
                "sentence-transformers"
            )
        return
    if not is_saved_model(path):
        task = Run.open(path).task
        if task is None:
            raise UserError(f"--teacher={path}: expected a fine-tuned run")
        task_types.check_run(path)
    else:
        if not files.exists(os.path.join(path, TASK_OF_VERSION)):
            raise UserError(
                f"--teacher={path}: no {TASK_OF_VERSION}; expected a SavedModel of "
                "bert-tf export_saved_model, or a run"
            )
        task = published_task(path)
        if kind not in SERVED_TEACHERS:
            raise UserError(
                f"--teacher={path}: a SavedModel of {kind} does not return its logits; pass the "
                "run that it was exported from"
            )
    if task.get("kind") != kind:
        raise UserError(
            f"--teacher={path}: expected a model of task {kind}, received {task.get('kind')}"
        )
