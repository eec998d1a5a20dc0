"""The settings of fine-tuning, a field a flag. Free of TensorFlow: a wrong one is told at once."""

import dataclasses
import pathlib

from bert_tf.command import setting
from bert_tf.errors import UserError
from tasks import catalog


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """What tasks.finetune does. Raises UserError, naming the flag, on a value that cannot be."""

    task: str = setting("kind of task, or a data set known by name", choices=catalog.NAMES)
    train: str = setting("training rows: .csv, .tsv or .jsonl")
    init_from: str = setting(
        "where the weights come from: a run, a Hugging Face directory, a Google release, a "
        "keras-nlp preset"
    )
    output_dir: str = setting("run directory to make, or to go on with")
    dev: tuple[str, ...] = setting(
        "files to evaluate on after each epoch; the first one chooses the best checkpoint", ()
    )
    text_column: str | None = setting("column of the text (text)", None)
    text_b_column: str | None = setting("column of the second text of a pair", None)
    label_column: str | None = setting("column of the label (label)", None)
    labels: tuple[str, ...] = setting(
        "the labels in order; of two, the second is the positive one", ()
    )
    max_seq_length: int = setting("tokens a text or pair is cut to, with [CLS] and [SEP]", 128)
    global_batch_size: int = setting("examples a step, over all replicas", 32)
    epochs: int = setting("passes over the training rows", 3)
    learning_rate: float = setting("peak learning rate", 5e-5)
    warmup_proportion: float = setting("share of the steps over which the learning rate rises", 0.1)
    schedule: str = setting(
        "the fall of the learning rate: counted from step 0, as released, or from the peak",
        "released",
        choices=("released", "continuous"),
    )
    weight_decay_rate: float = setting("AdamW's decay, off for biases and LayerNorm", 0.01)
    bias_correction: bool = setting("Adam's bias correction (the released code has none)", True)
    seed: int = setting("seed of the head, the order of the rows and dropout", 0)
    strategy: str = setting(
        "one device, or a replica a local GPU", "none", choices=("none", "mirrored")
    )
    precision: str = setting(
        "of the matrix products in training", "float32", choices=("float32", "bfloat16")
    )
    do_lower_case: bool | None = setting(
        "lower-case the text; by default what the weights' source says", None
    )
    save_every: int = setting("steps between checkpoints, beside those after each epoch", 1000)
    log_every: int = setting("steps between lines of progress", 10)

    def __post_init__(self):
        for name, least in (
            ("max_seq_length", 4),
            ("global_batch_size", 1),
            ("epochs", 1),
            ("save_every", 1),
            ("log_every", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise UserError(f"--{name}={getattr(self, name)}: wanted at least {least}")
        if self.seed >= 2**32:
            raise UserError(f"--seed={self.seed}: wanted less than 2**32")
        if not self.learning_rate > 0:
            raise UserError(f"--learning_rate={self.learning_rate}: wanted a number over 0")
        if not 0 <= self.warmup_proportion < 1:
            raise UserError(
                f"--warmup_proportion={self.warmup_proportion}: wanted a share from 0 up to 1"
            )
        if not self.weight_decay_rate >= 0:
            raise UserError(f"--weight_decay_rate={self.weight_decay_rate}: wanted 0 or more")
        if len(self.labels) == 1 or len(set(self.labels)) != len(self.labels):
            raise UserError(
                f"--labels={','.join(self.labels)}: wanted two or more different labels"
            )
        for flag, paths in (("train", [self.train]), ("dev", self.dev)):
            for path in paths:
                if not pathlib.Path(path).is_file():
                    raise UserError(f"--{flag}={path}: no such file")

    def data_set(self):
        """Columns and labels: the flags', else the known data set's, else "text" and "label"."""
        known = catalog.DATA_SETS.get(self.task, catalog.DataSet(self.task, ("text",), "label", ()))
        first = self.text_column or known.text_columns[0]
        second = (self.text_b_column,) if self.text_b_column else known.text_columns[1:]
        return catalog.DataSet(
            known.kind,
            (first, *second),
            self.label_column or known.label_column,
            self.labels or known.labels,
        )
