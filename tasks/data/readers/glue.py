"""Readers of the published files of GLUE (Wang et al. 2019, arXiv:1804.07461), by task name.

Columns are found by their published names, since they differ between the train, dev and test files
of a task. Fields are separated by tabs; quotes are data.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    BadRow,
    KnownRowError,
    RowError,
    as_label,
    check_text,
    checked_path,
    good_or_bad,
    quoted,
    suffix_of,
    tsv_rows,
)
from tasks.data.readers.tables import Row, header_of, read_rows


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """Definition of one GLUE task.

    Attributes:
        columns: Names of the text columns.
        label_column: Name of the label column; `None` if no labels are published.
        labels: Labels in their published order; empty for regression.
        metrics: Published metrics.
        submissions: Submission file per test set.
        columns_without_header: All columns of train and dev files without a header.
        has_malformed: Whether the labelled files contain malformed lines.
        counts_from_end: Whether the number of columns before the texts may vary.
    """

    columns: tuple[str, ...]
    label_column: str | None
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submissions: tuple[str, ...]
    columns_without_header: tuple[str, ...] = ()
    has_malformed: bool = False
    counts_from_end: bool = False

    @property
    def kind(self) -> str:
        """The task type: "classification", or "regression" if there are no labels."""
        return "classification" if self.labels else "regression"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the texts in `Row.values`."""
        return ("text",) if len(self.columns) == 1 else ("text_a", "text_b")


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
        ("CoLA.tsv",),
        columns_without_header=("source", "label", "author's mark", "sentence"),
    ),
    "sst2": GlueTask(("sentence",), "label", _BINARY, ("accuracy",), ("SST-2.tsv",)),
    "mrpc": GlueTask(
        ("#1 String", "#2 String"), "Quality", _BINARY, ("accuracy", "f1"), ("MRPC.tsv",)
    ),
    "qqp": GlueTask(
        ("question1", "question2"),
        "is_duplicate",
        _BINARY,
        ("accuracy", "f1"),
        ("QQP.tsv",),
        has_malformed=True,
    ),
    "stsb": GlueTask(
        _SENTENCES, "score", (), ("pearson", "spearman"), ("STS-B.tsv",), counts_from_end=True
    ),
    "mnli": GlueTask(_SENTENCES, "gold_label", _NLI, ("accuracy",), ("MNLI-m.tsv", "MNLI-mm.tsv")),
    "qnli": GlueTask(("question", "sentence"), "label", _ENTAILMENT, ("accuracy",), ("QNLI.tsv",)),
    "rte": GlueTask(_SENTENCES, "label", _ENTAILMENT, ("accuracy",), ("RTE.tsv",)),
    "wnli": GlueTask(_SENTENCES, "label", _BINARY, ("accuracy",), ("WNLI.tsv",)),
    # The diagnostic set has no labels; a model of MNLI predicts it.
    "ax": GlueTask(_SENTENCES, None, _NLI, ("matthews",), ("AX.tsv",)),
}
_INDEX_COLUMNS = ("index", "id")
_HIGHEST_SCORE = 5.0


def task_rows(task: Mapping[str, Any], path: str, labelled: bool) -> Iterable[Row | BadRow]:
    """Yield the rows of a file for the values of a task.json; see `TaskType`."""
    if task.get("file_format") in GLUE:
        return read_glue(task["file_format"], path, labelled)
    label = task.get("label_column") or "label"
    columns = (*task.get("text_columns", ("text",)), *([label] if labelled else []))
    return read_rows(path, columns, lists=(label,) if task.get("multi_label") else ())


def read_glue(name: str, path: str | os.PathLike, labelled: bool) -> Iterable[Row | BadRow]:
    """Return the rows of a published file; unlabelled also those of a file with named columns.

    The columns are "text", or "text_a" and "text_b" for a pair.
    """
    if not labelled and _has_named_columns(name, path):
        return read_rows(path, GLUE[name].keys)
    return GlueRows(name, path, labelled)


def _has_named_columns(name, path):
    """Return whether a file is no published one, which are .tsv or .txt with other columns."""
    path = checked_path(path)
    return suffix_of(path) in (".csv", ".jsonl", ".parquet") or (
        suffix_of(path) == ".tsv" and set(GLUE[name].keys) <= set(header_of(path))
    )


class GlueRows:
    """Iterable of the rows of a published file.

    Yields a `Row` per line, or a `BadRow`; malformed lines of labelled QQP files are known ones.
    `Row.values` has "text", or "text_a" and "text_b"; with labels "label", as it is written; and
    "index" in a test file, which is a file without labels.

    Args:
        name: GLUE task, a key of GLUE.
        path: The file, .tsv or .txt.
        labelled: Whether to read labels.

    Raises:
        UserError: If the task is unknown; when iterated, if a column is missing or the file cannot
            be read.
    """

    def __init__(self, name: str, path: str | os.PathLike, labelled: bool) -> None:
        if name not in GLUE:
            raise UserError(f"GLUE task {name!r}: expected one of {', '.join(GLUE)}")
        self.name, self.task, self.labelled = name, GLUE[name], labelled
        self.path = checked_path(path, (".tsv", ".txt"))

    def __iter__(self) -> Iterator[Row | BadRow]:
        header: Sequence[str] | None = None
        is_empty = True
        for number, fields in tsv_rows(self.path):
            if not fields:
                continue
            if header is None:
                header = fields
                # CoLA's train and dev files have no header: their first line is a row.
                if self.task.columns[0] not in fields and self.task.columns_without_header:
                    header = self.task.columns_without_header
                columns = self._column_indices(header)
                if header is fields:
                    continue
            is_empty = False
            yield good_or_bad(f"{self.path}:{number}", fields, self._row, header, columns)
        if is_empty:
            raise UserError(f"{self.path}: expected at least one row, received none")

    def _column_indices(self, header):
        """Return {key of Row.values: index of the field}."""
        keys = dict(zip(self.task.keys, self.task.columns, strict=True))
        if self.labelled:
            if self.task.label_column is None:
                raise UserError(f"{self.path}: {self.name} has no published labels to read")
            keys["label"] = self.task.label_column
        for column in keys.values():
            if column not in header:
                raise UserError(
                    f"{self.path}:1: no column {column!r} of {self.name}; the columns are "
                    f"{quoted(header)}"
                )
        # Negative indices count from the end of a row, whose length may vary.
        from_end = len(header) if self.task.counts_from_end else 0
        columns = {key: header.index(column) - from_end for key, column in keys.items()}
        # Only test files need an index, for submissions.
        if self.task.label_column not in header:
            for column in _INDEX_COLUMNS:
                if column in header:
                    columns["index"] = header.index(column)
        return columns

    def _is_malformed(self, fields, header):
        if self.task.counts_from_end:
            return len(fields) < len(self.task.columns) + (self.task.label_column in header)
        return len(fields) != len(header)

    def _row(self, fields, header, columns, location):
        if self._is_malformed(fields, header):
            is_known = self.task.has_malformed and self.labelled
            raise (KnownRowError if is_known else RowError)(
                f"expected {len(header)} fields, received {len(fields)}. Columns: {quoted(header)}"
            )
        values = {key: fields[column] for key, column in columns.items()}
        for key, text in values.items():
            check_text(text, f"column {key!r}")
        if self.labelled:
            values["label"] = as_label(values["label"])
            _check_label(self.name, values["label"])
        return Row(values, location)


def check_submission(path: str, file_format: str | None, run: str) -> None:
    """Check that a run can write a GLUE submission.

    Args:
        path: The submission file, for the message.
        file_format: File format of the run's task.
        run: The run, for the message.

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


def _check_label(name, label):
    labels = GLUE[name].labels
    if labels:
        if label not in labels:
            raise RowError(f"label {label!r:.80}: expected a label of {name}: {', '.join(labels)}")
        return
    try:
        is_score = 0 <= float(label) <= _HIGHEST_SCORE
    except ValueError:
        is_score = False
    if not is_score:
        raise RowError(f"label {label!r:.80}: expected a number from 0 to {_HIGHEST_SCORE:g}")
