"""Readers of multiple choice: SWAG's columns, ARC's columns and JSON lines.

SWAG is Zellers et al. 2018, ARC is Clark et al. 2018.
"""

import dataclasses
import functools
import string
from collections.abc import Iterator
from typing import Any

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    MAX_CHOICES,
    SUFFIXES,
    BadRow,
    Example,
    KnownRowError,
    RowError,
    Source,
    as_label,
    check_texts,
    csv_rows,
    data_file,
    good_or_bad,
    json_rows,
    not_empty,
    quoted,
    read_rows,
)

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_LETTERS = tuple(string.ascii_uppercase)


def read_choices(
    source: Source, labelled: bool = True, *, file_format: str = "rows", **others: Any
) -> Iterator[Example | BadRow]:
    """Yield the rows of a multiple choice file.

    Args:
        source: The file.
        labelled: Whether to read the answers.
        file_format: One of

            - "swag": .csv, .tsv or .jsonl with the columns sent1, sent2, ending0 to ending3 and
              label, from 0. The prompt is sent1, a choice is sent2 followed by an ending.
            - "arc": .csv without a header: question, two or more choices, answer as a letter or as
              a number from 1. Rows with fewer choices are padded with empty fields. Unlabelled,
              answers are ignored, or missing in all rows. Published rows without choices, or with
              an answer that is not among the choices, are known bad rows.
            - "rows": .jsonl with "prompt" or "question", "choices" (two or more) and either
              "label", a number from 0 or a letter, or "answerKey", a letter or a number from 1.
              ARC's own "question": {"stem", "choices": [{"label", "text"}, ...]} is read too.
        **others: Other values of a task.json, which are ignored.

    Yields:
        An `Example` with "prompt" and "choices", whose label is the index of the right choice, from
        0; or a `BadRow` for a row that cannot be used.

    Raises:
        UserError: If the format is unknown or the file cannot be read.
    """
    if file_format not in _READERS:
        raise UserError(
            f"multiple choice file format {file_format!r}: expected one of {', '.join(_READERS)}"
        )
    file = data_file(source)
    # Rows to predict may be JSON lines whatever the format of the training files.
    if not labelled and file.suffix == ".jsonl" and _has_choices(file):
        file_format = "rows"
    read, suffixes = _READERS[file_format]
    yield from not_empty(read(data_file(file, suffixes), labelled), file)


def _has_choices(file):
    """Return whether the first object of a .jsonl file has "choices", unlike one of SWAG."""
    rows = (row for _, row in json_rows(file) if not isinstance(row, RowError))
    return not {"sent1", "sent2"} <= set(next(rows, ()))


def _read_swag(file, labelled):
    columns = ("sent1", "sent2", *_ENDINGS, *(("label",) if labelled else ()))
    return read_rows(file, columns, make=functools.partial(_swag_choice, labelled))


def _swag_choice(labelled, values, location):
    for ending in _ENDINGS:
        if not values[ending].strip():
            raise RowError(f"column {ending!r}: expected a choice, received an empty string")
    # Rows of HellaSwag may have an empty sent2, which would leave a leading space.
    choices = [f"{values['sent2']} {values[ending]}".lstrip(" ") for ending in _ENDINGS]
    return _choice(values["sent1"], choices, values["label"] if labelled else None, 0, location)


def _read_arc(file, labelled):
    is_answer = _may_be_answer if labelled else _answers_of(file)
    for number, fields in csv_rows(file):
        if not fields:
            continue
        yield good_or_bad(f"{file}:{number}", fields, _arc_choice, labelled, is_answer)


def _answers_of(file):
    """Return the check of the last field if most rows end with an answer, otherwise `None`."""
    rows = (row for _, row in csv_rows(file) if row and not isinstance(row, RowError))
    first, has_mark, count, num_answers = None, True, 0, 0
    for row in rows:
        if row[-1].strip():
            first = first or row
            has_mark &= _may_be_mark(row) and row[-1] == first[-1]
            count += 1
            num_answers += _may_be_answer(row)
    if has_mark and count > 1:
        return lambda fields: True
    return _may_be_answer if 2 * num_answers >= count else None


def _may_be_mark(fields):
    """Return whether the last field follows two choices and may be a mark such as "?" or "-1"."""
    return len(fields) > 3 and not any(map(str.isalpha, fields[-1]))


def _may_be_answer(fields):
    """Return whether the last of four fields or more is a letter or the number of a choice."""
    answer, count = as_label(fields[-1]), sum(bool(field.strip()) for field in fields[1:-1])
    is_answer = answer.upper() in _LETTERS or answer in map(str, range(1, count + 1))
    return len(fields) > 3 and is_answer


def _arc_choice(fields, labelled, is_answer, location):
    if is_answer and len(fields) < 4:
        raise RowError(
            f"expected a question, at least 2 choices and the answer, received {len(fields)} fields"
        )
    prompt, *choices, answer = fields if is_answer else [*fields, ""]
    # Rows with fewer choices are padded with empty fields to the width of the file.
    while choices and not choices[-1].strip():
        choices.pop()
    if not choices:
        raise KnownRowError("expected at least two choices, received none")
    row = _choice(prompt, choices, None, 1, location)
    if labelled:
        try:
            row = dataclasses.replace(row, label=_choice_index(answer, len(choices), 1))
        except RowError as error:
            # A letter beyond the last choice occurs in published files; all else is a user error.
            is_known = as_label(answer) in _LETTERS
            raise (KnownRowError if is_known else RowError)(str(error)) from None
    elif answer.strip() and not is_answer(fields):
        raise RowError(
            f"the last field {answer!r:.80}: expected the answer, as in other rows, or no answers "
            "in the file"
        )
    return row


def _read_rows(file, labelled):
    for number, row in json_rows(file):
        yield good_or_bad(f"{file}:{number}", row, _json_choice, labelled)


def _json_choice(values, labelled, location):
    prompt, choices = values.get("prompt", values.get("question")), values.get("choices")
    # ARC nests the choices: "question": {"stem": ..., "choices": [...]}.
    if isinstance(prompt, dict):
        prompt, choices = prompt.get("stem"), prompt.get("choices")
    if prompt is None:
        raise RowError(f"expected 'prompt' or 'question', received {quoted(values)}")
    if not isinstance(choices, list):
        raise RowError(f"'choices': expected a list of texts, received {choices!r:.80}")
    choices = [_text(choice, index) for index, choice in enumerate(choices)]
    if not labelled:
        return _choice(prompt, choices, None, 0, location)
    keys = [key for key in ("label", "answerKey") if key in values]
    if len(keys) != 1:
        raise RowError(f"expected either 'label' or 'answerKey', received {quoted(values)}")
    answer = values[keys[0]]
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise RowError(f"{keys[0]!r}: expected a letter or an integer, received {answer!r:.80}")
    return _choice(prompt, choices, str(answer), int(keys[0] == "answerKey"), location)


def _text(choice, index):
    """Return the text of a choice.

    A label has to agree with the choice's index, since answers refer to choices by index.
    """
    if not isinstance(choice, dict):
        return choice
    label = choice.get("label")
    names = (string.ascii_uppercase[index : index + 1], str(index + 1))
    if not isinstance(label, str) or as_label(label) not in names:
        raise RowError(
            f"choice {index + 1}: expected the labels A, B, ... in order, received {label!r:.80}"
        )
    return choice.get("text")


def _choice(prompt, choices, answer, first_number, location):
    """Return an `Example`; numbers count the choices from `first_number`."""
    if len(choices) < 2:
        raise RowError(f"expected at least two choices, received {len(choices)}")
    if len(choices) > MAX_CHOICES:
        raise RowError(f"expected at most {MAX_CHOICES:,} choices, received {len(choices):,}")
    named = {f"choice {number}": text for number, text in enumerate(choices, start=1)}
    check_texts({"the prompt": prompt, **named})
    label = None if answer is None else _choice_index(answer, len(choices), first_number)
    return Example({"prompt": prompt, "choices": choices}, label, location)


def _choice_index(answer, count, first_number):
    """Return the index from 0 of an answer, a letter or a number, among `count` choices."""
    answer = as_label(answer)
    # The length limit keeps int() from parsing thousands of digits.
    if answer.isascii() and answer.isdecimal() and len(answer) < 10:
        index = int(answer) - first_number
    elif len(answer) == 1:
        index = string.ascii_uppercase.find(answer.upper())
    else:
        index = -1
    if not 0 <= index < count:
        raise RowError(
            f"the answer {answer!r:.80}: expected one of the {count} choices, as a letter from A "
            f"or a number from {first_number}"
        )
    return index


_READERS = {
    "swag": (_read_swag, SUFFIXES),
    "arc": (_read_arc, (".csv",)),
    "rows": (_read_rows, (".jsonl",)),
}
