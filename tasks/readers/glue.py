"""The published files of GLUE (Wang et al. 2019, arXiv:1804.07461), by task name.

Columns are found by their published names, so that train, dev and test files of a task, whose
columns differ, are read alike. Fields are separated by tabs; quotes are data.
"""

import dataclasses
import math

from bert_tf.errors import UserError
from tasks.readers.records import (
    KnownRecordError,
    RecordError,
    as_label,
    check_text,
    checked_path,
    good_or_bad,
    tsv_records,
)
from tasks.readers.tables import Row


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """What GLUE says of one task; a task without labels is regression."""

    columns: tuple[str, ...]  # The texts'.
    label_column: str | None
    labels: tuple[str, ...]  # In their published order.
    metrics: tuple[str, ...]
    submissions: tuple[str, ...]  # A file a test set.
    columns_without_header: tuple[str, ...] = ()  # Of train and dev files that have none.
    has_malformed: bool = False  # Its labelled files hold broken lines.
    counts_from_end: bool = False  # The number of columns in front of the texts may vary.

    @property
    def kind(self):
        return "classification" if self.labels else "regression"

    @property
    def keys(self):
        """What a Row calls the texts."""
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
    # The diagnostic set: no labels, answered by a model of MNLI.
    "ax": GlueTask(_SENTENCES, None, _NLI, ("matthews",), ("AX.tsv",)),
}
_INDEX_COLUMNS = ("index", "id")
_HIGHEST_SCORE = 5.0


def read_glue(name, path, labelled):
    """The rows of a published file -> GlueRows."""
    return GlueRows(name, path, labelled)


class GlueRows:
    """Yields a Row, or a BadRow, a line; malformed lines of QQP are known, if labelled.

    Row.values: "text" or "text_a" and "text_b"; with `labelled`, "label" as it is written; from
    a test file, which is one that has no labels, "index".
    Raises UserError, when iterated, if a column is missing or the file cannot be read.
    """

    def __init__(self, name, path, labelled):
        if name not in GLUE:
            raise UserError(f"GLUE task {name!r}: wanted one of {', '.join(GLUE)}")
        self.name, self.task, self.labelled = name, GLUE[name], labelled
        self.path = checked_path(path, (".tsv", ".txt"))

    def __iter__(self):
        header = None
        is_empty = True
        for number, fields in tsv_records(self.path):
            if not fields:
                continue
            if header is None:
                header = fields
                if self.task.columns[0] not in fields and self.task.columns_without_header:
                    header = self.task.columns_without_header
                columns = self._column_indices(header)
                if header is fields:
                    continue
            is_empty = False
            if self._is_malformed(fields, header):
                is_known = self.task.has_malformed and self.labelled
                fields = (KnownRecordError if is_known else RecordError)(
                    f"{len(fields)} fields, wanted {len(header)}: {', '.join(header):.200}"
                )
            yield good_or_bad(f"{self.path}:{number}", fields, self._row, columns)
        if is_empty:
            raise UserError(f"{self.path}: no rows in it")

    def _column_indices(self, header):
        """{key of Row.values: place in the fields}."""
        keys = dict(zip(self.task.keys, self.task.columns, strict=True))
        if self.labelled:
            if self.task.label_column is None:
                raise UserError(f"{self.path}: {self.name} has no published labels")
            keys["label"] = self.task.label_column
        for column in keys.values():
            if column not in header:
                raise UserError(
                    f"{self.path}:1: no column {column!r} of {self.name}, there are: "
                    f"{', '.join(header):.200}"
                )
        from_end = len(header) if self.task.counts_from_end else 0
        columns = {key: header.index(column) - from_end for key, column in keys.items()}
        if self.task.label_column not in header:
            for column in _INDEX_COLUMNS:
                if column in header:
                    columns["index"] = header.index(column)
        return columns

    def _is_malformed(self, fields, header):
        if self.task.counts_from_end:
            return len(fields) < len(self.task.columns) + (self.task.label_column in header)
        return len(fields) != len(header)

    def _row(self, fields, columns, location):
        values = {key: fields[column] for key, column in columns.items()}
        for key, text in values.items():
            check_text(text, f"column {key!r}")
        if self.labelled:
            values["label"] = as_label(values["label"])
            _check_label(self.name, values["label"])
        return Row(values, location)


def check_submission(path, file_format, run):
    """Raises UserError unless rows of a form are answered as a submission."""
    if file_format not in GLUE:
        raise UserError(
            f"--output={path}: .tsv is a submission to GLUE, but {run} is of "
            "none of its data sets; wanted .jsonl"
        )


def submission_lines(name, predictions):
    """Yields the lines of a submission's file, its header first, without line ends.

    `predictions` are pairs of a test row's index and its label's name, or its value for stsb, which
    is cut to 0..5. Raises UserError at what the task cannot answer.
    """
    yield "index\tprediction"
    for index, prediction in predictions:
        if GLUE[name].kind == "regression":
            if not math.isfinite(prediction):
                raise UserError(f"{name}: row {index} is answered {prediction}, wanted a number")
            prediction = f"{min(max(prediction, 0.0), _HIGHEST_SCORE):.3f}"
        elif prediction not in GLUE[name].labels:
            raise UserError(
                f"{name}: row {index} is answered {prediction!r}, wanted one of "
                f"{', '.join(GLUE[name].labels)}"
            )
        yield f"{index}\t{prediction}"


def _check_label(name, label):
    labels = GLUE[name].labels
    if labels:
        if label not in labels:
            raise RecordError(f"label {label!r:.80} is none of {name}'s: {', '.join(labels)}")
        return
    try:
        is_score = 0 <= float(label) <= _HIGHEST_SCORE
    except ValueError:
        is_score = False
    if not is_score:
        raise RecordError(f"label {label!r:.80}, wanted a number from 0 to {_HIGHEST_SCORE:g}")
