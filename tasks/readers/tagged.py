"""Text with tagged words or spans: CoNLL's columns (Tjong Kim Sang & De Meulder 2003), JSON lines.

A column file has a word a line, its tag in the last column, and a blank or -DOCSTART- line between
sentences. Five schemes of tags are read, all into BIO (IOB2: B- begins each entity, I- goes on):

    IO      I- only: touching entities of one type are one
    IOB1    B- only where an entity begins right behind another of its type
    BIO     B- at every beginning
    BIOES   also E- at the end, and S- for an entity of one word
    BILOU   the same with L- and U-

One rule reads them all: B-, S- and U- begin an entity, and so does any tag of a type other than the
word's before, or behind E-, S-, L- or U-. In BIO an I- without its B- thus begins one too, as in
the scorer of CoNLL 2000 (conlleval).
"""

import dataclasses
import itertools
import re

from bert_tf.errors import UserError
from tasks.readers.records import (
    BadRow,
    RecordError,
    as_label,
    check_text,
    checked_path,
    good_or_bad,
    json_records,
    raise_bad_rows,
    read_lines,
)
from tasks.readers.tables import header_of, read_rows


@dataclasses.dataclass(frozen=True)
class TaggedSentence:
    """Words and their BIO tags, which are None if unlabelled. `location` is its first line."""

    words: list[str]
    tags: list[str] | None
    location: str


@dataclasses.dataclass(frozen=True)
class TaggedText:
    """A text and its (start, end, type), characters, end exclusive; None if unlabelled."""

    text: str
    entities: list[tuple[int, int, str]] | None
    location: str


def read_tagged(path, labelled=True, text_column="text"):
    """Yields TaggedText from .jsonl, TaggedSentence from column files, a BadRow for a bad one.

    .jsonl: {"text": ..., "entities": [{"start", "end", "type"}, ...]}, in the order of their start.
    Unlabelled, also .csv and .tsv with a `text_column`; of a column file the first column is read.
    """
    path = checked_path(path)
    if path.suffix == ".jsonl" and labelled:
        items = _tagged_texts(path, text_column)
    elif not labelled and _has_text_column(path, text_column):
        items = _plain_texts(path, text_column)
    elif path.suffix == ".csv":
        raise UserError(f"{path}: tags come in a column file or in .jsonl, not in .csv")
    else:
        items = _sentences(path, labelled, to_bio)
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise UserError(f"{path}: no rows in it")


def to_bio(tags):
    """The BIO tags of a sentence in any of the schemes. Raises RecordError at what is no tag."""
    result, before, type_before = [], "O", ""
    for tag in tags:
        prefix, kind = _split(tag)
        if prefix == "O":
            result.append("O")
        else:
            begins = prefix in "BSU" or kind != type_before or before in "ESLU"
            result.append(f"{'B' if begins else 'I'}-{kind}")
        before, type_before = prefix, kind
    return result


def scheme_of(path):
    """The scheme of a column file's tags: "IO", "IOB1", "BIO", "BIOES" or "BILOU".

    By all its tags: E- or S- is BIOES, L- or U- is BILOU; no B- is IO (also a file of IOB1 in which
    no entities of one type touch); where each B- stands right behind its own type, IOB1; else BIO.
    Reading does not depend on it. Raises UserError at a bad line or at tags of two schemes.
    """
    path = checked_path(path)
    prefixes, begins_elsewhere = set(), False
    for sentence in raise_bad_rows(_sentences(path, True, list)):
        type_before = ""
        for prefix, kind in map(_split, sentence.tags):
            prefixes.add(prefix)
            begins_elsewhere |= prefix == "B" and kind != type_before
            type_before = kind
    if prefixes & {"E", "S"} and prefixes & {"L", "U"}:
        raise UserError(f"{path}: tags of two schemes, E- or S- (BIOES) and L- or U- (BILOU)")
    if prefixes & {"E", "S"}:
        return "BIOES"
    if prefixes & {"L", "U"}:
        return "BILOU"
    if "B" not in prefixes:
        return "IO"
    return "BIO" if begins_elsewhere else "IOB1"


def _sentences(path, labelled, convert):
    """Yields TaggedSentence or BadRow; `convert` makes the sentence's tags of those in the file."""
    width = is_tabbed = None
    block = []  # (line number, columns) of one sentence.
    for number, line in read_lines(path):
        line = line.strip(" \t\r\n")
        if line and not line.startswith("-DOCSTART-"):
            if width is None:
                is_tabbed = "\t" in line
                width = len(_columns(line, is_tabbed))
                if labelled and width < 2:
                    raise UserError(f"{path}:{number}: one column, wanted a word and its tag")
            block.append((number, _columns(line, is_tabbed)))
        elif block:
            yield _sentence(path, block, width, labelled, convert)
            block = []
    if block:
        yield _sentence(path, block, width, labelled, convert)


def _columns(line, is_tabbed):
    # Not str.split() alone: a word may be one of Unicode's spaces.
    if is_tabbed:
        return [column.strip(" ") for column in line.split("\t")]
    return re.split(" +", line)


def _sentence(path, block, width, labelled, convert):
    for number, columns in block:
        try:
            _check_columns(columns, width, labelled)
        except RecordError as error:
            return BadRow(f"{path}:{number}", str(error))
    words = [columns[0] for _, columns in block]
    tags = convert([columns[-1] for _, columns in block]) if labelled else None
    return TaggedSentence(words, tags, f"{path}:{block[0][0]}")


def _check_columns(columns, width, labelled):
    if len(columns) != width:
        raise RecordError(f"{len(columns)} columns, but the file's first line has {width}")
    check_text(columns[0], "the first column")
    if labelled:
        _split(columns[-1])


def _split(tag):
    """ "B-creative-work" -> ("B", "creative-work"), "O" -> ("O", "")."""
    tag = as_label(tag)
    prefix, _, kind = tag.partition("-")
    if tag != "O" and (prefix not in tuple("BIESLU") or not kind or "," in kind):
        raise RecordError(
            f"tag {tag!r:.80}, wanted O or one of B-, I-, E-, S-, L-, U- and one type without a "
            "comma"
        )
    check_text(tag, "the tag")
    return prefix, kind


def _tagged_texts(path, text_column):
    for number, record in json_records(path):
        yield good_or_bad(f"{path}:{number}", record, _tagged_text, text_column)


def _tagged_text(values, text_column, location):
    text, entities = values.get(text_column), values.get("entities")
    if not isinstance(text, str):
        raise RecordError(f"column {text_column!r} holds {text!r:.80}, wanted text")
    check_text(text, f"column {text_column!r}")
    if not isinstance(entities, list):
        raise RecordError(f"column 'entities' holds {entities!r:.80}, wanted a list")
    spans = sorted(_span(entity, len(text)) for entity in entities)
    for span, following in itertools.pairwise(spans):
        if following[0] < span[1]:
            raise RecordError(f"entities {span} and {following} overlap")
    return TaggedText(text, spans, location)


def _span(entity, length):
    if not isinstance(entity, dict):
        raise RecordError(f'entity {entity!r:.80}, wanted {{"start", "end", "type"}}')
    start, end, kind = (entity.get(key) for key in ("start", "end", "type"))
    if type(start) is not int or type(end) is not int:
        raise RecordError(f"entity {entity!r:.80}, wanted whole numbers for start and end")
    if not isinstance(kind, str) or not as_label(kind):
        raise RecordError(f"entity {entity!r:.80}, wanted a name for its type")
    check_text(kind, "the entity's type")
    if not 0 <= start < end <= length:
        raise RecordError(
            f"entity {start}..{end} {kind}: wanted 0 <= start < end <= {length}, the text's"
        )
    return start, end, as_label(kind)


def _plain_texts(path, text_column):
    for row in read_rows(path, (text_column,)):
        is_bad = isinstance(row, BadRow)
        yield row if is_bad else TaggedText(row.values[text_column], None, row.location)


def _has_text_column(path, text_column):
    """Whether unlabelled text comes in rows: in .tsv it may be a column file as well."""
    return path.suffix in (".jsonl", ".csv") or (
        path.suffix == ".tsv" and text_column in header_of(path)
    )
