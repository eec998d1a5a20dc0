"""Multiple choice: SWAG's columns (Zellers et al. 2018), ARC's (Clark et al. 2018), JSON lines."""

import dataclasses
import string

from bert_tf.errors import UserError
from tasks.readers.records import (
    BadRow,
    KnownRecordError,
    RecordError,
    as_label,
    check_text,
    checked_path,
    csv_records,
    good_or_bad,
    json_records,
)
from tasks.readers.tables import SUFFIXES, read_rows

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A prompt, its choices, and which of them is right, from 0; None if unlabelled."""

    prompt: str
    choices: list[str]
    label: int | None
    location: str


def read_choices(path, file_format, labelled=True):
    """Yields a Choice, or a BadRow, a row. The caller says which form the file has:

    "swag"  .csv, .tsv or .jsonl with columns sent1, sent2, ending0 to ending3 and label, from 0;
            the prompt is sent1, a choice is sent2 and an ending
    "arc"   .csv without a header: the question, two or more choices, the answer as a letter or as a
            number from 1; a row with fewer choices than others has empty fields behind them;
            unlabelled, the last field is there and is not looked at. It is known that some rows
            have no choices at all, and that some are answered by one that there is not
    "rows"  .jsonl: "prompt" or "question", "choices": two or more, and either "label", a number
            from 0 or a letter, or "answerKey", a letter or a number from 1; also ARC's own, with
            "question": {"stem", "choices": [{"label", "text"}, ...]}
    """
    if file_format not in _READERS:
        raise UserError(
            f"form {file_format!r} of multiple choice: wanted one of {', '.join(_READERS)}"
        )
    read, suffixes = _READERS[file_format]
    path = checked_path(path, suffixes)
    is_empty = True
    for item in read(path, labelled):
        is_empty = False
        yield item
    if is_empty:
        raise UserError(f"{path}: no rows in it")


def _read_swag(path, labelled):
    columns = ("sent1", "sent2", *_ENDINGS, *(("label",) if labelled else ()))
    for row in read_rows(path, columns):
        is_bad = isinstance(row, BadRow)
        yield row if is_bad else good_or_bad(row.location, row.values, _swag_choice, labelled)


def _swag_choice(values, labelled, location):
    for ending in _ENDINGS:
        if not values[ending].strip():
            raise RecordError(f"column {ending!r} is empty, wanted a choice")
    # HellaSwag's rows may have an empty sent2.
    choices = [f"{values['sent2']} {values[ending]}".lstrip(" ") for ending in _ENDINGS]
    return _choice(values["sent1"], choices, values["label"] if labelled else None, 0, location)


def _read_arc(path, labelled):
    for number, fields in csv_records(path):
        if not fields:
            continue
        yield good_or_bad(f"{path}:{number}", fields, _arc_choice, labelled)


def _arc_choice(fields, labelled, location):
    if len(fields) < 4:
        raise RecordError(
            f"{len(fields)} fields, wanted a question, two or more choices and the answer"
        )
    prompt, *choices, answer = fields
    while choices and not choices[-1].strip():
        choices.pop()
    if labelled and not choices:
        raise KnownRecordError("no choices, wanted two or more")
    row = _choice(prompt, choices, None, 1, location)
    if labelled:
        try:
            row = dataclasses.replace(row, label=_choice_index(answer, len(choices), 1))
        except RecordError as error:
            is_known = as_label(answer) in tuple(string.ascii_uppercase)
            raise (KnownRecordError if is_known else RecordError)(str(error)) from None
    return row


def _read_rows(path, labelled):
    for number, record in json_records(path):
        yield good_or_bad(f"{path}:{number}", record, _json_choice, labelled)


def _json_choice(values, labelled, location):
    prompt, choices = values.get("prompt", values.get("question")), values.get("choices")
    if isinstance(prompt, dict):
        prompt, choices = prompt.get("stem"), prompt.get("choices")
    if prompt is None:
        raise RecordError(f"no 'prompt' and no 'question', there are: {', '.join(values):.200}")
    if not isinstance(choices, list):
        raise RecordError(f"'choices' holds {choices!r:.80}, wanted a list of texts")
    choices = [_text(choice, index) for index, choice in enumerate(choices)]
    if not labelled:
        return _choice(prompt, choices, None, 0, location)
    keys = [key for key in ("label", "answerKey") if key in values]
    if len(keys) != 1:
        raise RecordError(
            f"wanted either 'label' or 'answerKey', there are: {', '.join(values):.200}"
        )
    answer = values[keys[0]]
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise RecordError(f"{keys[0]!r} holds {answer!r:.80}, wanted a letter or a whole number")
    return _choice(prompt, choices, str(answer), int(keys[0] == "answerKey"), location)


def _text(choice, index):
    """The text of a choice; one with a label has to stand in its place, for the answer's sake."""
    if not isinstance(choice, dict):
        return choice
    label = choice.get("label")
    names = (string.ascii_uppercase[index : index + 1], str(index + 1))
    if not isinstance(label, str) or as_label(label) not in names:
        raise RecordError(
            f"choice {index + 1} has the label {label!r:.80}, wanted A, B, ... in order"
        )
    return choice.get("text")


def _choice(prompt, choices, answer, first_number, location):
    """A Choice of what was read; numbers count the choices from `first_number`."""
    if len(choices) < 2:
        raise RecordError(f"{len(choices)} choices, wanted two or more")
    named = {"the prompt": prompt}
    named |= {f"choice {number}": text for number, text in enumerate(choices, start=1)}
    for what, text in named.items():
        if not isinstance(text, str):
            raise RecordError(f"{what} holds {text!r:.80}, wanted text")
        if not text.strip():
            raise RecordError(f"{what} is empty, wanted text")
        check_text(text, what)
    label = None if answer is None else _choice_index(answer, len(choices), first_number)
    return Choice(prompt, choices, label, location)


def _choice_index(answer, count, first_number):
    """The place of an answer, a letter or a number, among `count` choices, from 0."""
    answer = as_label(answer)
    if answer.isascii() and answer.isdecimal() and len(answer) < 10:
        index = int(answer) - first_number
    elif len(answer) == 1:
        index = string.ascii_uppercase.find(answer.upper())
    else:
        index = -1
    if not 0 <= index < count:
        raise RecordError(
            f"the answer is {answer!r:.80}, wanted one of the {count} choices: a letter from A, or "
            f"a number from {first_number}"
        )
    return index


_READERS = {
    "swag": (_read_swag, SUFFIXES),
    "arc": (_read_arc, (".csv",)),
    "rows": (_read_rows, (".jsonl",)),
}
