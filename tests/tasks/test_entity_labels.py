"""Labels of tokens from words and from character spans, on literals and on WNUT17."""

import numpy as np
import pytest

from bert_tf import Tokenizer, UserError, Vocabulary
from tasks.data.readers.tagged import JoinedWords, split_tag
from tasks.types.tagging import (
    NO_LABEL,
    TagLabels,
    label_spans,
    tags_of_words,
    word_predictions,
)
from tests.entities import BIO, ENTRIES, VOCABULARY, decoded, firsts, from_words, read_columns


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(VOCABULARY, do_lower_case=True)


def named(tokens, labels_T):
    """Return [(entry, label), ...] of all tokens."""
    return [
        (ENTRIES[token], BIO.labels[label] if label != NO_LABEL else None)
        for token, label in zip(tokens.ids.flat_values.numpy(), labels_T, strict=True)
    ]


def test_labels_have_prefix_and_type():
    bio = TagLabels(("O", "I-PER", "B-PER", "B-a-b", "I-a-b"))
    assert bio.types == ("PER", "a-b")
    assert bio.type_C.tolist() == [-1, 0, 0, 1, 1]
    assert bio.is_begin_C.tolist() == [False, False, True, True, False]
    assert bio.inside_C.tolist() == [NO_LABEL, 1, 1, 4, 4]
    assert bio.begin_Y.tolist() == [2, 3]
    for names in (("X", "Y"), ("B-X", "I-X", "Y"), ("U-X", "L-X", "I-Y")):
        assert TagLabels.of_names(names).labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    for labels in ((), ("O",), ("B-X", "I-X"), ("O", "X", "X")):
        with pytest.raises(UserError, match="labels: .*expected O and tags of entity types, each"):
            TagLabels(labels)
    for tag in ("B-", "I", "S-"):
        with pytest.raises(UserError, match=f"labels: tag '{tag}': expected a type, as in "):
            TagLabels(("O", tag))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("PER", "O", "B-PER"), {"O": 1, "B-PER": 2, "I-PER": 0}),
        (("O", "I-PER"), {"O": 0, "B-PER": 1, "I-PER": 1}),
        (("DATE", "O", "PER"), {"O": 1, "B-DATE": 0, "I-DATE": 0, "B-PER": 2, "I-PER": 2}),
        (("O", "S-A", "E-A", "I-A", "B-A"), {"O": 0, "B-A": 4, "I-A": 3}),
        (("O", "U-A", "L-A"), {"O": 0, "B-A": 1, "I-A": 2}),
    ],
)
def test_each_tag_has_the_label_that_is_most_like_it(labels, expected):
    assert TagLabels(labels).ids == expected


@pytest.mark.parametrize(
    ("labels", "predicted", "spans", "tags"),
    [
        # As transformers.pipeline("token-classification", aggregation_strategy="simple") groups.
        (("O", "A", "B-C"), "A A O B-C", [(0, 12, "A"), (20, 24, "C")], "B-A I-A O B-C"),
        (("O", "I-A"), "I-A I-A O I-A", [(0, 12, "A"), (20, 24, "A")], "I-A I-A O I-A"),
        (
            ("S-A", "E-A", "I-A", "B-A", "O"),
            "B-A E-A I-A S-A",
            [(0, 12, "A"), (13, 19, "A"), (20, 24, "A")],
            "B-A I-A B-A B-A",
        ),
        (
            ("O", "U-A", "L-A"),
            "U-A U-A L-A O",
            [(0, 4, "A"), (5, 12, "A"), (13, 19, "A")],
            "B-A B-A B-A O",
        ),
    ],
)
def test_labels_of_any_scheme_become_entities(tokenizer, labels, predicted, spans, tags):
    bio = TagLabels(labels)
    texts = ["Anna Berlin London York"]
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels_T = np.array([bio.labels.index(tag) for tag in predicted.split()], np.int32)
    (found,) = decoded(texts, tokens, labels_T, bio)
    assert [entity[:3] for entity in found] == spans_of(spans)
    assert bio.tags_of(predicted.split()) == tags.split()


def spans_of(spans):
    """Return the spans of "Anna Berlin London York", whose words are 4, 6, 6 and 4 long."""
    starts = {0: 0, 5: 5, 13: 12, 20: 19}
    ends = {4: 4, 12: 11, 19: 18, 24: 23}
    return [(starts[start], ends[end], kind) for start, end, kind in spans]


def test_plain_tags_are_those_of_words(tokenizer):
    plain = TagLabels(("VERB", "NOUN", "O"), "plain")
    assert plain.types == plain.labels and plain.ids == {"VERB": 0, "NOUN": 1, "O": 2}
    texts, tokens, labelled = from_words(
        tokenizer, [["don't", "U.S."], ["\u200b", "met"]], ["VERB NOUN", "O VERB"], plain
    )
    assert labelled.labels.tolist() == [0, *[NO_LABEL] * 2, 1, *[NO_LABEL] * 3, 0]
    # Tokens that are no first ones may get any prediction.
    labels_T = np.where(labelled.labels == NO_LABEL, 2, labelled.labels)
    assert decoded(texts, tokens, labels_T, plain) == [
        [(0, 5, "VERB", "don't"), (6, 10, "NOUN", "U.S.")],
        [(2, 5, "VERB", "met")],
    ]
    assert word_predictions(plain, labels_T, labelled) == [["VERB", "NOUN"], ["O", "VERB"]]


@pytest.mark.parametrize(
    ("words", "entities", "expected"),
    [
        (["Anna", "Smith", "left"], [(0, 10, "PER")], ["B-PER", "I-PER", "O"]),
        (["Anna", "Smith"], [(0, 4, "PER"), (5, 10, "PER"), (-1, -1, "")], ["B-PER", "B-PER"]),
        # Its first token is O, as in the metrics.
        (["@ann", "left"], [(1, 4, "PER")], ["O", "O"]),
        (["Anna's", "(Rome)"], [(0, 4, "PER"), (8, 12, "LOC")], ["B-PER", "O"]),
        # Characters that are no token.
        (
            ["\u200bAnn", "\u200b", "\u00a0Ann"],
            [(1, 4, "PER"), (8, 11, "A")],
            ["B-PER", "O", "B-A"],
        ),
        ([], [], []),
    ],
)
def test_words_have_the_tag_of_their_first_token(words, entities, expected):
    assert tags_of_words(JoinedWords.of(words), entities, is_plain=False) == expected
    types = [tag.partition("-")[2] or "O" for tag in expected]
    assert tags_of_words(JoinedWords.of(words), entities, is_plain=True) == types


def test_words_of_a_column_file_label_their_first_piece(tokenizer):
    texts, tokens, labelled = from_words(
        tokenizer,
        [["Anna", "met", "Berliners", "."], ["the", "\u200b", "U.S.", "don't"], ["\x00"]],
        ["B-PER O B-LOC O", "O B-LOC B-LOC O", "B-PER"],
    )
    assert named(tokens, labelled.labels) == [
        *(("anna", "B-PER"), ("met", "O"), ("berlin", "B-LOC"), ("##er", None), ("##s", None)),
        (".", "O"),
        *(("the", "O"), ("u", "B-LOC"), (".", "I-LOC"), ("s", "I-LOC"), (".", "I-LOC")),
        *(("don", "O"), ("'", None), ("t", None)),
    ]
    assert labelled.firsts.tolist() == [0, 1, 2, 5, 6, -1, 7, 11, -1]
    assert labelled.splits.tolist() == [0, 4, 8, 9]
    assert np.sum(labelled.firsts < 0) == 2
    # Tokens without a label may get any prediction; here O.
    labels_T = np.maximum(labelled.labels, 0)
    assert decoded(texts, tokens, labels_T) == [
        [(0, 4, "PER", "Anna"), (9, 18, "LOC", "Berliners")],
        [(6, 10, "LOC", "U.S.")],
        [],
    ]


def test_predicted_tags_are_aligned_with_the_words_of_the_file(tokenizer):
    _, tokens, labelled = from_words(
        tokenizer, [["Anna", "\x00", "U.S."], [], ["Berliners"]], ["O O O", "", "O"]
    )
    assert tokens.ids.row_lengths().numpy().tolist() == [5, 0, 3]
    predictions_T = np.array([1, 3, 4, 0, 2, 4, 1, 1])
    assert word_predictions(BIO, predictions_T, labelled) == [
        ["B-PER", "O", "B-LOC"],
        [],
        ["I-LOC"],
    ]


def test_character_spans_label_each_basic_token(tokenizer):
    texts = ["I met Anna's Paris/London!", "", "Berliners in  New York ", "the"]
    spans = [
        [(6, 10, "PER"), (13, 18, "LOC"), (19, 25, "LOC")],
        [],
        [(0, 6, "LOC"), (13, 23, "LOC")],
        [],
    ]
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels, *counts = label_spans(BIO, texts, tokens, spans, firsts(tokens))
    assert named(tokens, labels.labels) == [
        *(("i", "O"), ("met", "O"), ("anna", "B-PER"), ("'", "O")),
        *(("s", "O"), ("paris", "B-LOC"), ("/", "O"), ("london", "B-LOC"), ("!", "O")),
        *(("berlin", "B-LOC"), ("##er", None), ("##s", None), ("in", "O")),
        *(("new", "B-LOC"), ("york", "I-LOC"), ("the", "O")),
    ]
    assert counts == [1, 0]
    assert decoded(texts, tokens, labels.labels) == [
        [(6, 10, "PER", "Anna"), (13, 18, "LOC", "Paris"), (19, 25, "LOC", "London")],
        [],
        [(0, 9, "LOC", "Berliners"), (14, 22, "LOC", "New York")],
        [],
    ]
    assert labels.splits.tolist() == [0, 9, 9, 13, 14]


def test_entities_that_overlap_in_a_basic_token_or_cover_none(tokenizer):
    texts = ["BerlinAnna York", "a  b"]
    spans = [[(0, 6, "LOC"), (6, 10, "PER")], [(1, 3, "LOC")]]
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels, *counts = label_spans(BIO, texts, tokens, spans, firsts(tokens))
    assert counts == [1, 2]
    assert decoded(texts, tokens, labels.labels) == [[(0, 10, "LOC", "BerlinAnna")], []]
    # The rest of the second entity is kept.
    spans[0][1] = (6, 15, "PER")
    labels, *counts = label_spans(BIO, texts, tokens, spans, firsts(tokens))
    assert counts == [1, 1]
    assert decoded(texts, tokens, labels.labels) == [
        [(0, 10, "LOC", "BerlinAnna"), (11, 15, "PER", "York")],
        [],
    ]


@pytest.mark.slow
def test_all_entities_of_wnut17_are_restored(data_dir):
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    sentences, tags = read_columns(data_dir / "ner" / "wnut17" / "wnut17train.conll")
    bio = TagLabels.of_names(
        sorted({split_tag(tag)[1] for of_text in tags for tag in of_text.split()} - {""})
    )
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    tokenizer = Tokenizer(vocabulary, do_lower_case=True)
    texts, tokens, labelled = from_words(tokenizer, sentences, tags, bio)
    expected = []
    for row, (text, of_text) in enumerate(zip(texts, tags, strict=True)):
        sizes = [len(word) for word in sentences[row]]
        ends = np.cumsum(sizes) + np.arange(len(sizes))
        starts = ends - sizes
        expected.append(
            [
                (int(starts[first]), int(ends[last]), kind, text[starts[first] : ends[last]])
                for kind, first, last in get_entities(of_text.split())
            ]
        )
    assert sum(map(len, expected)) > 1900
    windows = {"size": 20, "stride": 12}
    labels_T = np.maximum(labelled.labels, 0)  # Words labelled O label their first piece only.
    assert decoded(texts, tokens, labels_T, bio, vocabulary, **windows) == expected
    predictions_T = np.where(labelled.labels >= 0, labelled.labels, 0)
    assert word_predictions(bio, predictions_T, labelled) == [of_text.split() for of_text in tags]
