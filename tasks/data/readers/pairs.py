"""Reader of texts whose embeddings are compared: pairs, scored pairs, and texts of classes."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    SUFFIXES,
    BadRow,
    DataFile,
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


class PairColumns(NamedTuple):
    """The columns of a file of labelled rows.

    Attributes:
        texts: Of the anchor and the positive, of the two texts of a scored pair, or of a text.
        negatives: Of the hard negatives, each a text or a list, which rows may lack.
        label: Of the score of a pair, or of the class of a text; `None` for an anchor and its
            positive.
    """

    texts: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    label: str | None = None


def negative_columns(names: Iterable[Any]) -> tuple[str, ...]:
    """Return those of the names of columns that are of hard negatives."""
    return tuple(name for name in map(str, names) if _NEGATIVES.fullmatch(name))


def task_rows(
    task: Mapping[str, Any], source: Source, labelled: bool
) -> Iterator[Example | BadRow]:
    """Yield the rows of a file for the values of a task.json; see `TaskType`.

    The text of a labelled row is a list of texts: the anchor, its positive and its negatives.
    """
    if labelled:
        return read_pairs(task, source)
    return read_texts(task, source, None)


def read_pairs(task: Mapping[str, Any], source: Source) -> Iterator[Example | BadRow]:
    """Yield the labelled rows of a file.

    Args:
        task: Values of a task.json: "pair_columns", "text_columns" other than ("text",),
            "negatives_column" and "label_column" name columns; otherwise they are found by their
            names. With "has_teacher", texts may have no label.
        source: .csv, .tsv, .jsonl or .parquet with the columns anchor, positive and optionally
            negative, negatives or negative_1, negative_2, ...; text_a, text_b and score; or text
            and label.

    Yields:
        An `Example` with "text", a list of strings, and the label as it is written, or `None`; or a
        `BadRow`.

    Raises:
        UserError: If the file cannot be read or has none of these columns.
    """
    file = data_file(source, SUFFIXES)
    columns = columns_of_pairs(task, file)
    names = [*columns.texts, *([columns.label] if columns.label else [])]
    # Of texts without labels, the first row of .jsonl may lack what others have.
    others = _SCORES if len(columns.texts) == 1 and columns.label is None else ()
    unescape_html = task.get("unescape_html", False)

    def example(values, location):
        texts = [values[column] for column in columns.texts]
        for column, text in zip(columns.texts, texts, strict=True):
            if not text.strip():
                raise RowError(f"column {column!r}: expected a text, received an empty string")
        for column in others:
            if column in values:
                raise RowError(f"column {column!r}: expected none, since the first row has none")
        for column in columns.negatives:
            negatives = values.get(column, [])
            negatives = [negatives] if isinstance(negatives, str) else negatives
            # Of columns with lists they are still as in the file.
            negatives = map(html.unescape, negatives) if unescape_html else negatives
            texts += [text for text in negatives if text.strip()]
        return Example({"text": texts}, values[columns.label] if columns.label else None, location)

    return read_rows(
        file,
        names,
        unescape_html,
        lists=columns.negatives,
        optional=(*columns.negatives, *others),
        make=example,
    )


def columns_of_pairs(task: Mapping[str, Any], file: DataFile) -> PairColumns:
    """Return the columns of a file; arguments as of `read_pairs`.

    Raises:
        UserError: If the file has no columns of labelled rows.
    """
    given = tuple(task.get("pair_columns") or task.get("text_columns", ("text",)))
    label, column = task.get("label_column"), task.get("negatives_column")
    _, first = next(named_rows(file, ()), (0, {}))
    there = () if isinstance(first, RowError) else tuple(first)
    # The first row of .jsonl may have none.
    found = ("negatives", "negative", *negative_columns(there))
    negatives = (column,) if column else tuple(dict.fromkeys(found))
    if len(given) == 2:
        return PairColumns(given, () if label else negatives, label)
    if given == ("text",) and set(PAIR_COLUMNS) <= set(there) and label is None:
        return PairColumns(PAIR_COLUMNS, negatives)
    # A label column that is named has to be there.
    is_unlabelled = task.get("has_teacher") and label is None and not set(_SCORES) & set(there)
    if is_unlabelled and set(given) <= set(there):
        return PairColumns(given)
    if given != ("text",):
        return PairColumns(given, label=label or "label")
    score = label or next((name for name in _SCORES if name in there), None)
    if "text_a" in there and "text_b" in there and score:
        return PairColumns(("text_a", "text_b"), label=score)
    if "text" in there and (label or "label" in there):
        return PairColumns(given, label=label or "label")
    raise UserError(
        f"{file}: expected the columns anchor and positive, or text_a, text_b and score, or text "
        f"and label; received {quoted(there)}. Name others with --text_column, --text_b_column and "
        "--label_column"
    )
