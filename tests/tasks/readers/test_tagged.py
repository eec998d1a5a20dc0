"""Tagged words and spans: five schemes converted to BIO, span checks, bad sentences."""

import json
import random

import pytest
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities

from bert_tf import UserError
from tasks.data.readers.rows import BadRow, Example, raise_bad_rows
from tasks.data.readers.tagged import JoinedWords, WordTags, read_tagged, to_bio


def write_column_file(path, sentences):
    blocks = ("".join(f"w\t{tag}\n" for tag in tags) + "\n" for tags in sentences)
    path.write_text("".join(blocks))
    return path


def sentence(words, tags, location):
    label = None if tags is None else WordTags(tags)
    return Example({"text": JoinedWords.of(words)}, label, location)


def random_entities(rng, length):
    """Return entities [(start, end, type)] of a sentence, many of them adjacent."""
    entities, position = [], 0
    while position < length:
        if rng.random() < 0.6:
            end = min(length, position + rng.randint(1, 3))
            entities.append((position, end, rng.choice(["PER", "creative-work"])))
            position = end
        else:
            position += 1
    return entities


def tags_of(entities, length, scheme):
    """Return the tags of the entities by the definition of a scheme."""
    tags = ["O"] * length
    for number, (start, end, kind) in enumerate(entities):
        before = entities[number - 1] if number else None
        touches = before is not None and before[1:] == (start, kind)
        first = {"IOB1": "B" if touches else "I"}.get(scheme, "B")
        last = {"BIOES": "E", "BILOU": "L"}.get(scheme, "I")
        alone = {"BIOES": "S", "BILOU": "U"}.get(scheme, first)
        for position in range(start, end):
            prefix = first if position == start else last if position == end - 1 else "I"
            tags[position] = f"{alone if end - start == 1 else prefix}-{kind}"
    return tags


@pytest.mark.parametrize(
    ("scheme", "seqeval_scheme"),
    [("IOB1", IOB1), ("BIO", IOB2), ("BIOES", IOBES), ("BILOU", BILOU)],
)
def test_each_scheme_is_converted_to_bio(tmp_path, scheme, seqeval_scheme):
    rng = random.Random(scheme)
    sentences = [random_entities(rng, 12) for _ in range(200)]
    tagged = [tags_of(entities, 12, scheme) for entities in sentences]
    path = write_column_file(tmp_path / "a.conll", tagged)
    found = [row.label.tags for row in raise_bad_rows(read_tagged(path))]
    assert found == [tags_of(entities, 12, "BIO") for entities in sentences]

    def spans(tags, scheme):
        return [[e.to_tuple()[1:] for e in row] for row in Entities(tags, scheme).entities]

    assert spans(found, IOB2) == spans(tagged, seqeval_scheme)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-a I-a O I-b I-a", "B-a I-a O B-b B-a"),
        ("O O", "O O"),
        ("I-a B-a I-a I-b", "B-a B-a I-a B-b"),
        ("B-a I-a B-a I-b O I-a", "B-a I-a B-a B-b O B-a"),
        ("I-a B-b I-b", "B-a B-b I-b"),
        ("B-a I-a E-a S-a I-a E-a", "B-a I-a I-a B-a B-a I-a"),
        ("O S-a", "O B-a"),
        ("B-a L-a U-b L-b O", "B-a I-a B-b B-b O"),
        ("PER PER O PER creative-work", "B-PER I-PER O B-PER B-creative-work"),
        ("B-PER PER I-PER DET", "B-PER I-PER I-PER B-DET"),
    ],
)
def test_tags_are_converted_by_hand(tags, expected):
    assert to_bio(tags.split()) == expected.split()


def test_unknown_tags_are_rejected(tmp_path):
    for tag in ("B-", "I-", "S-", "B", "I", "B-a,I-b"):
        path = write_column_file(tmp_path / "a.conll", [["O"], ["O", tag]])
        good, bad = read_tagged(path)
        assert good.label.tags == ["O"] and bad.location == f"{path}:4"
        assert bad.message.startswith("tag ") and repr(tag) in bad.message


def test_columns_documents_line_ends_and_a_missing_last_one_are_read(tmp_path):
    path = tmp_path / "eng.train"
    path.write_bytes(
        '\ufeff-DOCSTART- -X- O O\r\n\r\nEU NNP I-NP I-ORG\r\n" " O O\r\n\t\r\n\r\n'
        "-DOCSTART- -X- O O\r\n\u00a0 NN  I-NP   O\r\nbad line\r\nc NN I-NP O\r\n\r\n\r\n"
        "Rome NNP I-NP I-LOC".encode()
    )
    assert list(read_tagged(path)) == [
        sentence(["EU", '"'], ["B-ORG", "O"], f"{path}:3"),
        BadRow(f"{path}:9", "expected 4 columns as in line 3, received 2"),
        sentence(["Rome"], ["B-LOC"], f"{path}:13"),
    ]
    unlabelled = next(read_tagged(path, labelled=False))
    assert unlabelled == sentence(["EU", '"'], None, f"{path}:3")


def test_words_have_no_blank_and_must_not_be_empty(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("New\u00a0York\tB-a\n\n\tO\n\nno\0word\tO\n\nNew York\tB-a\n")
    good, empty, null, blank = read_tagged(path)
    assert good.texts["text"].words == ["New\u00a0York"]
    assert blank.message.startswith(
        "the first column 'New York': expected words that are not empty"
    )
    assert empty == BadRow(f"{path}:3", "expected 2 columns as in line 1, received 1")
    assert null.message == "the first column: expected text, received a NUL character"


def test_spans_are_sorted(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {
        "text": "\U0001f600 Ann met Bob",
        "entities": [
            {"start": 10, "end": 13, "type": "PER", "note": 1},
            {"start": 2, "end": 5, "type": "PER"},
        ],
    }
    path.write_text(json.dumps(row) + '\n{"text": "", "entities": []}\n')
    (first, second) = raise_bad_rows(read_tagged(path))
    entities = [(2, 5, "PER"), (10, 13, "PER")]
    assert first == Example({"text": row["text"]}, entities, f"{path}:1")
    assert [first.texts["text"][start:end] for start, end, _ in first.label] == ["Ann", "Bob"]
    assert second.label == [] and second.location == f"{path}:2"
    assert [item.label for item in read_tagged(path, labelled=False)] == [None, None]


@pytest.mark.parametrize(
    ("text", "entities", "message"),
    [
        (
            '"abc"',
            '[{"start": 0, "end": 4, "type": "x"}]',
            "entity 0..4 x: expected 0 <= start < end",
        ),
        (
            '"abc"',
            '[{"start": 1, "end": 1, "type": "x"}]',
            "entity 1..1 x: expected 0 <= start < end",
        ),
        ('"abc"', '[{"start": -1, "end": 1, "type": "x"}]', "entity -1..1 x: expected 0 <= start"),
        ('"abc"', '[{"start": true, "end": 2, "type": "x"}]', "expected integers as start and"),
        ('"abc"', '[{"start": 0, "end": 2.0, "type": "x"}]', "expected integers as start and"),
        ('"abc"', '[{"start": 0, "end": 1}]', "expected a name as type"),
        ('"abc"', '[{"start": 0, "end": 1, "type": ""}]', "expected a name as type"),
        ('"abc"', "[[0, 1]]", 'entity [0, 1]: expected {"start", "end", "type"}'),
        ('"abc"', "null", "column 'entities': expected a list, received None"),
        ("1", "[]", "column 'text': expected text, received 1"),
        (r'"\udc00"', "[]", "column 'text': expected text, received half of a surrogate pair"),
        (
            '"abc"',
            '[{"start": 1, "end": 3, "type": "x"}, {"start": 0, "end": 2, "type": "y"}]',
            "entities (0, 2, 'y') and (1, 3, 'x'): expected no overlap",
        ),
    ],
)
def test_invalid_spans_are_rejected(tmp_path, text, entities, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": {text}, "entities": {entities}}}\n')
    (bad,) = read_tagged(path)
    assert isinstance(bad, BadRow) and bad.location == f"{path}:1" and message in bad.message


def test_text_without_tags_is_read_from_rows_or_words(tmp_path):
    (tmp_path / "a.csv").write_text('text,id\n"Ann, met",1\nx\n')
    (tmp_path / "a.tsv").write_text("text\tid\nAnn\t1\n")
    (tmp_path / "words.tsv").write_text("Ann\nmet\n\nBob\n")
    good, bad = read_tagged(tmp_path / "a.csv", labelled=False)
    assert good == Example({"text": "Ann, met"}, None, f"{tmp_path}/a.csv:2")
    assert bad.location[-2:] == ":3"
    (row,) = read_tagged(tmp_path / "a.tsv", labelled=False)
    assert row.texts == {"text": "Ann"}
    (row,) = read_tagged(tmp_path / "a.tsv", labelled=False, text_column="id")
    assert row.texts == {"text": "1"}
    words = [row.texts["text"] for row in read_tagged(tmp_path / "words.tsv", labelled=False)]
    assert words == ["Ann met", "Bob"]
    (tmp_path / "words.tsv").write_text("Ann\tNNP\nmet\tVBD\n\nBob\tNNP\n")
    assert [row.texts["text"] for row in read_tagged(tmp_path / "words.tsv", False)] == words
    (tmp_path / "tags.tsv").write_text("Ann\tB-PER\nmet\tO\n")
    assert [row.texts["text"] for row in read_tagged(tmp_path / "tags.tsv", False)] == words[:1]
    (tmp_path / "table.tsv").write_text("id\tsentence\n1\tAnn met Bob\n2\tBob\n")
    with pytest.raises(UserError, match="table.tsv:1: no column .text.; the columns are .id., .s"):
        list(read_tagged(tmp_path / "table.tsv", labelled=False))


def test_unreadable_files_are_reported(tmp_path):
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1\x15\xff")
    (tmp_path / "a.conll").write_text("-DOCSTART- O\n\n")
    (tmp_path / "b.conll").write_text("word\n")
    (tmp_path / "c.conll").write_bytes(b"a\tO\n\xff\tO\n")
    for name, message in (
        ("absent.conll", "absent.conll: no such file"),
        ("a.csv", "a.csv: expected tags in a column file or in .jsonl"),
        ("a.parquet", "a.parquet: expected tags in a column file or in .jsonl"),
        ("a.conll", "a.conll: expected at least one row"),
        ("b.conll", "b.conll:1: expected a word and its tag"),
        ("c.conll", "c.conll: not UTF-8: byte 0xff in line 2"),
    ):
        with pytest.raises(UserError, match=message):
            list(read_tagged(tmp_path / name))


COMMENTS = {
    "tabs": "# id x domain=news\n#\n#tag\tO\n#\tB-a\n#1\tO\n\n# id y\nb\tO\n",
    "spaces": "# id x domain=news\n#\n#tag O\n# B-a\n# O\n\n# id y\n# text = b\nb O\n",
    "columns": "#\thttp://x [2009-10-17]\n1\t#tag\tO\n1\t#\tB-a\n1\t# 1\tO\n\n#\tid\n1\tb\tO\n",
}


@pytest.mark.parametrize("name", COMMENTS)
def test_comments_before_a_sentence_are_no_words(tmp_path, name):
    path = tmp_path / "a.conll"
    path.write_text(COMMENTS[name])
    first, second = raise_bad_rows(read_tagged(path))
    first_words, second_words = (row.texts["text"].words for row in (first, second))
    assert len(first_words) == 3 and len(second_words) == 1
    assert first.label.tags == ["O", "B-a", "O"]
    if name != "columns":
        assert first_words[:2] == ["#tag", "#"] and second_words == ["b"]
    of_unlabelled = [row.texts for row in raise_bad_rows(read_tagged(path, labelled=False))]
    assert of_unlabelled == [first.texts, second.texts]
    path.write_text("# O\n\n#tag B-a\nb O\n\na O\n# comment = c\n")
    one, two, bad = read_tagged(path)
    assert (one.texts["text"].words, two.texts["text"].words) == (["#"], ["#tag", "b"])
    assert bad == BadRow(f"{path}:7", "expected 2 columns as in line 4, received 4")
    path.write_text("# id x y\nAnn\nmet\n")
    (words,) = read_tagged(path, labelled=False)
    assert words.texts == {"text": "Ann met"}


NUMBERED = {
    "GermEval": "#\thttp://x\n1\tAnn\tB-PER\tO\n2\tmet\tO\tO\n",
    "after a sentence of one word": "1 Ann B-PER\n\n1 Ann B-PER\n2 met O\n",
    "from 0": "0 Ann B-PER\n1 met O\n",
}


@pytest.mark.parametrize("name", NUMBERED)
@pytest.mark.parametrize("labelled", [True, False])
def test_a_column_that_numbers_the_words_is_refused(tmp_path, name, labelled):
    path = tmp_path / "a.tsv"
    path.write_text(NUMBERED[name])
    line = {"GermEval": 2, "from 0": 1}.get(name, 3)
    with pytest.raises(UserError, match=rf"a.tsv:{line}: the first column numbers the words; rem"):
        list(read_tagged(path, labelled))


@pytest.mark.parametrize(
    "text", ["1\tO\n2\tO\n", "1 CD O\n\n2 CD O\n", "go VB O\n2 CD O\n\n1 CD O\n2 CD O\n"]
)
@pytest.mark.parametrize("labelled", [True, False])
def test_words_may_be_numbers(tmp_path, text, labelled):
    path = tmp_path / "a.conll"
    path.write_text(text)
    *_, last = raise_bad_rows(read_tagged(path, labelled))
    assert last.texts["text"] in ("1 2", "2")


TEXT = "Ann met Bob"
EXPORTS = {
    "doccano": {"id": 1, "text": TEXT, "label": [[0, 3, "PER"], [8, 11, "PER"]]},
    "doccano, older": {"text": TEXT, "labels": [[0, 3, "PER"], [8, 11, "PER"]]},
    "doccano, relations": {
        "text": TEXT,
        "entities": [
            {"id": 7, "label": "PER", "start_offset": 8, "end_offset": 11},
            {"id": 8, "label": "PER", "start_offset": 0, "end_offset": 3},
        ],
        "relations": [],
    },
    "Prodigy": {
        "text": TEXT,
        "tokens": [{"text": "Ann", "start": 0, "end": 3, "id": 0}],
        "spans": [
            {"start": 0, "end": 3, "token_start": 0, "label": "PER"},
            {"start": 8, "end": 11, "label": "PER"},
        ],
        "answer": "accept",
    },
    "spaCy": {
        "text": TEXT,
        "ents": [
            {"start": 0, "end": 3, "label": "PER"},
            {"start": 8, "end": 11, "label": "PER"},
        ],
        "tokens": [],
    },
    "datasets": {"id": "0", "tokens": TEXT.split(), "ner_tags": ["B-PER", "O", "B-PER"]},
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_annotation_tools_are_read(tmp_path, name):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(EXPORTS[name]) + "\n")
    (item,) = raise_bad_rows(read_tagged(path))
    (unlabelled,) = raise_bad_rows(read_tagged(path, labelled=False))
    if name == "datasets":
        assert item == sentence(TEXT.split(), ["B-PER", "O", "B-PER"], f"{path}:1")
        assert unlabelled == sentence(TEXT.split(), None, f"{path}:1")
    else:
        assert item == Example({"text": TEXT}, [(0, 3, "PER"), (8, 11, "PER")], f"{path}:1")
        assert unlabelled == Example({"text": TEXT}, None, f"{path}:1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": TEXT, "tags": []}, "no column 'entities'; the columns are 'text', 'tags'"),
        ({"sentence": TEXT}, "no column 'text'; the columns are 'sentence'"),
        ({"text": TEXT, "label": "PER"}, "column 'label': expected a list, received 'PER'"),
        ({"tokens": ["a"], "ner_tags": [1]}, "column 'ner_tags': expected names such as B-PER, re"),
        ({"tokens": ["a"], "ner_tags": ["O", "O"]}, "'ner_tags': expected 1 tags, received ['O', "),
        ({"tokens": ["a"], "pos": ["NN"]}, "no column 'ner_tags'; the columns are 'tokens', 'pos'"),
        (
            {"tokens": ["a", ""], "tags": ["O", "O"]},
            "'tokens' '': expected words that are not empty",
        ),
        ({"text": TEXT, "spans": [], "answer": "reject"}, "'answer' is 'reject'; remove rows that"),
    ],
)
def test_exports_that_cannot_be_read_name_the_key(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (bad,) = read_tagged(tmp_path / "a.jsonl")
    assert message in bad.message


def test_a_file_has_either_texts_or_tokens(tmp_path):
    rows = [{"text": "a", "entities": []}, {"tokens": ["a"], "tags": ["O"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    good, bad = read_tagged(tmp_path / "a.jsonl")
    assert (
        good.texts == {"text": "a"}
        and bad.message == "expected either texts or tokens, as in other rows"
    )


@pytest.mark.parametrize(
    ("name", "sentences", "words"),
    [
        ("wnut17train.conll", 3_394, 62_730),
        ("emerging.dev.conll", 1_009, 15_733),
        ("emerging.test.annotated", 1_287, 23_394),
    ],
)
def test_wnut17_is_read_completely(data_dir, name, sentences, words):
    path = data_dir / "ner" / "wnut17" / name
    found = list(raise_bad_rows(read_tagged(path)))
    assert len(found) == sentences
    assert sum(len(row.texts["text"].words) for row in found) == words
    assert len({tag for row in found for tag in row.label.tags}) == 13


@pytest.mark.parametrize(
    "text",
    ["my name is Bob\n", "my name is Bob\nhi all\n\n", "my name is Bob\n\nhi all\n", "a\tb\n"],
)
def test_texts_are_no_column_file(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match=r"a\.txt: expected a word per line.*the column 'body'"):
        list(read_tagged(tmp_path / "a.txt", labelled=False, text_column="body"))


def test_words_without_tags_are_read_lazily(tmp_path):
    (tmp_path / "a.conll").write_bytes(b"Ann\tNNP\nmet\tVBD\n\n" * 20_000 + b"\xff")
    rows = read_tagged(tmp_path / "a.conll", labelled=False)
    assert next(rows).texts == next(rows).texts == {"text": "Ann met"}
    with pytest.raises(UserError, match="not UTF-8: byte 0xff in line 60001"):
        list(rows)


@pytest.mark.parametrize(
    "text",
    [
        "Ann NNP B-PER\nmet VBD O\n",
        "Ann NNP\nmet VBD\n\nBob NNP\n",
        "Ann NNP\nmet VBD\n",
        "Ann\nmet\n",
        "Ann B-PER\n",
    ],
)
def test_words_are_a_column_file_of_any_suffix(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    first, *_ = raise_bad_rows(read_tagged(tmp_path / "a.txt", labelled=False))
    assert first.texts["text"] in ("Ann met", "Ann")


@pytest.mark.parametrize("labelled", [True, False])
def test_json_lines_have_their_suffix(tmp_path, labelled):
    (tmp_path / "a.json").write_text('{"text": "Ann", "entities": []}\n')
    with pytest.raises(UserError, match=r"a\.json: expected an object per line, in a file that en"):
        list(read_tagged(tmp_path / "a.json", labelled))


def test_plain_tags_stay_as_they_are(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("Ann NNP\nmet VBD\n. .\n\nB-2 B-x\n")
    first, second = read_tagged(path, scheme="plain")
    assert first == sentence(["Ann", "met", "."], ["NNP", "VBD", "."], f"{path}:1")
    assert second.label.tags == ["B-x"]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"tokens": ["Ann", "met"], "tags": ["NNP", "VBD"]}))
    (row,) = read_tagged(path, scheme="plain")
    assert row.label.tags == ["NNP", "VBD"]
