"""Settings of fine-tuning; each field is a flag.

The module is free of TensorFlow, so that wrong flags are reported at once.
"""

import dataclasses
import os
from typing import Any

from bert_tf import files, paths
from bert_tf.command import flag
from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.weights import sources
from tasks import class_imbalance, inputs, registry
from tasks.readers.rows import as_label


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """Settings of tasks.finetune for one run.

    Flags that are `None` get the default of their task type (tasks/registry.py).

    Raises:
        UserError: If a value is out of range or does not fit the task; the message names the flag.
    """

    task: str = flag("task type, or name of a published dataset", choices=registry.NAMES)
    train: str = flag("training file, in a format of the task (docs/data-formats.md)")
    init_from: str = flag(
        "pretrained weights: run, Hugging Face directory, Google release or keras-nlp preset"
    )
    output_dir: str = flag("run directory, created or resumed")
    dev: tuple[str, ...] = flag(
        "dev files, evaluated after each epoch; the first one selects the best checkpoint", ()
    )
    # Data.
    text_column: str | None = flag("column of the text (default text)", None)
    text_b_column: str | None = flag("column of the second text of a pair", None)
    label_column: str | None = flag("column of the label (default label)", None)
    labels: tuple[str, ...] = flag("labels, in order; of two, the second is the positive class", ())
    multi_label: bool = flag("any number of labels per row, joined by |", False)
    unescape_html: bool = flag(
        "conversion of HTML entities such as &amp; to characters",
        False,
        former_name="html_entities",
    )
    max_seq_length: int | None = flag(
        "maximum tokens per text or pair, with [CLS] and [SEP] (default 128; span_qa 384)", None
    )
    truncation: str = flag(
        "part of a longer text that is kept: first tokens, last tokens, or 1/4 first and 3/4 last",
        "head",
        choices=("head", "tail", "head_tail"),
    )
    doc_stride: int | None = flag(
        "tokens between the starts of two windows of a long text (span_qa: default 128)",
        None,
        former_name="stride",
    )
    max_query_length: int = flag("maximum tokens per question", 64)
    max_answer_length: int = flag("maximum tokens per answer", 30)
    # Class imbalance.
    class_weights: tuple[str, ...] = flag("loss weights: one number per label, or balanced", ())
    balanced_sampling: bool = flag("sampling of all classes equally often", False)
    focal_gamma: float = flag("exponent of the focal loss; 0 is cross-entropy, 2 is usual", 0.0)
    prior_bias: bool = flag("initialization of the output biases from class frequencies", False)
    rare_label: str | None = flag(
        "label that is predicted from a threshold on, tuned on dev (for f1 without "
        "--threshold_objective)",
        None,
    )
    threshold_objective: str | None = flag(
        "objective of tuning thresholds on the first dev file: f1, precision=P or recall=R",
        None,
        former_name="aim",
    )
    calibrate: bool = flag("temperature scaling, fitted on the first dev file", False)
    # Anomaly detection.
    normal_labels: tuple[str, ...] = flag(
        "labels of normal rows", (), former_name="ordinary_labels"
    )
    false_alarm_rate: float = flag(
        "maximum fraction of normal dev rows that are flagged as anomalies", 0.05
    )
    latent_dim: int = flag("latent dimension of the autoencoder", 32, former_name="code_size")
    # Training.
    global_batch_size: int | None = flag(
        "examples per step, over all replicas (default 32; anomaly 128)", None
    )
    epochs: int | None = flag("passes over the training rows (default 3; anomaly 20)", None)
    learning_rate: float | None = flag("peak learning rate (default 5e-5; anomaly 3e-3)", None)
    warmup_proportion: float = flag("fraction of the steps used for learning rate warmup", 0.1)
    schedule: str = flag(
        "linear decay of the learning rate: released counts from step 0 (google-research/bert), "
        "continuous from the peak (Hugging Face)",
        "released",
        choices=("released", "continuous"),
    )
    weight_decay_rate: float = flag(
        "weight decay of AdamW, not applied to biases and LayerNorm", 0.01
    )
    layer_decay: float = flag("factor on the learning rate from each layer to the one below", 1.0)
    frozen_layers: int | None = flag(
        "number of lowest layers that are not trained, together with the embeddings", None
    )
    patience: int | None = flag("evaluations without improvement before training stops", None)
    bias_correction: bool = flag("bias correction of Adam (google-research/bert has none)", True)
    seed: int = flag("seed of head initialization, row order and dropout", 0)
    strategy: str = flag(
        "one device; one replica per local GPU; several processes from TF_CONFIG; TPU cores",
        "none",
        choices=("none", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = flag("TPU name or grpc:// address, or local", "local")
    precision: str = flag(
        "precision of matrix products in training; tf32 rounds float32 factors, on GPUs and TPUs",
        "float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    do_lower_case: bool | None = flag(
        "lower-casing of the text; by default as in the pretrained weights' configuration", None
    )
    save_every: int = flag("steps between checkpoints, in addition to one per epoch", 1000)
    log_every: int = flag("steps between progress lines", 10)

    def __post_init__(self) -> None:
        for name, value in {**registry.DEFAULTS, **self.task_type.defaults}.items():
            if getattr(self, name) is None:
                # The dataclass is frozen, and its defaults depend on the task type.
                object.__setattr__(self, name, value)
        for name, minimum in (
            ("max_seq_length", 4),
            ("global_batch_size", 1),
            ("epochs", 1),
            ("save_every", 1),
            ("log_every", 1),
            ("seed", 0),
            ("doc_stride", 1),
            ("max_query_length", 1),
            ("max_answer_length", 1),
            ("frozen_layers", 0),
            ("patience", 1),
            ("latent_dim", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f"--{name}={value}: expected an integer >= {minimum}")
        if self.seed >= 2**32:
            raise UserError(f"--seed={self.seed}: expected an integer < 2**32")
        if not self.learning_rate > 0:
            raise UserError(f"--learning_rate={self.learning_rate}: expected a number > 0")
        if not 0 <= self.warmup_proportion < 1:
            raise UserError(
                f"--warmup_proportion={self.warmup_proportion}: expected a number >= 0 and < 1"
            )
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"--layer_decay={self.layer_decay}: expected a number > 0 and <= 1")
        if not 0 < self.false_alarm_rate < 1:
            raise UserError(
                f"--false_alarm_rate={self.false_alarm_rate}: expected a number > 0 and < 1"
            )
        for name in ("weight_decay_rate", "focal_gamma"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name}={getattr(self, name)}: expected a number >= 0")
        if len(self.labels) == 1 or len(set(map(as_label, self.labels))) != len(self.labels):
            raise UserError(
                f"--labels={','.join(self.labels)}: expected at least two different labels"
            )
        for name, given in (("train", [self.train]), ("dev", self.dev)):
            for path in given:
                paths.check_local_file(name, path)
        # A flag that the task type does not use would be ignored silently.
        for name in registry.OPTIONS:
            if self._is_given(name) and name not in self.task_type.options:
                raise UserError(f"--{name}: not supported by --task={self.task}")
        for name in ("text_column", "text_b_column", "label_column"):
            if self._is_given(name) and "file_format" in self._dataset.options:
                raise UserError(
                    f"--{name}: not supported, since the files of {self.task} have fixed columns"
                )
        class_imbalance.check_options(**vars(self))
        for name in ("threshold_objective", "calibrate", "rare_label", "patience"):
            if self._is_given(name) and not self.dev:
                raise UserError(f"--{name}: requires --dev")
        if self.task_type.needs_dev and not self.dev:
            raise UserError(f"--task={self.task}: requires --dev, on which its threshold is tuned")

    def check(self) -> None:
        """Check data files, weights and the output directory before TensorFlow is imported.

        Raises:
            UserError: If a file, the weights or the output directory cannot be used.
        """
        self.data_hashes()
        kind, options = self.task_options()
        for path in (self.train, *self.dev):
            inputs.check_rows({"kind": kind, **options}, path, labelled=True)
        self._check_output()

    def _check_output(self):
        if Run.check_resume(self.output_dir, self.recorded(), self._dataset.kind) is None:
            config = sources.check(self.init_from)
            if config is not None:
                self.check_fits(config, self.init_from)

    def check_fits(self, config: BertConfig, origin: str) -> None:
        """Check that pretrained weights have enough positions and layers.

        Args:
            config: Configuration of the weights.
            origin: Where the weights come from, for the message.

        Raises:
            UserError: If they do not.
        """
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at most "
                f"{config.max_position_embeddings}, the number of positions of {origin}"
            )
        if (self.frozen_layers or 0) > config.num_hidden_layers:
            raise UserError(
                f"--frozen_layers={self.frozen_layers}: expected at most "
                f"{config.num_hidden_layers}, the number of layers of {origin}"
            )

    def data_hashes(self) -> dict[str, str]:
        """Return {path: sha256} of the data files.

        Raises:
            UserError: If a dev file has the content of the training file.
        """
        hashes = {path: files.sha256(path) for path in (self.train, *self.dev)}
        for path in self.dev:
            if hashes[path] == hashes[self.train]:
                raise UserError(
                    f"--dev={path}: same content as --train={self.train}; expected rows that "
                    "training does not use"
                )
        return hashes

    def recorded(self) -> dict[str, Any]:
        """Return the settings saved in train.json: all but the output directory."""
        fields = (field.name for field in dataclasses.fields(FinetuneSettings))
        return {name: getattr(self, name) for name in fields if name != "output_dir"}

    @property
    def task_type(self) -> registry.TaskType:
        """The registry entry of the task type."""
        return registry.TASK_TYPES[self._dataset.kind]

    @property
    def _dataset(self):
        return registry.DATASETS.get(self.task, registry.Dataset(self.task, {}))

    def task_options(self) -> tuple[str, dict[str, Any]]:
        """Return the task type's name and the keyword arguments of its `from_data`.

        The arguments come from the flags that were given and from the dataset.
        """
        options = {"max_seq_length": self.max_seq_length, **self._dataset.options}
        for name in self.task_type.options:
            if self._is_given(name):
                options[name] = getattr(self, name)
        # Flags name one or two columns; the task has a tuple of them.
        columns = [options.pop(name, None) for name in ("text_column", "text_b_column")]
        if any(columns):
            options["text_columns"] = (columns[0] or "text", *columns[1:][: columns[1] is not None])
        return self._dataset.kind, options

    def _is_given(self, name):
        # A flag that is set to its default counts as not given.
        default = {field.name: field.default for field in dataclasses.fields(self)}[name]
        return getattr(self, name) != default


@dataclasses.dataclass(frozen=True)
class SweepSettings(FinetuneSettings):
    """Settings of tasks.finetune: one run, or a sweep over `seeds` and `learning_rates`.

    The runs of a sweep are subdirectories of `output_dir`, named after the values that differ.
    """

    seeds: tuple[str, ...] = flag(
        "seeds of a sweep: one run per seed, with mean and standard deviation of the dev scores", ()
    )
    learning_rates: tuple[str, ...] = flag(
        "learning rates of a sweep, each combined with every seed", ()
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Values that the flags have if they are not given.
        usual = {"seed": 0, **registry.DEFAULTS, **self.task_type.defaults}
        for name, of_one, number, expected in (
            ("seeds", "seed", int, "integers"),
            ("learning_rates", "learning_rate", float, "numbers"),
        ):
            given = getattr(self, name)
            if not given:
                continue
            try:
                values = tuple(number(value) for value in given)
            except ValueError:
                raise UserError(
                    f"--{name}={','.join(map(str, given))}: expected {expected}, joined by commas"
                ) from None
            if len(set(values)) < len(values):
                raise UserError(f"--{name}={','.join(map(str, given))}: expected distinct values")
            if getattr(self, of_one) != usual[of_one]:
                raise UserError(f"--{of_one}: cannot be combined with --{name}")
            if not self.dev:
                raise UserError(f"--{name}: requires --dev, on which the runs are compared")
            object.__setattr__(self, name, values)
        self.runs()  # Reports a value that is invalid for a run now, not when its turn comes.

    def _check_output(self):
        if self.is_sweep:
            self.check_is_no_run()
        for settings in self.runs().values():
            FinetuneSettings._check_output(settings)

    def check_is_no_run(self) -> None:
        """Check the output directory of a sweep.

        Raises:
            UserError: If it contains a single run.
        """
        if Run.exists(self.output_dir):
            raise UserError(
                f"--output_dir={self.output_dir}: contains a single run; choose a new directory"
            )

    @property
    def is_sweep(self) -> bool:
        """Whether the flags ask for several runs."""
        return bool(self.seeds or self.learning_rates)

    def runs(self) -> dict[str, FinetuneSettings]:
        """Return the settings per run, by the run's name.

        They are in the order of the flags, learning rates first. A single run has the name "".
        """
        of_one = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(FinetuneSettings)
        }
        if not self.is_sweep:
            return {"": FinetuneSettings(**of_one)}
        runs = {}
        for rate in self.learning_rates or (self.learning_rate,):
            for seed in self.seeds or (self.seed,):
                name = f"seed-{seed}"
                if self.learning_rates:
                    name = f"learning_rate-{rate_name(rate)}-{name}"
                changes = {"learning_rate": rate, "seed": seed}
                changes["output_dir"] = os.path.join(self.output_dir, name)
                runs[name] = FinetuneSettings(**{**of_one, **changes})
        return runs


def rate_name(rate: float) -> str:
    """Format a learning rate for a directory name: "2e-5", where Python writes "2e-05"."""
    return repr(rate).replace("e-0", "e-")
