"""Settings of fine-tuning, of sweeps and of dry runs; each field is a flag.

The module is free of TensorFlow, so that wrong flags are reported at once.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.planning.devices import PlannedDevices
from bert_tf.runs.run import Run
from bert_tf.storage import files, paths
from bert_tf.system.command import check_text, defaults, flag
from bert_tf.weights import sources
from tasks.base import task_types
from tasks.base.task_types import MEAN_POOLING_RATE, read_file
from tasks.data.readers.rows import FileRows, as_label, check_good
from tasks.training.settings import (
    TrainingSettings,
    check_teacher,
    flag_by_task,
    format_number,
    recorded,
)
from tasks.types.classification import class_imbalance

# Task types with a flag in common.
_TEXT = ("classification", "regression", "anomaly", "similarity")
_PAIR = ("classification", "regression", "similarity")


class DataRows(NamedTuple):
    """The rows of the data files by path, read once.

    Attributes:
        labelled: Those of --train and --dev.
        unlabelled: Those of --unlabelled.
    """

    labelled: Mapping[str, FileRows]
    unlabelled: Mapping[str, FileRows]

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each file."""
        return {path: rows.sha256 for of in self for path, rows in of.items()}


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Files and task of bert-tf finetune.

    A field with `tasks` is an option of these task types, which is passed to their `from_data` if
    it is given; the other fields apply to all task types.
    """

    task: str = flag(
        "task type, or name of a published dataset",
        choices=(*task_types.TASK_TYPES, *task_types.DATASETS),
    )
    train: str = flag("training file, in a format of the task (docs/data-formats.md)")
    init_from: str = flag(
        "pretrained or fine-tuned weights: id of the Hugging Face hub, run, Hugging Face or "
        "sentence-transformers directory, TensorFlow checkpoint or keras-hub preset"
    )
    output_dir: str = flag("run directory, created or resumed")
    dev: tuple[str, ...] = flag(
        "dev files, evaluated every epoch, or --eval_every steps; the first one selects the best "
        "checkpoint",
        (),
    )
    unlabelled: tuple[str, ...] = flag(
        "files of rows whose labels are not read, learned from the teacher alone", ()
    )
    # Data.
    text_column: str | None = flag(
        "column of the text (default text)", None, tasks=(*_TEXT, "tagging")
    )
    text_b_column: str | None = flag("column of the second text of a pair", None, tasks=_PAIR)
    label_column: str | None = flag(
        "column of the label (default label); with --multi_label also several of 0 and 1, joined "
        "by commas",
        None,
        tasks=_TEXT,
    )
    labels: tuple[str, ...] = flag(
        "labels, in order; of two, the second is the positive class",
        (),
        tasks=("classification", "tagging"),
    )
    scheme: str = flag(
        "tags of entities (bio), or a tag per word, such as parts of speech (plain)",
        "bio",
        choices=("bio", "plain"),
        tasks=("tagging",),
    )
    multi_label: bool = flag(
        "any number of labels per row, joined by |, or columns of 0 and 1",
        False,
        tasks=("classification",),
    )
    max_seq_length: int = flag_by_task(
        "maximum tokens per text or pair, with [CLS] and [SEP]; of task similarity by default that "
        "of an embedder as --init_from",
        "max_seq_length",
        bounds={">=": 4},
    )
    truncation: str = flag(
        "part of a longer text that is kept: first tokens, last tokens, or 1/4 first and 3/4 last",
        "head",
        choices=("head", "tail", "head_tail"),
        tasks=_TEXT,
    )
    doc_stride: int | None = flag(
        "tokens between the starts of two windows of a long text (span_qa: default 128)",
        None,
        bounds={">=": 1},
        tasks=("span_qa", "tagging"),
    )
    max_query_length: int = flag(
        "maximum tokens per question", 64, bounds={">=": 1}, tasks=("span_qa",)
    )
    max_answer_length: int = flag(
        "maximum tokens per answer", 30, bounds={">=": 1}, tasks=("span_qa",)
    )
    # Class imbalance.
    class_weights: tuple[str, ...] = flag(
        "loss weights: one number per label, or balanced", (), tasks=("classification",)
    )
    balanced_sampling: bool = flag(
        "sampling of all classes equally often", False, tasks=("classification",)
    )
    focal_gamma: float = flag(
        "exponent of the focal loss; 0 is cross-entropy, 2 is usual",
        0.0,
        bounds={">=": 0},
        tasks=("classification",),
    )
    rare_label: str | None = flag(
        "label that is predicted from a threshold on, tuned on dev (for f1 without "
        "--threshold_objective); of two labels, it is the second",
        None,
        tasks=("classification",),
    )
    threshold_objective: str | None = flag(
        "objective of tuning the threshold of --rare_label, or those of all labels with "
        "--multi_label, on the first dev file: f1, precision=P or recall=R",
        None,
        tasks=("classification",),
    )
    calibrate: bool = flag(
        "temperature scaling, fitted on the first dev file", False, tasks=("classification",)
    )
    # Ranking.
    ranking_loss: str = flag(
        "loss per text (binary), or over all texts of a query (listwise)",
        "binary",
        choices=("binary", "listwise"),
        tasks=("ranking",),
    )
    texts_per_query: int = flag(
        "maximum texts per query in training, at least half of them irrelevant if possible",
        16,
        bounds={">=": 1},
        tasks=("ranking",),
    )
    # Anomaly detection.
    normal_labels: tuple[str, ...] = flag("labels of normal rows", (), tasks=("anomaly",))
    false_alarm_rate: float = flag(
        "maximum fraction of normal dev rows that are flagged as anomalies",
        0.05,
        bounds={">": 0, "<": 1},
        tasks=("anomaly",),
    )
    latent_dim: int = flag(
        "latent dimension of the autoencoder",
        32,
        bounds={">=": 1},
        tasks=("anomaly",),
    )
    # Embeddings.
    loss: str | None = flag(
        "contrastive: softmax over the positives and negatives of the batch; triplet: margin of "
        "distances; cosent or cosine: order or values of scores (default contrastive, with scores "
        "cosent)",
        None,
        choices=("contrastive", "triplet", "cosent", "cosine"),
        tasks=("similarity",),
    )
    loss_temperature: float = flag(
        "divisor of the cosines of the losses contrastive and cosent",
        0.05,
        bounds={">": 0},
        tasks=("similarity",),
    )
    symmetric: bool = flag(
        "contrastive loss of the anchor of each positive as well", False, tasks=("similarity",)
    )
    triplet_margin: float = flag(
        "difference of distances in the loss triplet",
        5.0,
        bounds={">": 0},
        tasks=("similarity",),
    )
    negatives_column: str | None = flag(
        "column of hard negatives, a text or a list (default negatives, negative, and negative_1, "
        "negative_2, ..., those that there are)",
        None,
        tasks=("similarity",),
    )
    pooling: str | None = flag(
        "vector of a text from those of its tokens: cls, mean, max or mean_sqrt_len, or several "
        "joined by + (default that of an embedder as --init_from, otherwise mean); of "
        "classification pooled, [CLS] through the pooler, or mean (default pooled if the pooler of "
        "--init_from was trained, which that of an embedder was not)",
        None,
        tasks=("classification", "similarity"),
    )
    normalize: bool | None = flag(
        "vectors of length 1 (default as of an embedder as --init_from, otherwise true)",
        None,
        tasks=("similarity",),
    )
    dense_units: tuple[str, ...] = flag(
        "sizes of dense layers after pooling, a projection (default those of an embedder as "
        "--init_from, otherwise none)",
        (),
        tasks=("similarity",),
    )
    matryoshka_dims: tuple[str, ...] = flag(
        "sizes of prefixes of the vectors that are trained to be vectors themselves",
        (),
        tasks=("similarity",),
    )


@dataclasses.dataclass(frozen=True)
class FinetuneSettings(PlannedDevices, TrainingSettings, DataSettings):
    """Settings of bert-tf finetune: one run, or a sweep over `seeds` and `learning_rates`.

    The fields of `DataSettings` come first. A field that is `None` gets the default of the task
    type, if there is one. The runs of a sweep are subdirectories of `output_dir`, named after the
    values that differ.

    Raises:
        UserError: If a value is out of range or does not fit the task; the message names the flag.
    """

    seeds: tuple[int, ...] = flag(
        "seeds of a sweep: one run per seed, with mean and standard deviation of the dev scores", ()
    )
    learning_rates: tuple[float, ...] = flag(
        "learning rates of a sweep, each combined with every seed", ()
    )
    dry_run: bool = flag(
        "check files, weights and the output directory, create nothing, and print an estimate",
        False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                # The dataclass is frozen, and its defaults depend on the task type.
                object.__setattr__(self, field.name, self._default(field))
        super().__post_init__()
        self._check_data()
        self.check_planned(self.dry_run, self.strategy, self.global_batch_size)
        self._check_sweep("seeds", "seed", int, "integers")
        self._check_sweep("learning_rates", "learning_rate", float, "numbers")
        self.runs()  # Reports a value that is invalid for a run now, not when its turn comes.

    def _check_data(self):
        for name in ("init_from", "teacher"):
            check_text(name, getattr(self, name))
        labels = list(map(as_label, self.labels))
        shown = f"--labels={','.join(self.labels)}"
        if not all(labels):
            raise UserError(
                f"{shown}: expected names joined by commas, received an empty one; remove a comma"
            )
        # Of entities, one type is enough.
        is_single = len(self.labels) == 1 and self._dataset.kind == "classification"
        if is_single or len(set(labels)) != len(labels):
            raise UserError(f"{shown}: expected at least two different labels")
        paths.check_local_file("train", self.train)
        for path in self.dev:
            paths.check_local_file("dev", path)
        for path in self.unlabelled:
            paths.check_local_file("unlabelled", path)
        if self.unlabelled and self.teacher is None:
            raise UserError("--unlabelled: requires --teacher")
        if self.unlabelled and self.balanced_sampling:
            raise UserError("--balanced_sampling: cannot be combined with --unlabelled")
        self.check_teacher_fits(self._dataset.kind)
        # A flag that the task type does not use would be ignored silently.
        given, kind = self._given(), self._dataset.kind
        for name, field in given.items():
            if kind not in field.metadata.get("tasks", task_types.TASK_TYPES):
                raise UserError(f"--{name}: not supported by --task={self.task}")
        for name in ("text_column", "text_b_column", "label_column"):
            if name in given and "file_format" in self._dataset.options:
                raise UserError(
                    f"--{name}: not supported, since the files of {self.task} have fixed columns"
                )
        class_imbalance.check_options(**vars(self))
        self.check_has_dev(bool(self.dev))
        for name in ("threshold_objective", "calibrate", "rare_label"):
            if name in given and not self.dev:
                raise UserError(f"--{name}: requires --dev")
        if task_types.TASK_TYPES[kind].needs_dev and not self.dev:
            raise UserError(f"--task={self.task}: requires --dev, on which its threshold is tuned")

    def _check_sweep(self, name, of_one, number, expected):
        """Check and convert the values that the runs of a sweep have for the flag `of_one`."""
        given = getattr(self, name)
        if not given:
            return
        shown = f"--{name}={','.join(map(str, given))}"
        try:
            values = tuple(number(value) for value in given)
        except ValueError:
            raise UserError(f"{shown}: expected {expected}, joined by commas") from None
        if len(set(values)) < len(values):
            raise UserError(f"{shown}: expected distinct values")
        if of_one in self._given():
            raise UserError(f"--{of_one}: cannot be combined with --{name}")
        if not self.dev:
            raise UserError(f"--{name}: requires --dev, on which the runs are compared")
        object.__setattr__(self, name, values)

    def check(self) -> DataRows:
        """Check data files, weights and the output directory before TensorFlow is imported.

        Returns:
            The rows of the data files.

        Raises:
            UserError: If a file, the weights or the output directory cannot be used.
        """
        data = self.read_data()
        for rows in (*data.labelled.values(), *data.unlabelled.values()):
            check_good(rows)
        if self.teacher and not files.is_remote(self.teacher):  # That is read with TensorFlow.
            check_teacher(self.teacher, self._dataset.kind)
        if self.is_sweep:
            self.check_is_no_run()
        for settings in self.runs().values():
            settings._check_output()
        return data

    def _check_output(self):
        """Check the output directory of one run, and the weights that it starts from."""
        if self.strategy == "multi_worker" and not self.dry_run:
            return  # Workers may see the run's files late; they check it when all see the same.
        if Run.is_new(
            self.output_dir, self.recorded(), self._dataset.kind, defaults(FinetuneSettings)
        ):
            config = sources.check(self.init_from)
            if config is not None:
                self.check_fits(config, self.init_from)

    def check_fits(self, config: BertConfig, origin: str) -> None:
        """Check that weights, which come from `origin`, have enough positions and layers.

        Raises:
            UserError: If they do not.
        """
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"--max_seq_length={self.max_seq_length}: expected at most "
                f"{config.max_position_embeddings}, the number of positions of {origin}"
            )
        super().check_fits(config, origin)

    def check_is_no_run(self) -> None:
        """Raise UserError if the output directory of a sweep contains a single run."""
        if Run.exists(self.output_dir):
            raise UserError(
                f"--output_dir={self.output_dir}: contains a single run; choose a new directory"
            )

    @property
    def is_sweep(self) -> bool:
        """Whether the flags ask for several runs."""
        return bool(self.seeds or self.learning_rates)

    def runs(self) -> dict[str, Self]:
        """Return the settings per run, by the run's name.

        They are in the order of the flags, learning rates first. A single run has the name "".
        """
        if not self.is_sweep:
            return {"": self}
        runs = {}
        for rate in self.learning_rates or (self.learning_rate,):
            for seed in self.seeds or (self.seed,):
                name = f"seed-{seed}"
                if self.learning_rates:
                    name = f"learning_rate-{format_number(rate)}-{name}"
                runs[name] = dataclasses.replace(
                    self,
                    learning_rate=rate,
                    seed=seed,
                    output_dir=os.path.join(self.output_dir, name),
                    learning_rates=(),
                    seeds=(),
                )
        return runs

    def read_data(self) -> DataRows:
        """Return the rows of the data files.

        Raises:
            UserError: If a dev file has the content of a file that is trained on.
        """
        kind, options = self.task_options()
        task = {"kind": kind, **options}
        of_others = {**task, "for_training": True}
        of_train = {**of_others, "has_teacher": self.teacher is not None}
        # An embedder reads single texts; --text_b_column is of pairs that it learns.
        learns_pairs = kind == "similarity" and len(options.get("text_columns", ())) == 2
        if learns_pairs:
            of_others["text_columns"] = ("text",)
        data = DataRows(
            {
                self.train: read_file(of_train, self.train),
                **{path: read_file(task, path) for path in self.dev},
            },
            {path: read_file(of_others, path, labelled=False) for path in self.unlabelled},
        )
        trained = {"train": (self.train,), "unlabelled": self.unlabelled}
        for path in self.dev:
            for name, others in trained.items():
                for other in others:
                    if data.digests[path] == data.digests[other]:
                        raise UserError(
                            f"--dev={path}: same content as --{name}={other}; expected rows that "
                            "training does not use"
                        )
        return data

    def recorded(self) -> dict[str, Any]:
        """Return the settings of a run that are saved in train.json."""
        of_run = (*dataclasses.fields(DataSettings), *dataclasses.fields(TrainingSettings))
        names = (field.name for field in of_run if field.name != "output_dir")
        return recorded({name: getattr(self, name) for name in names})

    @property
    def _dataset(self):
        return task_types.DATASETS.get(self.task, task_types.Dataset(self.task, {}))

    def task_options(self) -> tuple[str, dict[str, Any]]:
        """Return the task type's name and the keyword arguments of its `from_data`.

        The arguments come from the flags that were given and from the dataset.
        """
        options = {"max_seq_length": self.max_seq_length, **self._dataset.options}
        given = self._given().items()
        options |= {name: getattr(self, name) for name, field in given if "tasks" in field.metadata}
        # Flags name one or two columns; the task has a tuple of them.
        columns = [options.pop(name, None) for name in ("text_column", "text_b_column")]
        if any(columns):
            options["text_columns"] = (columns[0] or "text", *columns[1:][: columns[1] is not None])
        return self._dataset.kind, options

    def _given(self):
        """Return {name: field} of the flags that differ from their defaults."""
        return {
            field.name: field
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != self._default(field)
        }

    def _default(self, field):
        if field.name == "epochs" and self.num_train_steps is not None:
            return None
        default = field.metadata.get("defaults", {}).get(self._dataset.kind, field.default)
        if field.name == "max_seq_length" and self._dataset.kind == "similarity":
            return self._embedder().get(field.name, default)
        if field.name == "learning_rate" and self._has_mean_pooling():
            return MEAN_POOLING_RATE
        return default

    def _has_mean_pooling(self):
        """Return whether a classifier has a head on the mean of the tokens."""
        if self._dataset.kind != "classification" or self.pooling is not None:
            return self._dataset.kind == "classification" and self.pooling == "mean"
        if Run.has_checkpoint(self.output_dir):
            return (Run.open(self.output_dir).task or {}).get("pooling") == "mean"
        return bool(self._embedder())

    def _embedder(self):
        """Return the fields of the embedder that training starts from, if it is one."""
        is_resumed = Run.has_checkpoint(self.output_dir)
        path = self.output_dir if is_resumed else self.init_from
        try:
            return sources.embedder_settings(path)
        except UserError:  # `check` reports it.
            return {}
