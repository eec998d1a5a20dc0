"""Labels of tokens from words and from character spans, on literals and on WNUT17."""

import numpy as np
import pytest

from bert_tf import Tokenizer, UserError, Vocabulary
from tasks.types.tagging import (
    NO_LABEL,
    BioLabels,
    entity_type,
    label_spans,
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


def test_bio_labels_have_prefix_and_type():
    bio = BioLabels(("O", "I-PER", "B-PER", "B-a-b", "I-a-b"))
    assert bio.types == ("PER", "a-b")
    assert bio.type_C.tolist() == [-1, 0, 0, 1, 1]
    assert bio.is_begin_C.tolist() == [False, False, True, True, False]
    assert bio.inside_C.tolist() == [0, 1, 1, 4, 4]
    assert bio.begin_Y.tolist() == [2, 3]
    assert BioLabels.of_names(("X", "Y")).labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    assert entity_type("I-LOC", "") == "LOC"
    for labels in ((), ("O",), ("B-X", "I-X", "O"), ("O", "B-X"), ("O", "B-X", "I-X", "I-X")):
        with pytest.raises(UserError, match="labels: .*expected O first, then B- and I- of each"):
            BioLabels(labels)
    for tag in ("", "B-", "LOC", "E-LOC", "O-LOC", "b-LOC"):
        with pytest.raises(
            UserError, match=f"a.conll:3: tag '{tag}': expected O, B-TYPE or I-TYPE"
        ):
            entity_type(tag, "a.conll:3")


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
    bio = BioLabels.of_names(
        sorted({entity_type(tag, "") for of_text in tags for tag in of_text.split()} - {None})
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
