"""The base classes of all task types.

A task type is a module and an entry in tasks/base/task_types.py. The module defines a `Task`, which
knows all that distinguishes it: how rows become examples, examples batches, and outputs predictions
and metrics; and a `TaskModel`, its Keras model. The fields of a task are saved in task.json.

Shape suffixes: N examples, W windows (token sequences made of the examples), B rows of a batch.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import keras
import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.storage import format_versions
from bert_tf.storage.strict_json import field
from bert_tf.text.tokenizer import Tokens
from bert_tf.text.vocabulary import Vocabulary
from tasks.base.plots import Plot
from tasks.base.task_types import TASK_TYPES, imported, read_rows_of, task_type
from tasks.data.examples import Arrays, Draw, EncodedExamples, Examples, Tensors
from tasks.data.labels import LabelSpace
from tasks.data.readers.glue import GLUE
from tasks.data.readers.memory import columns_of
from tasks.data.readers.rows import (
    BadRow,
    Example,
    FileRows,
    RowError,
    Source,
    raise_bad_rows,
    text_names,
)
from tasks.data.windows import Windows, one_window_each, pack_texts, pair_windows

Loss = Callable[..., tf.Tensor]
Tokenize = Callable[[tf.Tensor], Tokens]  # Of a `Tokenizer`.
LOG = logging.getLogger("bert_tf").info  # Of models in Python; commands have their own log.
TRUNCATIONS = ("head", "tail", "head_tail")


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """Description of a served output, and its comparison between two precisions.

    Attributes:
        description: What it is, for people.
        compared: In a lower precision, near ties may change the order of candidates: the part of a
            row that still has to be equal: "all", the "first" entry, or "none".
        in_near_ties: Whether it still has to be equal where the prediction is a near tie.
        is_log_odds: Whether it is an unbounded difference of logits. Where it is large, a
            difference hardly changes the probability, so a lower precision is compared by that.
        is_vector: Whether its tolerance is relative, for values of any size.
        is_derived: Whether it is a sum of large numbers that follows from outputs which are
            compared, so that its values are not.
    """

    description: str
    compared: Literal["all", "first", "none"] = "all"
    in_near_ties: bool = False
    is_log_odds: bool = False
    is_vector: bool = False
    is_derived: bool = False


@dataclasses.dataclass(frozen=True)
class SignatureSpec:
    """Description of a served signature.

    Attributes:
        description: What it returns, for people.
        inputs: Description by the name of the input.
        outputs: Specification by the name of the output, in reading order.
        has_margin: Whether its predictions have near ties, which `Pipeline.margin` measures.
        splits_texts: Whether it splits long texts into windows.
    """

    description: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, OutputSpec]
    has_margin: bool = False
    splits_texts: bool = False


def described(description: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that predictions depend on, with its meaning for people."""
    return dataclasses.field(default=default, metadata={"description": description})


def check_choice(name: str, value: Any, known: Collection[str]) -> None:
    """Raise UserError, which names a field, if its value is not one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{name}={value!r:.80}: expected one of {', '.join(known)}")


def check_positive(name: str, value: Any) -> None:
    """Raise UserError, which names a field, if its value is no integer > 0."""
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r:.80}: expected an integer > 0")


def cut_lists(row: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a prediction with the first entries of each list."""
    return {
        name: value[:count] if isinstance(value, list) else value for name, value in row.items()
    }


def top2_gap(values: tf.Tensor) -> tf.Tensor:
    """Return the difference of the two largest values along the last axis, inf if it has one."""
    if values.shape[-1] == 1:
        return tf.fill(tf.shape(values)[:-1], float("inf"))
    best, next_best = tf.unstack(tf.math.top_k(values, 2).values, axis=-1)
    return best - next_best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Base class of the tasks.

    Every subclass defines `kind`, `description`, `outputs` and the abstract members. One that is
    trained also defines `losses`, `best_metric`, `metrics` and `encode_label`. A sample is the unit
    of a batch: a window or, in multiple choice, an example with all its choices.
    """

    max_seq_length: int = described("maximum tokens per window")

    kind: ClassVar[str]  # Name of the task type.
    description: ClassVar[str]  # What the task predicts, for people.
    # Of all outputs that `predictions` may return, in reading order.
    outputs: ClassVar[Mapping[str, OutputSpec]]
    input_descriptions: ClassVar[Mapping[str, str]] = {
        "text": "text",
        "text_a": "first text of the pair",
        "text_b": "second text of the pair",
    }
    # {input name: 2} of inputs of shape (N, C); all others are (N,).
    INPUT_RANKS: ClassVar[Mapping[str, int]] = {}
    fillers: ClassVar[Mapping[str, float]] = {}  # Padding of outputs of numbers, if it is not -1.
    no_labels: ClassVar[str] = ""  # What to do instead, if rows of the task have no labels.
    label_dtype: ClassVar[type] = np.int32  # Of the labels that `targets` returns.
    accuracies: ClassVar[tuple[str, ...]] = ()  # Outputs whose accuracy `fit` reports.
    # Type and list levels of outputs that `with_word_outputs` adds.
    word_output_types: ClassVar[Mapping[str, tuple[str, int]]] = {}
    has_windows = False  # Whether an example may become several windows, with outputs per token.
    needs_offsets = False  # Whether predictions refer to characters of the text.
    # Whether the fields are tuned as soon as there is a dev file, without a flag for it.
    tunes_without_request = False
    # What is wrong with the rows that `select_training_examples` drops; "" if nothing is.
    fault_of_unused = ""

    @property
    @abc.abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs of a served request."""

    @property
    def has_head(self) -> bool:
        """Whether the model has weights beside those that all pretrained weights contain."""
        return True

    @property
    def has_lists_of_labels(self) -> bool:
        """Whether the label of a row is a list."""
        return False

    @property
    def has_classes(self) -> bool:
        """Whether each example has one of `labels`, as class_weight requires."""
        return False

    @property
    def label_space(self) -> LabelSpace:
        """The labels, of a task that has them."""
        raise NotImplementedError

    @property
    def num_ids(self) -> Mapping[str, int]:
        """Number of ids that the labels of token ids may be, by output; absent if they are none."""
        return {}

    @property
    def losses(self) -> Mapping[str, Loss]:
        """Functions from (labels, output) to one loss per element, by the name of the output."""
        raise NotImplementedError

    @property
    def soft_losses(self) -> Mapping[str, Loss]:
        """Functions from (teacher's output, output, temperature) to one loss per element.

        By the name of the output, for distillation. A task without them has no teacher.
        """
        return {}

    @property
    def tunable_fields(self) -> Mapping[str, tuple[int, ...]]:
        """Fields that are tuned after training, on the first dev file, with their shapes.

        They belong to one checkpoint (tasks/graph/run_checkpoint.py) and are `None` in task.json.
        """
        return {}

    @property
    def untuned_fields(self) -> tuple[str, ...]:
        """The fields of `tunable_fields` without a value."""
        return tuple(name for name in self.tunable_fields if getattr(self, name) is None)

    @property
    def best_metric(self) -> str:
        """Name of the metric that selects the best checkpoint."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return a suffix for the log line with the number of rows, such as "; 3 labels"."""
        return ""

    # Creation, and the values of task.json.

    @classmethod
    def from_data(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from a training file; by default from the options alone.

        Args:
            data: Training file, or its rows.
            max_seq_length: Maximum tokens per window, with special tokens.
            **options: Other fields of the task, as given by flags.

        Raises:
            UserError: If the file or an option does not fit the task.
        """
        return cls(max_seq_length=max_seq_length, **options)

    @classmethod
    def for_reading(cls, data: Source | FileRows, *, max_seq_length: int, **options: Any) -> Self:
        """Create a task that reads a labelled file of any use, such as a dev file.

        Arguments as of `from_data`, which it is by default.
        """
        return cls.from_data(data, max_seq_length=max_seq_length, **options)

    @classmethod
    def options_from(
        cls,
        source: Mapping[str, Any],
        given: Mapping[str, Any],
        has_trained_pooler: bool = True,
        log: Callable[[str], None] = LOG,
    ) -> dict[str, Any]:
        """Return the options that pretrained weights bring, by default none.

        Args:
            source: Task of the head that the model may keep, or embedder, as in task.json; {} if
                the weights have none.
            given: Options of `from_data` or `from_options` that replace them.
            has_trained_pooler: Whether the weights have a trained pooler.
            log: Receives a line for each option that is chosen by the weights.
        """
        return {}

    @classmethod
    def from_options(cls, *, max_seq_length: int, **options: Any) -> Self:
        """Create the task from the options of `TaskModel.from_pretrained`."""
        return cls(max_seq_length=max_seq_length, **options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create the task from the values of task.json, without "kind".

        Raises:
            UserError: If a field is missing, unknown or of a wrong type.
        """
        # Files of earlier versions lack the fields that were added since. The default of such a
        # field has to reproduce what was done without it.
        fields = dataclasses.fields(cls)
        values = format_versions.without_removed(values)
        required = {
            field.name
            for field in fields
            if field.default is field.default_factory is dataclasses.MISSING
        }
        if missing := sorted(required - values.keys()):
            raise UserError(f"task.json: no field {', '.join(missing)}; expected it of {cls.kind}")
        known = sorted(field.name for field in fields)
        if unknown := sorted(values.keys() - set(known)):
            raise UserError(
                f"task.json: unknown field {', '.join(unknown):.200}; expected {', '.join(known)}; "
                "update bert_tf if a newer version wrote the file"
            )
        return cls(**cls.checked(values, "task.json"))

    def to_dict(self) -> dict[str, Any]:
        """Return the values of task.json, with "kind"."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def for_weights(self, names: Collection[str]) -> Self:
        """Return the task that pretrained weights of these names can do; by default unchanged."""
        return self

    def with_tuned(self, values: Mapping[str, Any]) -> Self:
        """Return the task with these values of tunable fields; the other tunable fields are `None`.

        Raises:
            UserError: If `values` has a field that is not tunable, or a value of a wrong type.
        """
        unknown = sorted(set(values) - set(self.tunable_fields))
        if unknown:
            raise UserError(
                f"checkpoint.json: expected tuned values of "
                f"{', '.join(self.tunable_fields) or 'no field'}, received {', '.join(unknown)}"
            )
        # Values of another checkpoint must not remain, hence None for all that are not given.
        fields = {**dict.fromkeys(self.tunable_fields), **self.checked(values, "checkpoint.json")}
        return dataclasses.replace(self, **fields)

    @classmethod
    def checked(cls, values: Mapping[str, Any], location: str) -> dict[str, Any]:
        """Return JSON values as field values, lists as tuples; raise UserError on a wrong type."""
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name])
                raise UserError(f"{location}: {name}: expected {expected}, received {value!r:.80}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    # From rows of files to examples.

    def iter_rows(self, data: Source | FileRows, labelled: bool) -> Iterable[Example | BadRow]:
        """Return the rows of a file, with labels as they are written.

        Args:
            data: A file in a format of the task, which is not read at once; or its rows.
            labelled: Whether the rows have labels.
        """
        if labelled and self.no_labels:
            raise UserError(f"{data}: {self.no_labels}")
        if isinstance(data, FileRows):
            return data
        return read_rows_of(self.to_dict(), data, labelled)

    def label_of(self, label: Any) -> Any:
        """Convert a label of `iter_rows` to the representation of the task.

        Raises:
            ValueError: If it does not fit the task; the message says what is expected.
        """
        return label

    def iter_examples(self, data: Source | FileRows, labelled: bool) -> Iterator[Example | BadRow]:
        """Yield what `iter_rows` returns, with labels in the representation of the task."""
        for row in self.iter_rows(data, labelled):
            if not labelled or isinstance(row, BadRow):
                yield row
                continue
            try:
                label = self.label_of(row.label)
            except ValueError as error:
                yield BadRow(row.location, str(error))
            else:
                yield Example(row.texts, label, row.location, row.id)

    def load_examples(self, data: Source | FileRows, labelled: bool = True) -> Examples:
        """Read a complete file into memory; arguments as of `iter_rows`.

        Returns:
            The good rows; known bad rows of a published dataset are in `skipped_rows`.

        Raises:
            UserError: At the first bad row that is not known, or if no row is left.
        """
        everything = list(self.iter_examples(data, labelled))
        # Known bad rows are kept apart to be reported; any other bad row raises here.
        rows = list(raise_bad_rows(everything))
        skipped_rows = tuple(row for row in everything if isinstance(row, BadRow))
        if not rows:
            raise UserError(
                f"{data}: expected at least one good row. First bad row: {skipped_rows[0]}"
            )
        texts = {name: [row.texts[name] for row in rows] for name in self.input_names}
        return Examples(texts, [row.label for row in rows] if labelled else [], skipped_rows)

    # From Python objects to examples.

    def columns(self, x: Any) -> dict[str, list]:
        """Return rows given as Python objects as texts by input name; raises UserError."""
        lists = [name for name in self.input_names if self.INPUT_RANKS.get(name) == 2]
        return columns_of(x, self.input_names, lists)

    def labelled_columns(self, x: Any) -> dict[str, list]:
        """Return labelled rows as `columns` does; they may have other columns."""
        return self.columns(x)

    def row_of(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of one row, given as strings in their order, by name.

        An input that is a list, such as the choices of a prompt, takes all strings from its own on.

        Raises:
            UserError: If there are too few or too many strings.
        """
        names = self.input_names
        *single, last = names
        has_list = self.INPUT_RANKS.get(last) == 2
        if len(texts) < len(names) or (len(texts) > len(names) and not has_list):
            expected = f"{', '.join(names)}{', ...' if has_list else ''}"
            raise UserError(f"expected one text each for {expected}, received {len(texts)}")
        values = [*texts[: len(single)], list(texts[len(single) :]) if has_list else texts[-1]]
        return dict(zip(names, values, strict=True))

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> Any:
        """Convert a label given as a Python object to the representation of the task.

        Args:
            value: The label.
            texts: The texts of its row by input name.

        Raises:
            ValueError: If it does not fit the task; the message says what is expected.
        """
        raise ValueError(f"{self.kind} has no labels")

    def encode_labels(
        self,
        values: Sequence[Any],
        texts: Mapping[str, Sequence[Any]],
        what: str = "y[{}]",
    ) -> list:
        """Convert the labels of rows; see `encode_label`.

        Args:
            values: N labels.
            texts: N texts by input name.
            what: Name of a label for messages; "{}" is the number of its row.

        Raises:
            UserError: If a label does not fit the task.
        """
        labels = []
        for row, value in enumerate(values):
            try:
                text = {name: column[row] for name, column in texts.items()}
                labels.append(self.encode_label(value, text))
            except (ValueError, TypeError, RowError) as error:
                raise UserError(f"{what.format(row)}: {error}") from None
        return labels

    def batch_labels(self, y: Any) -> tf.Tensor:
        """Convert the labels of a batch of a dataset as `encode_label` does, in the graph.

        A label that does not fit fails an assertion (`tasks.data.labels.check_batch`).

        Args:
            y: Labels, `(B, ...)`.

        Raises:
            UserError: If the task has no labels in the graph, or their shape does not fit it.
        """
        raise UserError(
            f"x: a dataset of strings: expected lists, since labels of {self.kind} need the tokens"
        )

    def decode_label(self, label: Any) -> Any:
        """Convert a label to the Python object that `encode_label` accepts."""
        return label

    def default_labels(self, x: Any, count: int) -> list:
        """Return labels for `count` rows x without any; raises UserError if the task has none."""
        raise UserError("y: expected one label per row, received none")

    # From examples to batches.

    @abc.abstractmethod
    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize and pack texts, in the graph.

        Args:
            texts: Strings `(N,)` by input name; `(N, C)` for those in `INPUT_RANKS`.
            tokenize: `Tokenizer.tokenize`, or `tokenize_with_offsets` if `needs_offsets`.
            vocabulary: Vocabulary of the ids.
        """

    def select_training_examples(self, examples: Examples) -> Examples:
        """Return the examples that training uses; by default all of them."""
        return examples

    def targets(self, examples: Examples, windows: Windows) -> tuple[Arrays, Arrays]:
        """Return labels and weights, each with one entry per sample by the name of the output.

        By default, the labels of the examples for the only output, `(N,)`, and weights of 1.
        """
        (name,) = self.losses
        labels: np.ndarray = np.array(examples.labels, self.label_dtype)
        return {name: labels}, {name: np.ones(len(labels), np.float32)}

    def draw(self, vocabulary: Vocabulary, length: int) -> Draw | None:
        """Return the function that draws inputs, labels and weights anew in each epoch.

        By default `None`: labels are `targets`.

        Args:
            vocabulary: Vocabulary of the ids.
            length: Tokens of the longest sequence.
        """
        return None

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return one warning per kind of label that cannot be encoded or scored."""
        return []

    def sample_weights(self, examples: Examples, windows: Windows) -> np.ndarray | None:
        """Return the loss weight per sample, float32 `(samples,)`, or `None` if all are 1."""
        return None

    def soft_weights(self, windows: Windows, num_samples: int) -> Arrays:
        """Return the loss weights of samples without labels in distillation, by output name."""
        return {name: np.ones(num_samples, np.float32) for name in self.soft_losses}

    def can_learn_unlabelled(self, texts: Mapping[str, Any]) -> bool:
        """Whether a training row of these texts may have no label, if there is a teacher.

        Raises:
            UserError: If it may, but an option of the task has no effect on such rows.
        """
        return False

    def as_training_rows(self, examples: Examples) -> Examples:
        """Return rows without labels, as for predictions, in the form of labelled rows."""
        return examples

    def vector_size(self, config: BertConfig) -> int | None:
        """Return the size of the vectors that a model returns; `None` if it returns others."""
        return None

    def epoch_order(self, data: EncodedExamples, rng: np.random.Generator) -> np.ndarray:
        """Return the indices of the samples of an epoch, `(samples,)`, in the order of batches.

        By default each sample is drawn once.
        """
        return rng.permutation(len(data))

    # From batches to predictions.

    @abc.abstractmethod
    def build_model(self, config: BertConfig, dtype: str = "float32") -> keras.Model:
        """Return the Keras model, built."""

    def training_data(self, encoded: EncodedExamples, evaluator: Any) -> EncodedExamples:
        """Return training or dev examples as the model reads them; by default their token ids.

        Args:
            encoded: The examples.
            evaluator: `Evaluator` of the model, whose weights may be restored later.
        """
        return encoded

    def predictions(self, texts: Tensors, windows: Windows, outputs: Tensors) -> Tensors:
        """Return what is served, `(B, ...)` by name, in the graph; by default the outputs."""
        return dict(outputs)

    def margin(self, predictions: Tensors, windows: Windows, outputs: Tensors) -> tf.Tensor:
        """Return the probability by which each prediction leads the second best one, `(B,)`.

        By default infinity, since nothing is decided.
        """
        return tf.fill(tf.shape(next(iter(predictions.values())))[:1], float("inf"))

    def with_word_outputs(self, predictions: Arrays, texts: Mapping[str, list]) -> Arrays:
        """Return the predictions of rows with what follows from their form; by default unchanged.

        Args:
            predictions: Served outputs, `(N, ...)` by name.
            texts: N rows by input name.
        """
        return predictions

    def strip_padding(self, row: dict[str, Any]) -> dict[str, Any]:
        """Remove the padding that a batch adds from one prediction, `{name: JSON value}`."""
        return row

    def prediction_error(self, row: Mapping[str, Any]) -> str | None:
        """Return why a prediction, `{name: JSON value}`, says nothing about its row, or `None`."""
        return None

    # Evaluation, of tasks with labels.

    def metric_inputs(self, outputs: Arrays) -> Arrays:
        """Reduce the outputs of a batch to the arrays that `metrics` needs.

        They are kept for all batches of an evaluation, so they should be small.
        """
        return outputs

    def metrics(self, data: EncodedExamples, outputs: Arrays) -> dict[str, float]:
        """Return the metrics of all examples of a dataset, by name."""
        raise NotImplementedError

    def metrics_of_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that follow from the mean losses of the outputs; by default none."""
        return {}

    def report(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Any]:
        """Return tables that an evaluation reports in addition to metrics, as lists by name."""
        return {}

    def plots(self, data: EncodedExamples, outputs: Arrays) -> dict[str, Plot]:
        """Return the plots of an evaluation, by file name without suffix."""
        return {}

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a one-line warning about how to read these metrics, or `None`."""
        return None

    # Tuning.

    def check_dev(self, examples: Examples, name: str = "--dev: the first file") -> list[str]:
        """Check the labels of the rows that fields are tuned on, before anything is trained.

        Args:
            examples: Rows of the first dev file, or of validation.
            name: The rows in messages, as a subject in the singular.

        Returns:
            One warning per tunable field that these labels cannot tune well.

        Raises:
            UserError: If they cannot tune a field at all.
        """
        return []

    def tune(self, data: EncodedExamples, outputs: Arrays) -> Self:
        """Return the task with its tunable fields fitted to dev data."""
        return self

    def tuned_summary(self) -> str:
        """Return the values of the tunable fields for the log."""
        return ", ".join(f"{field} {getattr(self, field)}" for field in self.tunable_fields)

    def tuning_warnings(self, data: EncodedExamples, outputs: Arrays) -> list[str]:
        """Return one warning per tunable field that this dev data cannot tune."""
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Base class of tasks on a text or pair of texts that fits one window.

    Attributes:
        file_format: "rows", with named columns, or the name of a GLUE dataset, whose files have
            fixed columns.
        text_columns: One or two columns of text.
        label_column: Column of the label.
        truncation: "head", "tail" or "head_tail" (`bert_tf.text.encoder_inputs.pack`).
    """

    file_format: str = "rows"
    text_columns: tuple[str, ...] = ("text",)
    label_column: str | None = None
    truncation: str = described("part of a longer text that is kept", "head")

    def __post_init__(self) -> None:
        if self.file_format in GLUE:
            object.__setattr__(self, "text_columns", GLUE[self.file_format].keys)

    @classmethod
    def from_options(cls, *, max_seq_length: int, pairs: bool = False, **options: Any) -> Self:
        """Create the task from the options of `TaskModel.from_pretrained`.

        `pairs` stands for the columns text_a and text_b.
        """
        check_choice("truncation", options.get("truncation", "head"), TRUNCATIONS)
        columns = ("text_a", "text_b") if pairs else ("text",)
        return cls(max_seq_length=max_seq_length, text_columns=columns, **options)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the texts in a served request."""
        return text_names(len(self.text_columns))

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize and truncate texts to one window each."""
        in_order = [texts[name] for name in self.input_names]
        return one_window_each(
            pack_texts(in_order, tokenize, vocabulary, self.max_seq_length, self.truncation)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledTextTask(TextTask):
    """Base class of tasks with a label or value per text or pair of texts."""

    label_column: str = "label"

    def label_warnings(self, data: EncodedExamples) -> list[str]:
        """Return a warning if all rows have the same label: most metrics then say nothing."""
        labels = data.examples.labels
        if len(labels) < 2 or any(label != labels[0] for label in labels):
            return []
        return [
            f"all {len(labels)} rows have the same label; macro F1, ROC-AUC and correlations of "
            "such rows do not measure the model"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceTask(Task):
    """Base class of tasks on a text and several others, such as a prompt and its choices."""

    def encode(self, texts: Tensors, tokenize: Tokenize, vocabulary: Vocabulary) -> Windows:
        """Tokenize and pack each of the others with the first text, one window per pair."""
        first_B, others_BC = (texts[name] for name in self.input_names)
        return pair_windows(first_B, others_BC, tokenize, vocabulary, self.max_seq_length)


def _fits(value, hint):
    """Return whether a JSON value has a field's type; a tuple's value is a list."""
    kinds = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, kinds[0]) for entry in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(
            _fits(key, kinds[0]) and _fits(entry, kinds[1]) for key, entry in value.items()
        )
    # Not isinstance, since bool is a subclass of int. A float may be written as an int in JSON.
    return type(value) is hint or (hint is float and type(value) is int)


def task_class(kind: str) -> type[Task]:
    """Import and return the class of a task type that is trained on labelled rows.

    Raises:
        UserError: If the task type is unknown.
    """
    return imported(task_type(kind, TASK_TYPES).class_path)


def task_from_dict(values: Mapping[str, Any]) -> Task:
    """Create the task of any type from the values of a run's task.json.

    Raises:
        UserError: If a value is missing, unknown or of a wrong type.
    """
    values = dict(values)
    kind = field(values, "kind", str, "task.json")
    del values["kind"]
    return imported(task_type(kind).class_path).from_dict(values)
