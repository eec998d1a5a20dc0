"""Readers of text with tagged words or spans: column files and JSON lines.

A column file, as of CoNLL 2003 (Tjong Kim Sang & De Meulder 2003), has one word per line, in the
first column, its tag in the last column, and a blank or -DOCSTART- line between sentences. Lines
before a sentence that begin with # and a blank are comments, unless they can be its first word.
Tags of these schemes are read and converted to BIO (IOB2: B- begins each entity, I- continues it):

    IO      I- only, or types without a prefix; adjacent entities of one type are merged.
    IOB1    B- only if an entity directly follows another one of its type.
    BIO     B- at every beginning.
    BIOES   Also E- at the end, and S- for an entity of one word.
    BILOU   The same with L- and U-.

One rule covers all of them: B-, S- and U- begin an entity, and so does any tag whose type differs
from the previous word's, or that follows E-, S-, L- or U-. In BIO, an I- without a B- thus begins
an entity too, as in the scorer of CoNLL 2000 (conlleval). A tag without a prefix is read as one
with I-, as transformers does. In the scheme "plain", tags are names of any kind, such as parts of
speech, and stay as they are.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from bert_tf.errors import UserError
from tasks.data.readers.rows import (
    BadRow,
    Example,
    RowError,
    Source,
    as_label,
    check_text,
    data_file,
    good_or_bad,
    has_columns,
    json_rows,
    no_column,
    not_empty,
    read_lines,
    read_texts,
    tsv_rows,
)

# Names of columns and keys in our files, in those of annotation tools and in datasets.
_ENTITY_COLUMNS = ("entities", "spans", "ents", "label", "labels")
_ENTITY_KEYS = {"start": "start_offset", "end": "end_offset", "type": "label"}
_TAG_COLUMNS = ("ner_tags", "tags", "labels")


SCHEMES = ("bio", "plain")
# A tag that is certainly one: other names may be words.
_PREFIXED = re.compile(r"O|[BIESLU]-[^,]+")
Entity = tuple[int, int, str]  # (start, end, type), in characters, the end exclusive.


class JoinedWords(str):
    """A text that was given as words, which are joined by blanks and contain none."""

    @classmethod
    def of(cls, words: Iterable[Any], what: str = "word") -> Self:
        """Join words; raises RowError, with the name `what`, if one is empty or has a blank."""
        words = list(words)
        for word in words:
            check_text(word, what)
            if not word or " " in word:
                raise RowError(
                    f"{what} {word!r:.60}: expected words that are not empty and have no blank; "
                    "split it, or write a no-break space"
                )
        return cls(" ".join(words))

    @property
    def words(self) -> list[str]:
        """The words."""
        return self.split(" ") if self else []


class WordTags(NamedTuple):
    """Label of a text that was given as words.

    Attributes:
        tags: The tag of each word, in BIO unless the scheme is "plain".
    """

    tags: list[str]


def read_tagged(
    source: Source,
    labelled: bool = True,
    *,
    text_columns: Sequence[str] = ("text",),
    text_column: str | None = None,
    scheme: str = "bio",
    **others: Any,
) -> Iterator[Example | BadRow]:
    """Yield the texts of a file.

    Args:
        source: .jsonl of {"text": ..., "entities": [{"start", "end", "type"}, ...]}, of exports of
            doccano, Prodigy and spaCy (see `entities_of`), or of {"tokens": [...], "ner_tags":
            [...]}; or a column file. Unlabelled, also .csv and .tsv with a `text_column`; of a
            column file only the first column is read.
        labelled: Whether to read tags or entities.
        text_columns: Name of the text, as flags give it.
        text_column: Name of the text, as in task.json.
        scheme: "bio", or "plain" for tags of words that stay as they are.
        **others: Other values of a task.json, which are ignored.

    Yields:
        An `Example` with "text", whose label is a list of entities, sorted by start, or `WordTags`
        in column files and of tokens; or a `BadRow` for a text that cannot be used.

    Raises:
        UserError: If the file cannot be read or is empty.
    """
    file = data_file(source)
    text_column = text_column or text_columns[0]
    if file.suffix == ".json":
        raise UserError(f"{file}: expected an object per line, in a file that ends in .jsonl")
    if file.suffix == ".jsonl":
        items = _json_items(file, text_column, labelled, scheme)
    elif not labelled and has_columns(file, [text_column]):  # A .tsv may be a column file.
        items = read_texts(file, labelled, text_columns=[text_column])
    elif file.suffix in (".csv", ".parquet"):
        raise UserError(
            f"{file}: expected tags in a column file or in .jsonl, received {file.suffix}"
        )
    elif not labelled and _is_table(file):
        if file.suffix == ".tsv":
            _, header = next(tsv_rows(file))
            raise UserError(f"{file}:1: {no_column(text_column, header)}")
        raise UserError(
            f"{file}: expected a word per line, and blank lines between sentences; write texts to "
            f"a .csv, .tsv or .jsonl file with the column {text_column!r}"
        )
    else:
        items = _sentences(file, labelled, scheme)
    yield from not_empty(items, file)


def split_tag(tag: str) -> tuple[str, str]:
    """Split "B-creative-work" into ("B", "creative-work"), "O" into ("O", "").

    "PER" is ("I", "PER").

    Raises:
        RowError: If the tag is not text, has no type, or has a comma.
    """
    tag = plain_tag(tag)
    if tag == "O":
        return "O", ""
    prefix, dash, kind = tag.partition("-")
    if len(prefix) != 1 or prefix not in "BIESLU":
        return "I", tag
    if not kind and (dash or prefix in "BI"):
        raise RowError(f"tag {tag!r:.80}: expected a type, as in {prefix}-PER")
    return (prefix, kind) if dash else ("I", tag)


def plain_tag(tag: Any) -> str:
    """Return a tag without white space around it; raises RowError if it is none."""
    check_text(tag, "the tag")
    tag = as_label(tag)
    if not tag or "," in tag:
        raise RowError(f"tag {tag!r:.80}: expected a name without a comma")
    return tag


def to_bio(tags: Iterable[str]) -> list[str]:
    """Convert the tags of one sentence from any of the schemes to BIO.

    Raises:
        RowError: As `split_tag`.
    """
    result, before, type_before = [], "O", ""
    for tag in tags:
        prefix, kind = split_tag(tag)
        if prefix == "O":
            result.append("O")
        else:
            # The one rule of the module's docstring, which covers all schemes.
            begins = prefix in "BSU" or kind != type_before or before in "ESLU"
            result.append(f"{'B' if begins else 'I'}-{kind}")
        before, type_before = prefix, kind
    return result


def read_tags(tags: Iterable[str], scheme: str) -> list[str]:
    """Return the tags of one sentence as the labels of a scheme; raises RowError."""
    return to_bio(tags) if scheme == "bio" else list(map(plain_tag, tags))


class _Layout(NamedTuple):
    """Layout of a column file, as in its first line that is certainly no comment.

    Attributes:
        number: The number of that line.
        is_tabbed: Whether tabs separate columns, so that words may contain spaces.
        width: Number of columns.
        has_tags: Whether the last column is a tag.
    """

    number: int
    is_tabbed: bool
    width: int
    has_tags: bool


def _layout(file):
    """Return the `_Layout` of a column file, or `None` if it is empty."""
    layout = None
    for number, line in _lines(file):
        if line and not (layout and line.startswith("#")):
            is_tabbed = "\t" in line
            columns = _columns(line, is_tabbed)
            layout = _Layout(number, is_tabbed, len(columns), _is_prefixed(columns[-1]))
            if not line.startswith("#"):
                break
    return layout


def _is_table(file):
    """Return whether a file has lines of several columns or words, but no tags or sentences."""
    layout = _layout(file)
    if not layout or layout.width == 1 or layout.has_tags:
        return False
    groups = itertools.groupby((line for _, line in _lines(file)), bool)
    blocks = (lines for is_block, lines in groups if is_block)
    widths = collections.Counter(len(_columns(line, layout.is_tabbed)) for line in next(blocks))
    has_sentence = widths.total() > 1
    for lines in blocks:  # One at a time, since the file may be larger than memory.
        if has_sentence or len(list(itertools.islice(lines, 2))) > 1:
            return False
    # A text per line may be followed by a blank one.
    return not has_sentence or file.suffix == ".tsv" or len(widths) > 1


def _lines(file):
    """Yield (number, line without surrounding white space), "" between sentences."""
    for number, line in read_lines(file):
        line = line.strip(" \t\r\n")
        yield number, "" if line.startswith("-DOCSTART-") else line


def _sentences(file, labelled, scheme):
    """Yield an `Example` or a `BadRow` per sentence."""
    layout = _layout(file)
    if layout and labelled and layout.width < 2:
        raise UserError(f"{file}:{layout.number}: expected a word and its tag, received one column")
    # The first sentence of several words decides, since words may be numbers themselves.
    block = next((block for block in _blocks(file, layout) if len(block) > 1), [])
    if block and layout.width - layout.has_tags > 1 and _is_numbered(block):
        raise UserError(
            f"{file}:{block[0][0]}: the first column numbers the words; remove it, so that the "
            "word is first and the tag last"
        )
    for block in _blocks(file, layout):
        yield _sentence(file, block, layout, labelled, scheme)


def _blocks(file, layout):
    """Yield the lines of each sentence, as a list of (line number, columns)."""
    block = []
    for number, line in _lines(file):
        columns = _columns(line, layout.is_tabbed) if line else []
        if line and (block or not _is_comment(line, columns, layout)):
            block.append((number, columns))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _is_numbered(block):
    """Return whether the first column counts the words, from 0 or 1."""
    words = [columns[0] for _, columns in block]
    return any(words == [str(first + n) for n in range(len(words))] for first in (0, 1))


def _is_comment(line, columns, layout):
    """Return whether the first line of a sentence is a comment, and no word of the layout."""
    is_word = len(columns) == layout.width and (not layout.has_tags or _is_prefixed(columns[-1]))
    return line[0] == "#" and line[1:2] in ("", " ", "\t") and not is_word


def _is_prefixed(text):
    return bool(_PREFIXED.fullmatch(text))


def _columns(line, is_tabbed):
    # Not str.split(): it also splits at Unicode spaces, and those may be words.
    if is_tabbed:
        return [column.strip(" ") for column in line.split("\t")]
    return re.split(" +", line)


def _sentence(file, block, layout, labelled, scheme):
    for number, columns in block:
        try:
            if len(columns) != layout.width:
                raise RowError(
                    f"expected {layout.width} columns as in line {layout.number}, received "
                    f"{len(columns)}"
                )
            JoinedWords.of(columns[:1], "the first column")
            if labelled:
                read_tags(columns[-1:], scheme)
        except RowError as error:
            return BadRow(f"{file}:{number}", str(error))
    tags = read_tags([columns[-1] for _, columns in block], scheme) if labelled else None
    return _of_words([columns[0] for _, columns in block], tags, f"{file}:{block[0][0]}")


def _of_words(words, tags, location):
    label = None if tags is None else WordTags(tags)
    return Example({"text": JoinedWords.of(words, "column 'tokens'")}, label, location)


def _json_items(file, text_column, labelled, scheme):
    form = None
    # Text to predict may be a number, as in the other formats.
    parsers = {} if labelled else {"parse_int": str, "parse_float": str}
    for number, row in json_rows(file, **parsers):
        item = good_or_bad(f"{file}:{number}", row, _json_item, text_column, labelled, scheme)
        if labelled and not isinstance(item, BadRow):
            form = form or type(item.label)
            if type(item.label) is not form:
                item = BadRow(item.location, "expected either texts or tokens, as in other rows")
        yield item


def _json_item(values, text_column, labelled, scheme, location):
    if text_column in values:
        text = values[text_column]
        check_text(text, f"column {text_column!r}")
        label = entities_of(values, len(text)) if labelled else None
        return Example({"text": text}, label, location)
    if "tokens" not in values:
        raise RowError(no_column(text_column, values))
    words = values["tokens"]
    if not isinstance(words, list):
        raise RowError(f"column 'tokens': expected a list of words, received {words!r:.80}")
    tags = read_tags(_tags(values, len(words)), scheme) if labelled else None
    return _of_words(words, tags, location)


def _tags(values, count):
    """Return the tags of `count` words in the columns of Hugging Face datasets."""
    column = next((name for name in _TAG_COLUMNS if name in values), None)
    if column is None:
        raise RowError(no_column(_TAG_COLUMNS[0], values))
    tags = values[column]
    if not isinstance(tags, list) or len(tags) != count:
        raise RowError(f"column {column!r}: expected {count} tags, received {tags!r:.80}")
    if not all(isinstance(tag, str) for tag in tags):
        raise RowError(
            f"column {column!r}: expected names such as B-PER, received {tags!r:.80}; names of "
            "numbers are not in the file, convert them (docs/data-formats.md)"
        )
    return tags


def entities_of(values: Mapping[str, Any], length: int) -> list[Entity]:
    """Return the entities of a text, sorted by start.

    Args:
        values: A list of entities: "entities", as {"start", "end", "type"}; "spans" of Prodigy and
            "ents" of spaCy, as {"start", "end", "label"}; or "label", "labels" and "entities" of
            doccano, as [start, end, label] or {"start_offset", "end_offset", "label"}.
        length: Number of characters of the text.

    Raises:
        RowError: If an entity is malformed, or entities overlap.
    """
    column = next((name for name in _ENTITY_COLUMNS if name in values), None)
    if column is None:
        raise RowError(no_column(_ENTITY_COLUMNS[0], values))
    entities = values[column]
    if not isinstance(entities, list):
        raise RowError(f"column {column!r}: expected a list, received {entities!r:.80}")
    if column == "spans" and values.get("answer", "accept") != "accept":
        raise RowError(f"'answer' is {values['answer']!r:.80}; remove rows that are not accepted")
    spans = sorted(_span(entity, length) for entity in entities)
    # Spans are sorted, so any overlap is one of neighbors.
    for span, following in itertools.pairwise(spans):
        if following[0] < span[1]:
            raise RowError(f"entities {span} and {following}: expected no overlap")
    return spans


def _span(entity, length):
    if isinstance(entity, list | tuple) and len(entity) == 3:
        start, end, kind = entity
    elif isinstance(entity, dict):
        start, end, kind = (
            entity.get(name, entity.get(other)) for name, other in _ENTITY_KEYS.items()
        )
    else:
        raise RowError(f'entity {entity!r:.80}: expected {{"start", "end", "type"}}')
    # Not isinstance: true and false would count as integers.
    if type(start) is not int or type(end) is not int:
        raise RowError(f"entity {entity!r:.80}: expected integers as start and end")
    if not isinstance(kind, str) or not as_label(kind):
        raise RowError(f"entity {entity!r:.80}: expected a name as type")
    check_text(kind, "the entity's type")
    if not 0 <= start < end <= length:
        raise RowError(
            f"entity {start}..{end} {kind}: expected 0 <= start < end <= {length}, the text length"
        )
    return start, end, as_label(kind)
