"""Labels of classification: from rows and options to label ids.

Shape suffixes: N examples, C labels, K labels with a threshold.
"""

import abc
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from bert_tf.errors import UserError
from tasks.base.task import Reader, described
from tasks.base.text_task import LabelledTextTask
from tasks.data.readers.glue import GLUE
from tasks.data.readers.memory import as_list
from tasks.data.readers.rows import FileRows, Source, as_label, raise_bad_rows
from tasks.types.classification import class_imbalance

BETWEEN_LABELS = "|"


class ClassReader(Reader["ClassLabels"]):
    """Reader of texts with a label, or with any number of labels."""

    def label_of(self, label: str | list[str]) -> int | tuple[int, ...]:
        """Return the id of a row's label, or the ids with `multi_label`."""
        names = self.names_in(label)
        known = self.task.labels
        for name in names:
            if name not in known:
                labels = ", ".join(self.task.labels)
                raise ValueError(f"label {name!r:.80}: expected one of {labels}")
        numbers = tuple(known.index(name) for name in names)
        return numbers if self.task.multi_label else numbers[0]

    @property
    def has_lists_of_labels(self) -> bool:
        """Whether a row has any number of labels."""
        return self.task.multi_label

    def encode_labels(
        self,
        values: Sequence[Any],
        texts: Mapping[str, Sequence[Any]],
        what: str = "y[{}]",
        is_batch: bool = False,
    ) -> list:
        """Convert the labels of rows; see `Reader.encode_labels`.

        Integers are ids, or names if the labels are numbers; with `multi_label`, rows of 0 and 1
        per label are multi-hot. All rows are read in the one way that is possible.
        """
        argument = what.partition("[")[0]
        rows, padding = [values], set()
        if self.task.multi_label:
            values, padding = list(map(_list_or_value, values)), {-1}
            rows = [row for row in values if isinstance(row, list)]
            if len(rows) == len(values) and self._are_multi_hot(rows, argument):
                return [tuple(number for number, one in enumerate(row) if one) for row in rows]
        integers = {entry for row in rows for entry in row if type(entry) is int} - padding
        if integers and self._are_names(integers, argument, is_batch):

            def named(value):
                if isinstance(value, list):
                    return list(map(named, value))
                return str(value) if value in integers else value

            values = list(map(named, values))
        return super().encode_labels(values, texts, what, is_batch)

    def _are_multi_hot(self, rows, argument):
        """Return whether rows have 0 or 1 per label; raises UserError if they may be ids too."""
        count, entries = len(self.task.labels), [entry for row in rows for entry in row]
        are_multi_hot = all(len(row) == count and all(one in (0, 1) for one in row) for row in rows)
        if any(isinstance(entry, bool | float) for entry in entries):
            if not are_multi_hot:
                raise UserError(
                    f"{argument}: expected names, ids, or {count} values per row that are 0 or 1, "
                    f"received rows such as {rows[0]!r:.80}"
                )
        # A row has no id twice, so that only the rows of two labels can be ids too.
        elif are_multi_hot and all(len(set(row)) == count for row in rows):
            raise UserError(
                f"{argument}: rows such as {rows[0]} may be ids or multi-hot; pass names, or "
                "multi-hot as booleans"
            )
        return are_multi_hot

    def _are_names(self, integers, argument, is_batch):
        """Return whether integers are names, not ids; raises UserError if they may be both."""
        labels = self.task.labels
        numbers = [(number, label) for number, label in enumerate(labels) if _is_integer(label)]
        are_names = all(str(value) in labels for value in integers)
        are_ids = all(0 <= value < len(labels) for value in integers)
        # Other batches may hold integers that only one of the two allows.
        are_both = is_batch or (are_names and are_ids)
        chosen = range(len(labels)) if is_batch else integers
        if are_both and any(number != int(label) for number, label in numbers if number in chosen):
            raise UserError(
                f"{argument}: integers may be ids or names of the labels {', '.join(labels):.80}; "
                "pass names as strings"
            )
        return are_names and not are_ids

    def encode_label(self, value: Any, texts: Mapping[str, Any]) -> int | tuple[int, ...]:
        """Return the id of a name, or of an id; with `multi_label` of each in a list.

        Lists may be padded with "" or -1.
        """
        if not self.task.multi_label:
            return self._id_of(value)
        values = as_list(value, "expected a list of labels") if value is not None else []
        # Batches of datasets pad lists of different lengths, as predictions are.
        values = [name for name in values if name not in ("", -1)]
        ids = [name for name in values if type(name) is int]
        if len(set(ids)) < len(ids):
            raise ValueError(f"labels {value!r:.80}: expected each id once")
        return tuple(map(self._id_of, values))

    def _id_of(self, value):
        labels = self.task.labels
        if type(value) is int:
            if not 0 <= value < len(labels):
                raise ValueError(
                    f"label {value}: expected an id from 0 to {len(labels) - 1}, or a name"
                )
            return value
        name = as_label(str(value))
        if name not in labels:
            raise ValueError(f"label {value!r:.80}: expected one of {', '.join(labels)}")
        return labels.index(name)

    def decode_label(self, label: Any) -> str | list[str]:
        """Return the name of an id, or the names of several."""
        if self.task.multi_label:
            return [self.task.labels[number] for number in label]
        return self.task.labels[label]

    def names_in(self, value: str | list[str]) -> list[str]:
        """Return the names in a label column; raises ValueError if one is empty."""
        if isinstance(value, list):
            names = value
        elif self.task.multi_label:
            names = value.split(BETWEEN_LABELS) if value.strip() else []
        else:
            names = [value]
        names = [as_label(name) for name in names]
        if not all(names):
            several = f", or several separated by {BETWEEN_LABELS}" if self.task.multi_label else ""
            empty = "contains an empty label" if self.task.multi_label else "is empty"
            raise ValueError(
                f"column {self.task.label_column!r} {empty}; expected a label{several}"
            )
        return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassLabels(LabelledTextTask, abc.ABC):
    """Fields of classification into `labels`, whose order defines the label ids.

    Attributes:
        class_weights: Loss weight per label; () weights all examples equally.
        balanced_sampling: Draw all classes equally often in training.
        focal_gamma: Exponent of the focal loss; 0 is cross-entropy.
        prior_bias: Start the head at the label frequencies.
        rare_label: Predicted if its probability >= its threshold, else the best other label is.
        threshold_objective: "f1", "precision=P", "recall=R", or None for no tuning.
        calibrate: Fit `temperature`, by which logits are divided, on dev.
        thresholds: Tuned on dev: for the second of two labels, for the rare label, or for each
            label with `multi_label`. None means 0.5, or argmax for a rare label.
    """

    labels: tuple[str, ...]
    multi_label: bool = False
    class_weights: tuple[float, ...] = ()
    balanced_sampling: bool = False
    focal_gamma: float = 0.0
    prior_bias: bool = False
    rare_label: str | None = described("label that the threshold applies to", None)
    threshold_objective: str | None = None
    calibrate: bool = False
    temperature: float | None = described("divisor of the logits", None)
    thresholds: tuple[float, ...] | None = described(
        "minimum probability of a label to be returned", None
    )

    reader_class = ClassReader

    @classmethod
    def from_data(
        cls,
        data: Source | FileRows,
        *,
        labels: Sequence[str] = (),
        class_weights: Sequence[str] = (),
        **options: Any,
    ) -> Self:
        """Create the task from options and a training file, by default with the file's labels.

        `class_weights` are strings of numbers, or ("balanced",). Raises UserError on unfit options.
        """
        class_imbalance.check_options(class_weights=class_weights, **options)
        if options.get("rare_label") is not None:
            options["rare_label"] = as_label(options["rare_label"])
        task = cls(labels=tuple(map(as_label, labels)), **options)
        if task.multi_label and task.file_format in GLUE:
            raise UserError(f"--multi_label: rows of {task.file_format} have exactly one label")
        reader, counts = ClassReader(task), collections.Counter[str]()
        for row in raise_bad_rows(reader.iter_rows(data, labelled=True)):
            try:
                counts.update(reader.names_in(row.label))
            except ValueError as error:
                raise UserError(f"{row.location}: {error}") from None
        if len(counts) < 2:
            only = repr(min(counts)) if counts else "none"
            only += " or none" if counts and task.multi_label else ""
            raise UserError(f"{data}: expected two or more labels. Received: {only}")
        published = GLUE[task.file_format].labels if task.file_format in GLUE else ()
        labels = task.labels or published or _in_order(counts)
        objective = task.threshold_objective or (None if task.rare_label is None else "f1")
        weights = class_imbalance.class_weights_of(
            class_weights, labels, [counts[label] for label in labels]
        )
        class_imbalance.check_thresholds(labels, task.multi_label, task.rare_label, objective)
        return dataclasses.replace(
            task, labels=labels, class_weights=weights, threshold_objective=objective
        )

    @classmethod
    def from_options(
        cls,
        *,
        max_seq_length: int,
        labels: Sequence[str] = (),
        class_weights: Sequence[float] | Mapping[str, float] = (),
        **options: Any,
    ) -> Self:
        """Create the task from the options of `TextClassifier.from_pretrained`."""
        names = tuple(as_label(str(label)) for label in as_list(labels, "labels"))
        if len(names) < 2 or len(set(names)) < len(names):
            raise UserError(
                f"labels={labels!r:.80}: expected at least two different names, in a list"
            )
        if isinstance(class_weights, Mapping):
            reader = cls(max_seq_length=max_seq_length, labels=names).reader
            ids = reader.encode_labels(list(class_weights), {}, "class_weights")
            factors = dict(zip(ids, class_weights.values(), strict=True))
            class_weights = [factors.get(label, 1.0) for label in range(len(names))]
        if not isinstance(class_weights, str):
            class_weights = as_list(class_weights, "class_weights")
        if class_weights in ("balanced", ["balanced"]):  # The counts of labels are not known.
            raise UserError(
                f"class_weights={class_weights!r}: expected a number per label; use "
                "balanced_sampling=True, which needs none"
            )
        class_imbalance.check_options(class_weights=tuple(map(str, class_weights)), **options)
        task = super().from_options(
            max_seq_length=max_seq_length,
            labels=names,
            class_weights=class_imbalance.class_weights_of(
                tuple(map(str, class_weights)), names, counts_C=()
            ),
            **options,
        )
        class_imbalance.check_thresholds(
            names, task.multi_label, task.rare_label, task.threshold_objective
        )
        return task

    @property
    def has_classes(self) -> bool:
        """Whether each example has one of `labels`."""
        return not self.multi_label

    @property
    def is_binary(self) -> bool:
        """Whether there is one sigmoid logit."""
        return len(self.labels) == 2 and not self.multi_label

    @property
    def positive(self) -> int | None:
        """Id of the one label with a threshold, or None."""
        if self.is_binary:
            return 1
        return None if self.rare_label is None else self.labels.index(self.rare_label)

    def description(self) -> str:
        """Return labels and class weights for the log."""
        weights = ", ".join(f"{weight:.3g}" for weight in self.class_weights)
        return f"; labels {', '.join(self.labels)}" + (weights and f"; class weights {weights}")


def _is_integer(label):
    return label.removeprefix("-").isdecimal()


def _list_or_value(value):
    """Return the labels of a row as a list, [] for None; other values unchanged."""
    try:
        return as_list([] if value is None else value, "y")
    except UserError:
        return value


def _in_order(labels):
    """Sort labels as numbers if all are integers, else as strings."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels))
