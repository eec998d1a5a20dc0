"""Reader of questions on contexts: SQuAD's JSON and tables.

SQuAD 1.1 is Rajpurkar et al. 2016, version 2.0 Rajpurkar et al. 2018.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json
from bert_tf.storage.strict_json import field
from tasks.data.readers.rows import (
    SUFFIXES,
    BadRow,
    Example,
    RowError,
    Source,
    check_text,
    data_file,
    good_or_bad,
    named_rows,
    no_column,
    not_empty,
    read_rows,
)


def read_questions(
    source: Source, labelled: bool = True, **others: Any
) -> Iterator[Example | BadRow]:
    """Yield the questions of a file.

    Args:
        source: .json in the format of SQuAD 1.1 or 2.0, or rows in .csv, .tsv, .jsonl or .parquet.
            Rows have the columns "question", "context" and, if labelled, "answer", which is empty
            if there is none. Optional are "id" (default: the line number) and, if labelled,
            "answer_start" (default: the first occurrence in the context). Rows of Hugging Face
            datasets have "answers": {"text": [...], "answer_start": [...]} instead; they may also
            be the list "data" of a .json file.
        labelled: Whether to read the answers.
        **others: Other values of a task.json, which are ignored.

    Yields:
        An `Example` with "question" and "context", whose label is a tuple of answers (text, start
        in characters of the context), empty if the question has none. The start is -1 if a row
        gives none and the context does not contain the text. Or a `BadRow` for a question that
        cannot be used.

    Raises:
        UserError: If the file cannot be read (in JSON the message names the path inside), or two
            questions have one id.
    """
    file = data_file(source, (".json", *SUFFIXES))
    read = _squad_questions if file.suffix == ".json" else _row_questions
    ids = set()
    for item in not_empty(read(file, labelled), file, "question"):
        if isinstance(item, Example):
            if item.id in ids:
                raise UserError(
                    f"{item.location}: expected a unique id, received {item.id!r:.80} again; "
                    "predictions are matched by id"
                )
            ids.add(item.id)
        yield item


def _squad_questions(file, labelled):
    for article, in_article in _entries(_load(file), "data", str(file), f"{file}: data"):
        if "paragraphs" not in article and "context" in article:
            yield good_or_bad(in_article, article, _listed_question, labelled)
            continue
        for paragraph, in_paragraph in _entries(article, "paragraphs", in_article):
            context = field(paragraph, "context", str, in_paragraph)
            for entry, location in _entries(paragraph, "qas", in_paragraph):
                values = _question(entry, context, labelled, location)
                location = f"{file}: question {values[0]:.200}"
                yield good_or_bad(location, values, _example, labelled)


def _load(file):
    try:
        return strict_json.parse(files.read_text(file.path, file.open()))
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        is_lines = error.msg == "Extra data"
        remedy = "; if each line is an object, name the file .jsonl" if is_lines else ""
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg}{remedy}") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None


def _question(entry, context, labelled, location):
    """Return id, question, context, answers and whether it is impossible, for `_example`."""
    # Annotation tools number questions.
    is_number = type(entry.get("id")) is int
    name = str(entry["id"]) if is_number else field(entry, "id", str, location)
    answers, is_impossible = [], False
    if labelled and not ("answers" not in entry and entry.get("is_impossible") is True):
        answers = [
            (field(answer, "text", str, inner), field(answer, "answer_start", int, inner))
            for answer, inner in _entries(entry, "answers", location)
        ]
    # Version 1.1 does not have this key.
    if labelled and "is_impossible" in entry:
        is_impossible = field(entry, "is_impossible", bool, location)
    return name, field(entry, "question", str, location), context, answers, is_impossible


def _entries(node, key, location, inner=None):
    """Yield (object, its location) for the entries of the list node[key]."""
    inner = inner or f"{location}.{key}"
    for number, entry in enumerate(field(node, key, list, location)):
        if not isinstance(entry, dict):
            raise UserError(f"{inner}[{number}]: expected an object, received {entry!r:.40}")
        yield entry, f"{inner}[{number}]"


def _row_questions(file, labelled):
    columns = ("question", "context", *(("answer",) if labelled else ()))
    optional = ("id", *(("answer_start",) if labelled else ()))
    if not _has_listed_answers(file):
        make = functools.partial(_row_question, labelled)
        yield from read_rows(file, columns, optional=optional, nullable=("answer",), make=make)
        return
    for number, values in named_rows(file, columns):
        yield good_or_bad(f"{file}:{number}", values, _listed_question, labelled)


def _has_listed_answers(file):
    """Return whether rows have "answers", as in Hugging Face datasets; .csv cannot have them."""
    if file.suffix not in (".jsonl", ".parquet"):
        return False
    rows = (row for _, row in named_rows(file, ()) if not isinstance(row, RowError))
    return "answers" in next(rows, ())


def _listed_question(values, labelled, location):
    """Return the question of a row whose answers are {"text": [...], "answer_start": [...]}."""
    for name in ("question", "context"):
        if name not in values:
            raise RowError(no_column(name, values))
    row = {name: values.get(name) for name in ("question", "context", "id")}
    row["id"] = location.rpartition(":")[2].strip() if row["id"] is None else str(row["id"])
    for name, text in row.items():
        if not isinstance(text, str):
            raise RowError(f"column {name!r}: expected text, received {text!r:.80}")
    if labelled and "answers" not in values:
        raise RowError(no_column("answers", values))
    answers = listed_answers(values["answers"]) if labelled else []
    values = row["id"], row["question"], row["context"], answers, labelled and not answers
    return _example(values, labelled, location)


def listed_answers(answers: Any) -> list[tuple[str, int]]:
    """Return the (text, start) of answers `{"text": [...], "answer_start": [...]}` of datasets.

    Raises:
        RowError: If they have another form.
    """
    columns: Mapping[str, Any] = answers if isinstance(answers, Mapping) else {}
    texts: Any
    starts: Any
    texts, starts = (columns.get(name) for name in ("text", "answer_start"))
    try:
        if not isinstance(texts, str) and all(isinstance(text, str) for text in texts):
            return [(text, _integer(start)) for text, start in zip(texts, starts, strict=True)]
    except (TypeError, ValueError, OverflowError):
        pass  # No lists, of different lengths, or no numbers.
    raise RowError(
        'column \'answers\': expected {"text": [...], "answer_start": [...]}, received '
        f"{answers!r:.80}"
    )


def _integer(value):
    """Return an integer, also of 4.0, as pandas writes it in a column with missing numbers."""
    if not float(value).is_integer():
        raise ValueError(value)
    return int(float(value))


def _row_question(labelled, values, location):
    context, answer, start = values["context"], values.get("answer"), values.get("answer_start")
    answers = []
    if answer:
        try:
            answers = [(answer, _integer(start) if start else context.find(answer))]
        except ValueError:
            raise RowError(
                f"column 'answer_start': expected an integer, received {start!r:.80}"
            ) from None
    name = values.get("id") or location.rpartition(":")[2]
    values = name, values["question"], context, answers, labelled and not answers
    return _example(values, labelled, location)


def _example(values, labelled, location):
    name, question, context, answers, is_impossible = values
    for what, text in (("question", question), ("context", context), ("id", name)):
        check_text(text, f'"{what}"')
    for text, _ in answers:
        if not text:
            raise RowError("an answer: expected text, received an empty string")
        check_text(text, "an answer")
    if labelled and not answers and not is_impossible:
        raise RowError('expected an answer, or "is_impossible": true')
    if answers and is_impossible:
        raise RowError('expected no answers, since "is_impossible" is true')
    label = tuple(answers) if labelled else None
    return Example({"question": question, "context": context}, label, location, name)
