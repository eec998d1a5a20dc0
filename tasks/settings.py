"""The settings of fine-tuning, a field a flag. Free of TensorFlow: a wrong one is told at once."""

import dataclasses
import os

from bert_tf import files, paths
from bert_tf.command import flag
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.weights import sources
from tasks import class_imbalance, inputs, registry
from tasks.readers.records import as_label


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """What tasks.finetune does. Raises UserError, naming the flag, on a value that cannot be."""

    task: str = flag("kind of task, or a data set known by name", choices=registry.NAMES)
    train: str = flag("training rows in a format of the task (docs/data-formats.md)")
    init_from: str = flag(
        "where the weights come from: a run, a Hugging Face directory, a Google release, a "
        "keras-nlp preset"
    )
    output_dir: str = flag("run directory to make, or to go on with")
    dev: tuple[str, ...] = flag(
        "files to evaluate on after each epoch; the first one chooses the best checkpoint", ()
    )
    # The rows.
    text_column: str | None = flag("column of the text (text)", None)
    text_b_column: str | None = flag("column of the second text of a pair", None)
    label_column: str | None = flag("column of the label (label)", None)
    labels: tuple[str, ...] = flag(
        "the labels in order; of two, the second is the positive one", ()
    )
    multi_label: bool = flag("a row may have several labels, joined by |, or none", False)
    unescape_html: bool = flag(
        "texts hold &amp; and the like, to be taken as characters",
        False,
        former_name="html_entities",
    )
    max_seq_length: int | None = flag(
        "tokens a text or pair is cut to, with [CLS] and [SEP] (128; span_qa 384)", None
    )
    truncation: str = flag(
        "which part of a longer text stays: its first tokens, its last, or a quarter and the rest",
        "head",
        choices=("head", "tail", "head_tail"),
    )
    doc_stride: int | None = flag(
        "tokens from one window of a long text to the next (span_qa 128)",
        None,
        former_name="stride",
    )
    max_query_length: int = flag("tokens a question is cut to", 64)
    max_answer_length: int = flag("tokens an answer has at most", 30)
    # Rare classes.
    class_weights: tuple[str, ...] = flag(
        "how much an example of each class counts in training: a number a label, or balanced", ()
    )
    balanced_sampling: bool = flag("draw from every class equally often", False)
    focal_gamma: float = flag("focal loss: how much easy examples count less (2 is usual)", 0.0)
    prior_bias: bool = flag("begin with the classes' shares as the model's answer", False)
    rare_label: str | None = flag(
        "the label to be given from a threshold on, tuned on dev (for f1, if no "
        "--threshold_objective)",
        None,
    )
    threshold_objective: str | None = flag(
        "what thresholds are tuned for on the first dev file: f1, precision=P or recall=R",
        None,
        former_name="aim",
    )
    calibrate: bool = flag("fit a temperature to the probabilities on the first dev file", False)
    # The unusual.
    normal_labels: tuple[str, ...] = flag(
        "the labels of what is normal", (), former_name="ordinary_labels"
    )
    false_alarm_rate: float = flag("share of the normal that may be called unusual", 0.05)
    latent_dim: int = flag("width of the autoencoder's middle", 32, former_name="code_size")
    # Training.
    global_batch_size: int | None = flag(
        "examples a step, over all replicas (32; anomaly 128)", None
    )
    epochs: int | None = flag("passes over the training rows (3; anomaly 20)", None)
    learning_rate: float | None = flag("peak learning rate (5e-5; anomaly 3e-3)", None)
    warmup_proportion: float = flag("share of the steps over which the learning rate rises", 0.1)
    schedule: str = flag(
        "the fall of the learning rate: counted from step 0, as released, or from the peak",
        "released",
        choices=("released", "continuous"),
    )
    weight_decay_rate: float = flag("AdamW's decay, off for biases and LayerNorm", 0.01)
    layer_decay: float = flag("the learning rate of each layer below the next, as a share", 1.0)
    frozen_layers: int | None = flag(
        "lowest layers that are not trained, nor are the embeddings then", None
    )
    patience: int | None = flag("end after so many evaluations in a row without a better one", None)
    bias_correction: bool = flag("Adam's bias correction (the released code has none)", True)
    seed: int = flag("seed of the head, the order of the rows and dropout", 0)
    strategy: str = flag(
        "one device; a replica a local GPU; several processes, as TF_CONFIG says; TPU cores",
        "none",
        choices=("none", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = flag("the TPU's name or grpc:// address, or local", "local")
    precision: str = flag(
        "matrix products in training; tf32: float32 with rounded factors, on GPUs and TPUs",
        "float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    do_lower_case: bool | None = flag(
        "lower-case the text; by default what the weights' source says", None
    )
    save_every: int = flag("steps between checkpoints, beside those after each epoch", 1000)
    log_every: int = flag("steps between lines of progress", 10)

    def __post_init__(self):
        for name, value in {**registry.DEFAULTS, **self.task_type.defaults}.items():
            if getattr(self, name) is None:
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
                raise UserError(f"--{name}={value}: wanted at least {minimum}")
        if self.seed >= 2**32:
            raise UserError(f"--seed={self.seed}: wanted less than 2**32")
        if not self.learning_rate > 0:
            raise UserError(f"--learning_rate={self.learning_rate}: wanted a number over 0")
        if not 0 <= self.warmup_proportion < 1:
            raise UserError(
                f"--warmup_proportion={self.warmup_proportion}: wanted a share from 0 up to 1"
            )
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"--layer_decay={self.layer_decay}: wanted a share over 0 up to 1")
        if not 0 < self.false_alarm_rate < 1:
            raise UserError(
                f"--false_alarm_rate={self.false_alarm_rate}: wanted a share between 0 and 1"
            )
        for name in ("weight_decay_rate", "focal_gamma"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name}={getattr(self, name)}: wanted 0 or more")
        if len(self.labels) == 1 or len(set(map(as_label, self.labels))) != len(self.labels):
            raise UserError(
                f"--labels={','.join(self.labels)}: wanted two or more different labels"
            )
        for name, given in (("train", [self.train]), ("dev", self.dev)):
            for path in given:
                paths.check_local_file(name, path)
        for name in registry.OPTIONS:
            if self._is_given(name) and name not in self.task_type.options:
                raise UserError(f"--{name}: not for --task={self.task}")
        for name in ("text_column", "text_b_column", "label_column"):
            if self._is_given(name) and "file_format" in self._dataset.options:
                raise UserError(f"--{name}: the files of {self.task} have columns of their own")
        class_imbalance.check_options(**vars(self))
        for name in ("threshold_objective", "calibrate", "rare_label", "patience"):
            if self._is_given(name) and not self.dev:
                raise UserError(f"--{name}: wants --dev, on which it is decided")
        if self.task_type.needs_dev and not self.dev:
            raise UserError(f"--task={self.task}: wants --dev, on which its threshold is decided")

    def check(self):
        """Raises UserError at what files show, without TensorFlow: data, weights, output."""
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

    def check_fits(self, config, origin):
        """Raises UserError where weights have too few positions or layers."""
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: {origin} has "
                f"{config.max_position_embeddings} positions"
            )
        if (self.frozen_layers or 0) > config.num_hidden_layers:
            raise UserError(
                f"--frozen_layers={self.frozen_layers}: {origin} has {config.num_hidden_layers} "
                "layers"
            )

    def data_hashes(self):
        """{path: sha256} of the data files. Raises UserError where dev is the training file."""
        hashes = {path: files.sha256(path) for path in (self.train, *self.dev)}
        for path in self.dev:
            if hashes[path] == hashes[self.train]:
                raise UserError(
                    f"--dev={path}: holds what --train={self.train} holds; name rows that training "
                    "does not see"
                )
        return hashes

    def recorded(self):
        """The settings that train.json keeps: all but where the run lies."""
        fields = (field.name for field in dataclasses.fields(FinetuneSettings))
        return {name: getattr(self, name) for name in fields if name != "output_dir"}

    @property
    def task_type(self):
        """The registry's entry."""
        return registry.TASK_TYPES[self._dataset.kind]

    @property
    def _dataset(self):
        return registry.DATASETS.get(self.task, registry.Dataset(self.task, {}))

    def task_options(self):
        """The kind's name, and what its `from_data` takes beside the path: flags and data set."""
        options = {"max_seq_length": self.max_seq_length, **self._dataset.options}
        for name in self.task_type.options:
            if self._is_given(name):
                options[name] = getattr(self, name)
        columns = [options.pop(name, None) for name in ("text_column", "text_b_column")]
        if any(columns):
            options["text_columns"] = (columns[0] or "text", *columns[1:][: columns[1] is not None])
        return self._dataset.kind, options

    def _is_given(self, name):
        default = {field.name: field.default for field in dataclasses.fields(self)}[name]
        return getattr(self, name) != default


@dataclasses.dataclass(frozen=True)
class SweepSettings(FinetuneSettings):
    """What tasks.finetune takes: one run's settings, or of one each for `seeds`, `learning_rates`.

    The runs of a sweep lie in folders of `output_dir`, named after what differs.
    """

    seeds: tuple[str, ...] = flag(
        "a sweep: a run each, and the mean and standard deviation of their scores on dev", ()
    )
    learning_rates: tuple[str, ...] = flag("a sweep: with each of the seeds, or --seed", ())

    def __post_init__(self):
        super().__post_init__()
        usual = {"seed": 0, **registry.DEFAULTS, **self.task_type.defaults}
        for name, of_one, number, expected in (
            ("seeds", "seed", int, "whole numbers"),
            ("learning_rates", "learning_rate", float, "numbers"),
        ):
            given = getattr(self, name)
            if not given:
                continue
            try:
                values = tuple(number(value) for value in given)
            except ValueError:
                raise UserError(
                    f"--{name}={','.join(map(str, given))}: wanted {expected}, joined by commas"
                ) from None
            if len(set(values)) < len(values):
                raise UserError(f"--{name}={','.join(map(str, given))}: holds one of them twice")
            if getattr(self, of_one) != usual[of_one]:
                raise UserError(f"--{of_one}: not together with --{name}")
            if not self.dev:
                raise UserError(f"--{name}: wants --dev, on which the runs are compared")
            object.__setattr__(self, name, values)
        self.runs()  # A value that no run can have is told now.

    def _check_output(self):
        if self.is_sweep:
            self.check_is_no_run()
        for settings in self.runs().values():
            FinetuneSettings._check_output(settings)

    def check_is_no_run(self):
        """Raises UserError where the directory of the sweep is that of a single run."""
        if Run.exists(self.output_dir):
            raise UserError(
                f"--output_dir={self.output_dir}: a single run is there; name a new directory"
            )

    @property
    def is_sweep(self):
        return bool(self.seeds or self.learning_rates)

    def runs(self):
        """{name of a run: its FinetuneSettings}, in the order of the flags, rates first."""
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


def rate_name(rate):
    """2e-5 as one writes it: Python has 2e-05."""
    return repr(rate).replace("e-0", "e-")
