"""Reader of texts whose embeddings are compared: pairs, scored pairs, and texts of classes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    SUFFIXES,
    BadRow,
    Example,
    RowError,
    Source,
    data_file,
    named_rows,
    quoted,
    read_rows,
    read_texts,
)

PAIR_COLUMNS = ("anchor", "positive")
_NEGATIVES = re.compile(r"negatives?|negative_\d+")  # Numbered ones as in sentence-transformers.
_SCORES = ("score", "label")
SCORED = ("cosent", "cosine")  # Losses of pairs with a score.


def negative_columns(names: Iterable[Any]) -> tuple[str, ...]:
    """Return those of the names of columns that are of hard negatives."""
    return tuple(name for name in map(str, names) if _NEGATIVES.fullmatch(name))


def score_column(names: Collection[Any]) -> str | None:
    """Return that of the names of columns that is of scores, or labels, of rows without negatives.

    With hard negatives, a row is no scored pair.
    """
    is_pair = not negative_columns(names)
    return next((name for name in _SCORES if is_pair and name in names), None)


def read_pairs(source: Source, labelled: bool = True, **task: Any) -> Iterator[Example | BadRow]:
    """Yield the rows of a file.

    Args:
        source: .csv, .tsv, .jsonl or .parquet with the columns anchor, positive and optionally
            negative, negatives or negative_1, negative_2, ...; text_a, text_b and score; or text
            and label.
        labelled: Whether to read pairs and labels; otherwise texts, see `read_texts`.
        **task: Values of a task.json: "pair_columns", "text_columns" other than ("text",),
            "negatives_column" and "label_column" name columns; otherwise they are found by their
            names. Whether pairs in "pair_columns" have scores depends on "loss". With
            "has_teacher", texts may have no label.

    Yields:
        A `BadRow`, or an `Example` with the label as it is written, or `None`. The "text" of a
        labelled row is a list of texts: the anchor, its positive and its negatives.

    Raises:
        UserError: If the file cannot be read or has none of these columns, or anchor and positive
            next to a score or label that no value of a task.json names or that its loss has not.
    """
    if not labelled:
        return read_texts(source, labelled, **task)
    file = data_file(source, SUFFIXES)
    of_texts, of_negatives, label = _columns(task, file)
    # Of texts without labels, the first row of .jsonl may lack what others have.
    others = _SCORES if len(of_texts) == 1 and label is None else ()

    def example(values, location):
        texts = [values[column] for column in of_texts]
        for column, text in zip(of_texts, texts, strict=True):
            if not text.strip():
                raise RowError(f"column {column!r}: expected a text, received an empty string")
        for column in others:
            if column in values:
                raise RowError(f"column {column!r}: expected none, since the first row has none")
        for column in of_negatives:
            negatives = values.get(column, [])
            negatives = [negatives] if isinstance(negatives, str) else negatives
            texts += [text for text in negatives if text.strip()]
        return Example({"text": texts}, values[label] if label else None, location)

    return read_rows(
        file,
        [*of_texts, *([label] if label else [])],
        lists=of_negatives,
        optional=(*of_negatives, *others),
        make=example,
    )


def _columns(task, file):
    """Return the columns of texts, of hard negatives, which rows may lack, and of the label.

    Texts are an anchor and its positive, the two of a scored pair, or one of a class; the first
    have no label. Raises UserError if the file has no columns of labelled rows.
    """
    given = tuple(task.get("pair_columns") or task.get("text_columns", ("text",)))
    label, column = task.get("label_column"), task.get("negatives_column")
    there = _columns_of_first_row(file)
    score = label or next((name for name in _SCORES if name in there), None)
    if given == ("text",) and set(PAIR_COLUMNS) <= set(there) and label is None:
        given = PAIR_COLUMNS
    if len(given) == 2:
        is_of_run = "loss" in task and "pair_columns" in task  # The flags have not both.
        if is_of_run and task["loss"] in SCORED and (task["pair_columns"] or score):
            label = score or _SCORES[0]
        elif is_of_run or given == PAIR_COLUMNS:
            # Pairs that were mined with labels: those labelled 0 are no positives.
            if not (label or column) and set(given) <= set(there) and score_column(there):
                what = (
                    f"The loss {task['loss']} of the run has no scores; remove that column, and "
                    "the rows that are no positives"
                    if is_of_run
                    else "For scores, pass --text_column=anchor --text_b_column=positive "
                    f"--label_column={score}; otherwise remove that column"
                )
                raise UserError(
                    f"{file}: expected the columns {' and '.join(given)} without {score!r}. {what}"
                )
        elif column is None:
            label = score
        return given, () if label else _columns_of_negatives(file, column, there), label
    # A label column that is named has to be there.
    is_unlabelled = task.get("has_teacher") and label is None and not set(_SCORES) & set(there)
    if is_unlabelled and set(given) <= set(there):
        return given, (), None
    if given != ("text",):
        return given, (), label or "label"
    if "text_a" in there and "text_b" in there and score:
        return ("text_a", "text_b"), (), score
    if "text" in there and (label or "label" in there):
        return given, (), label or "label"
    raise UserError(
        f"{file}: expected the columns anchor and positive, or text_a, text_b and score, or text "
        f"and label; received {quoted(there)}. Name others with --text_column, --text_b_column and "
        "--label_column"
    )


def _columns_of_first_row(file):
    """Return the columns of the first row that can be read, () without rows.

    Raises UserError, which names the first row, if none can be read.
    """
    first_error = None
    for number, row in named_rows(file, ()):
        if not isinstance(row, RowError):
            return tuple(row)
        first_error = first_error or f"{file}:{number}: {row}"
    if first_error:
        raise UserError(first_error)
    return ()


def _columns_of_negatives(file, column, of_first_row):
    """Return the column that is given, or all that may hold negatives."""
    if column:
        return (column,)
    names = of_first_row
    if file.suffix == ".jsonl":  # Its first row may have none, or fewer than others.
        rows = (row for _, row in named_rows(file, ()) if not isinstance(row, RowError))
        names = dict.fromkeys(name for row in rows for name in row)
    return tuple(dict.fromkeys(("negatives", "negative", *negative_columns(names))))
