"""Questions on contexts: SQuAD's JSON (Rajpurkar et al. 2016; version 2.0, 2018), and rows."""

import dataclasses
import json

from bert_tf import strict_json
from bert_tf.errors import UserError
from bert_tf.strict_json import field
from tasks.readers.records import BadRow, RecordError, check_text, checked_path, good_or_bad
from tasks.readers.tables import SUFFIXES, read_rows


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, the context it is asked of, and the answers as (text, start in characters).

    A start of -1 stands for an answer of a row that its context does not hold.
    """

    id: str
    question: str
    context: str
    answers: list[tuple[str, int]]
    is_impossible: bool
    title: str
    location: str

    @property
    def is_exact(self):
        """Whether the context holds each answer where it is said to stand."""
        return all(
            start >= 0 and self.context[start : start + len(text)] == text
            for text, start in self.answers
        )


def read_questions(path, labelled=True):
    """Yields a Question, or a BadRow, for each question of a file; unlabelled without its answers.

    .json: SQuAD 1.1 or 2.0. Rows of .csv, .tsv and .jsonl: columns "question", "context", and if
    there "id" (else the number of the row's line) and "title"; labelled also "answer", empty for a
    question that has none, and if there "answer_start" (else the first place that holds it).
    Raises UserError if the file cannot be read; in JSON, naming the place inside.
    """
    path = checked_path(path, (".json", *SUFFIXES))
    read = _squad_questions if path.suffix == ".json" else _row_questions
    ids = set()
    for item in read(path, labelled):
        if isinstance(item, Question):
            if item.id in ids:
                raise UserError(
                    f"{item.location}: its id {item.id!r:.80} stands twice; answers go by id"
                )
            ids.add(item.id)
        yield item


def _squad_questions(path, labelled):
    is_empty = True
    for article, in_article in _entries(_load(path), "data", str(path), f"{path}: data"):
        title = field(article, "title", str, in_article) if "title" in article else ""
        for paragraph, in_paragraph in _entries(article, "paragraphs", in_article):
            context = field(paragraph, "context", str, in_paragraph)
            for entry, location in _entries(paragraph, "qas", in_paragraph):
                is_empty = False
                question = _question(entry, context, title, labelled, path, location)
                yield good_or_bad(question.location, question, _checked, labelled)
    if is_empty:
        raise UserError(f"{path}: no questions in it")


def _load(path):
    try:
        return strict_json.parse(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def _question(entry, context, title, labelled, path, location):
    name = field(entry, "id", str, location)
    answers, is_impossible = [], False
    if labelled:
        answers = [
            (field(answer, "text", str, inner), field(answer, "answer_start", int, inner))
            for answer, inner in _entries(entry, "answers", location)
        ]
        if "is_impossible" in entry:
            is_impossible = field(entry, "is_impossible", bool, location)
    return Question(
        name,
        field(entry, "question", str, location),
        context,
        answers,
        is_impossible,
        title,
        f"{path}: question {name:.200}",
    )


def _entries(node, key, location, inner=None):
    """Yields (object, its place) for those in the list node[key]."""
    inner = inner or f"{location}.{key}"
    for number, entry in enumerate(field(node, key, list, location)):
        if not isinstance(entry, dict):
            raise UserError(f"{inner}[{number}]: holds {entry!r:.40}, wanted an object")
        yield entry, f"{inner}[{number}]"


def _row_questions(path, labelled):
    columns = ("question", "context", *(("answer",) if labelled else ()))
    optional = ("id", "title", *(("answer_start",) if labelled else ()))
    for row in read_rows(path, columns, optional=optional):
        is_bad = isinstance(row, BadRow)
        yield row if is_bad else good_or_bad(row.location, row.values, _row_question, labelled)


def _row_question(values, labelled, location):
    context, answer, start = values["context"], values.get("answer"), values.get("answer_start")
    answers = []
    if answer:
        try:
            answers = [(answer, int(start) if start else context.find(answer))]
        except ValueError:
            raise RecordError(
                f"column 'answer_start' holds {start!r:.80}, wanted a whole number"
            ) from None
    question = Question(
        values.get("id") or location.rpartition(":")[2],
        values["question"],
        context,
        answers,
        labelled and not answers,
        values.get("title", ""),
        location,
    )
    return _checked(question, labelled, location)


def _checked(question, labelled, location):
    for name in ("question", "context", "id", "title"):
        check_text(getattr(question, name), f'"{name}"')
    for text, _ in question.answers:
        if not text:
            raise RecordError("an answer is empty, wanted text")
        check_text(text, "an answer")
    if labelled and not question.answers and not question.is_impossible:
        raise RecordError('no answer, though "is_impossible" is not true')
    if question.answers and question.is_impossible:
        raise RecordError('answers, though "is_impossible" is true')
    return question
