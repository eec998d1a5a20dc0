"""Readers of the published files of GLUE (Wang et al. 2019, arXiv:1804.07461), by task name.

Columns are found by their published names, since they differ between the train, dev and test files
of a task. Fields are separated by tabs; quotes are data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    BadRow,
    Example,
    KnownRowError,
    RowError,
    Source,
    as_label,
    check_text,
    data_file,
    good_or_bad,
    has_columns,
    not_empty,
    quoted,
    read_texts,
    text_names,
    tsv_rows,
)


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """Definition of one GLUE task.

    Attributes:
        columns: Names of the text columns.
        label_column: Name of the label column.
        labels: Labels in their published order; empty for regression.
        metrics: Published metrics.
        columns_without_header: All columns of train and dev files without a header.
        has_malformed: Whether the published files contain malformed lines.
        counts_from_end: Whether the number of columns before the texts may vary.
    """

    columns: tuple[str, ...]
    label_column: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    columns_without_header: tuple[str, ...] = ()
    has_malformed: bool = False
    counts_from_end: bool = False

    @property
    def kind(self) -> str:
        """The task type: "classification", or "regression" if there are no labels."""
        return "classification" if self.labels else "regression"

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the texts."""
        return text_names(len(self.columns))


_SENTENCES = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_NLI = ("contradiction", "entailment", "neutral")
_ENTAILMENT = ("entailment", "not_entailment")

GLUE = {
    "cola": GlueTask(
        ("sentence",),
        "label",
        _BINARY,
        ("matthews",),
        columns_without_header=("source", "label", "author's mark", "sentence"),
    ),
    "sst2": GlueTask(("sentence",), "label", _BINARY, ("accuracy",)),
    "mrpc": GlueTask(("#1 String", "#2 String"), "Quality", _BINARY, ("accuracy", "f1")),
    "qqp": GlueTask(
        ("question1", "question2"),
        "is_duplicate",
        _BINARY,
        ("accuracy", "f1"),
        has_malformed=True,
    ),
    "stsb": GlueTask(_SENTENCES, "score", (), ("pearson", "spearman"), counts_from_end=True),
    "mnli": GlueTask(_SENTENCES, "gold_label", _NLI, ("accuracy",)),
    "qnli": GlueTask(("question", "sentence"), "label", _ENTAILMENT, ("accuracy",)),
    "rte": GlueTask(_SENTENCES, "label", _ENTAILMENT, ("accuracy",)),
    "wnli": GlueTask(_SENTENCES, "label", _BINARY, ("accuracy",)),
}
_INDEX_COLUMNS = ("index", "id")
_HIGHEST_SCORE = 5.0


def read_glue(
    source: Source,
    labelled: bool = True,
    *,
    file_format: str,
    **others: Any,
) -> Iterator[Example | BadRow]:
    """Yield the rows of a published file.

    Unlabelled rows of a GLUE task may also be in a file with the columns "text", or "text_a" and
    "text_b" for a pair.

    Args:
        source: The published file, .tsv or .txt; or the other one.
        labelled: Whether to read labels.
        file_format: A key of GLUE.
        **others: Other values of a task.json, which are ignored.

    Yields:
        An `Example`, its label as it is written, or a `BadRow`; malformed lines of QQP are
        known ones. Rows of a test file, which is a file without labels, have ids.

    Raises:
        UserError: If a column is missing or the file cannot be read.
    """
    file, names = data_file(source), GLUE[file_format].keys
    if not labelled and has_columns(file, names):  # No published file.
        return read_texts(file, labelled, text_columns=names)
    file = data_file(file, (".tsv", ".txt"))
    return not_empty(_published_rows(file_format, file, labelled), file)


def _published_rows(name, file, labelled):
    task, header = GLUE[name], None
    for number, fields in tsv_rows(file):
        if not fields:
            continue
        if header is None:
            header = fields
            # CoLA's train and dev files have no header: their first line is a row.
            if task.columns[0] not in fields and task.columns_without_header:
                header = task.columns_without_header
            columns = _column_indices(name, file, labelled, header)
            if header is fields:
                continue
        yield good_or_bad(f"{file}:{number}", fields, _example, name, labelled, header, columns)


def _column_indices(name, file, labelled, header):
    """Return {name of the text, "label" or "index": index of the field}."""
    task = GLUE[name]
    keys = dict(zip(task.keys, task.columns, strict=True))
    if labelled:
        keys["label"] = task.label_column
    for column in keys.values():
        if column not in header:
            raise UserError(
                f"{file}:1: no column {column!r} of {name}; the columns are {quoted(header)}"
            )
    # Negative indices count from the end of a row, whose length may vary.
    from_end = len(header) if task.counts_from_end else 0
    columns = {key: header.index(column) - from_end for key, column in keys.items()}
    # Only test files need an index, for submissions.
    if task.label_column not in header:
        for column in _INDEX_COLUMNS:
            if column in header:
                columns["index"] = header.index(column)
    return columns


def _example(fields, name, labelled, header, columns, location):
    task = GLUE[name]
    if task.counts_from_end:
        is_malformed = len(fields) < len(task.columns) + (task.label_column in header)
    else:
        is_malformed = len(fields) != len(header)
    if is_malformed:
        raise (KnownRowError if task.has_malformed else RowError)(
            f"expected {len(header)} fields, received {len(fields)}. Columns: {quoted(header)}"
        )
    values = {key: fields[column] for key, column in columns.items()}
    for key, text in values.items():
        check_text(text, f"column {key!r}")
    label = _label(name, as_label(values["label"])) if labelled else None
    return Example({key: values[key] for key in task.keys}, label, location, values.get("index"))


def check_submission(path: str, file_format: str | None, run: str) -> None:
    """Check that a run, whose task has a file format, can write a GLUE submission.

    Raises:
        UserError: If the format is not a GLUE task.
    """
    if file_format not in GLUE:
        raise UserError(
            f"--output={path}: expected .jsonl, since .tsv is a GLUE submission and {run} is not "
            "trained on a GLUE dataset"
        )


def submission_lines(name: str, predictions: Iterable[tuple[str, str | float]]) -> Iterator[str]:
    """Yield the lines of a submission file without line ends, the header first.

    Args:
        name: GLUE task.
        predictions: (index of the test row, label name). For stsb a value, which is clipped to
            0..5.

    Raises:
        UserError: If a prediction is not one of the task.
    """
    yield "index\tprediction"
    for index, prediction in predictions:
        if GLUE[name].kind == "regression":
            score = float(prediction)
            if not math.isfinite(score):
                raise UserError(f"{name}: row {index}: expected a finite number, received {score}")
            prediction = f"{min(max(score, 0.0), _HIGHEST_SCORE):.3f}"
        elif prediction not in GLUE[name].labels:
            raise UserError(
                f"{name}: row {index}: expected one of {', '.join(GLUE[name].labels)}, received "
                f"{prediction!r}"
            )
        yield f"{index}\t{prediction}"


def _label(name, label):
    """Return a label of a file; raises RowError if the task does not have it."""
    labels = GLUE[name].labels
    try:
        if label in labels or (not labels and 0 <= float(label) <= _HIGHEST_SCORE):
            return label
    except ValueError:
        pass  # No number.
    expected = f"a label of {name}: {', '.join(labels)}"
    if not labels:
        expected = f"a number from 0 to {_HIGHEST_SCORE:g}"
    raise RowError(f"label {label!r:.80}: expected {expected}")
