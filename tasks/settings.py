"""The settings of fine-tuning, a field a flag. Free of TensorFlow: a wrong one is told at once."""

import dataclasses
import os

from bert_tf import files, paths
from bert_tf.command import setting
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.weights import sources
from tasks import catalog, inputs, rare_classes
from tasks.forms.records import as_label


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """What tasks.finetune does. Raises UserError, naming the flag, on a value that cannot be."""

    task: str = setting("kind of task, or a data set known by name", choices=catalog.NAMES)
    train: str = setting("training rows in a format of the task (docs/data-formats.md)")
    init_from: str = setting(
        "where the weights come from: a run, a Hugging Face directory, a Google release, a "
        "keras-nlp preset"
    )
    output_dir: str = setting("run directory to make, or to go on with")
    dev: tuple[str, ...] = setting(
        "files to evaluate on after each epoch; the first one chooses the best checkpoint", ()
    )
    # The rows.
    text_column: str | None = setting("column of the text (text)", None)
    text_b_column: str | None = setting("column of the second text of a pair", None)
    label_column: str | None = setting("column of the label (label)", None)
    labels: tuple[str, ...] = setting(
        "the labels in order; of two, the second is the positive one", ()
    )
    multi_label: bool = setting("a row may have several labels, joined by |, or none", False)
    html_entities: bool = setting("texts hold &amp; and the like, to be taken as characters", False)
    max_seq_length: int | None = setting(
        "tokens a text or pair is cut to, with [CLS] and [SEP] (128; span_qa 384)", None
    )
    truncation: str = setting(
        "which part of a longer text stays: its first tokens, its last, or a quarter and the rest",
        "head",
        choices=("head", "tail", "head_tail"),
    )
    stride: int | None = setting(
        "tokens from one window of a long text to the next (span_qa 128)", None
    )
    max_query_length: int = setting("tokens a question is cut to", 64)
    max_answer_length: int = setting("tokens an answer has at most", 30)
    # Rare classes.
    class_weights: tuple[str, ...] = setting(
        "how much an example of each class counts in training: a number a label, or balanced", ()
    )
    balanced_sampling: bool = setting("draw from every class equally often", False)
    focal_gamma: float = setting("focal loss: how much easy examples count less (2 is usual)", 0.0)
    prior_bias: bool = setting("begin with the classes' shares as the model's answer", False)
    rare_label: str | None = setting(
        "the label to be given from a threshold on, tuned on dev (for f1, if no --aim)", None
    )
    aim: str | None = setting(
        "what thresholds are tuned for on the first dev file: f1, precision=P or recall=R", None
    )
    calibrate: bool = setting("fit a temperature to the probabilities on the first dev file", False)
    # The unusual.
    ordinary_labels: tuple[str, ...] = setting("the labels of what is ordinary", ())
    false_alarm_rate: float = setting("share of the ordinary that may be called unusual", 0.05)
    code_size: int = setting("width of the autoencoder's middle", 32)
    # Training.
    global_batch_size: int | None = setting(
        "examples a step, over all replicas (32; anomaly 128)", None
    )
    epochs: int | None = setting("passes over the training rows (3; anomaly 20)", None)
    learning_rate: float | None = setting("peak learning rate (5e-5; anomaly 3e-3)", None)
    warmup_proportion: float = setting("share of the steps over which the learning rate rises", 0.1)
    schedule: str = setting(
        "the fall of the learning rate: counted from step 0, as released, or from the peak",
        "released",
        choices=("released", "continuous"),
    )
    weight_decay_rate: float = setting("AdamW's decay, off for biases and LayerNorm", 0.01)
    layer_decay: float = setting("the learning rate of each layer below the next, as a share", 1.0)
    frozen_layers: int | None = setting(
        "lowest layers that are not trained, nor are the embeddings then", None
    )
    patience: int | None = setting(
        "end after so many evaluations in a row without a better one", None
    )
    bias_correction: bool = setting("Adam's bias correction (the released code has none)", True)
    seed: int = setting("seed of the head, the order of the rows and dropout", 0)
    strategy: str = setting(
        "one device; a replica a local GPU; several processes, as TF_CONFIG says; TPU cores",
        "none",
        choices=("none", "mirrored", "multi_worker", "tpu"),
    )
    tpu: str = setting("the TPU's name or grpc:// address, or local", "local")
    precision: str = setting(
        "matrix products in training; tf32: float32 with rounded factors, on GPUs and TPUs",
        "float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    do_lower_case: bool | None = setting(
        "lower-case the text; by default what the weights' source says", None
    )
    save_every: int = setting("steps between checkpoints, beside those after each epoch", 1000)
    log_every: int = setting("steps between lines of progress", 10)

    def __post_init__(self):
        for name, value in {**catalog.DEFAULTS, **self.kind.defaults}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, least in (
            ("max_seq_length", 4),
            ("global_batch_size", 1),
            ("epochs", 1),
            ("save_every", 1),
            ("log_every", 1),
            ("seed", 0),
            ("stride", 1),
            ("max_query_length", 1),
            ("max_answer_length", 1),
            ("frozen_layers", 0),
            ("patience", 1),
            ("code_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name}={value}: wanted at least {least}")
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
        for flag, given in (("train", [self.train]), ("dev", self.dev)):
            for path in given:
                paths.check_local_file(flag, path)
        for name in catalog.OPTIONS:
            if self._is_given(name) and name not in self.kind.options:
                raise UserError(f"--{name}: not for --task={self.task}")
        for name in ("text_column", "text_b_column", "label_column"):
            if self._is_given(name) and "form" in self._data_set.options:
                raise UserError(f"--{name}: the files of {self.task} have columns of their own")
        rare_classes.check_options(**vars(self))
        for name in ("aim", "calibrate", "rare_label", "patience"):
            if self._is_given(name) and not self.dev:
                raise UserError(f"--{name}: wants --dev, on which it is decided")
        if self.kind.needs_dev and not self.dev:
            raise UserError(f"--task={self.task}: wants --dev, on which its threshold is decided")

    def check(self):
        """Raises UserError at what files show, without TensorFlow: data, weights, output."""
        self.data_hashes()
        kind, options = self.task_options()
        for path in (self.train, *self.dev):
            inputs.check_rows({"kind": kind, **options}, path, labelled=True)
        self._check_output()

    def _check_output(self):
        if Run.check_resume(self.output_dir, self.recorded(), self._data_set.kind) is None:
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
    def kind(self):
        """The catalog's entry."""
        return catalog.KINDS[self._data_set.kind]

    @property
    def _data_set(self):
        return catalog.DATA_SETS.get(self.task, catalog.DataSet(self.task, {}))

    def task_options(self):
        """The kind's name, and what its `from_data` takes beside the path: flags and data set."""
        options = {"max_seq_length": self.max_seq_length, **self._data_set.options}
        for name in self.kind.options:
            if self._is_given(name):
                options[name] = getattr(self, name)
        columns = [options.pop(name, None) for name in ("text_column", "text_b_column")]
        if any(columns):
            options["text_columns"] = (columns[0] or "text", *columns[1:][: columns[1] is not None])
        return self._data_set.kind, options

    def _is_given(self, name):
        default = {field.name: field.default for field in dataclasses.fields(self)}[name]
        return getattr(self, name) != default


@dataclasses.dataclass(frozen=True)
class StudySettings(FinetuneSettings):
    """What tasks.finetune takes: one run's settings, or of one each for `seeds`, `learning_rates`.

    The runs of a study lie in folders of `output_dir`, named after what differs.
    """

    seeds: tuple[str, ...] = setting(
        "a study: a run each, and the mean and standard deviation of their scores on dev", ()
    )
    learning_rates: tuple[str, ...] = setting("a study: with each of the seeds, or --seed", ())

    def __post_init__(self):
        super().__post_init__()
        usual = {"seed": 0, **catalog.DEFAULTS, **self.kind.defaults}
        for name, of_one, number, wanted in (
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
                    f"--{name}={','.join(map(str, given))}: wanted {wanted}, joined by commas"
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
        if self.is_study:
            self.check_is_no_run()
        for settings in self.runs().values():
            FinetuneSettings._check_output(settings)

    def check_is_no_run(self):
        """Raises UserError where the directory of the study is that of a single run."""
        if Run.is_at(self.output_dir):
            raise UserError(
                f"--output_dir={self.output_dir}: a single run is there; name a new directory"
            )

    @property
    def is_study(self):
        return bool(self.seeds or self.learning_rates)

    def runs(self):
        """{name of a run: its FinetuneSettings}, in the order of the flags, rates first."""
        of_one = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(FinetuneSettings)
        }
        if not self.is_study:
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
