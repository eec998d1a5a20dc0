"""Entities from labels of tokens in the graph: literals, random texts, seqeval."""

import random

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer
from bert_tf.text.encoder_inputs import Packed
from tasks.data.windows import Windows
from tasks.types.tagging import (
    entities,
    in_text_order,
    in_windows,
    label_spans,
    min_top2_gap,
    word_predictions,
)
from tests.entities import (
    BIO,
    ENTRIES,
    VOCABULARY,
    decoded,
    firsts,
    found,
    from_words,
    logits_of,
    windows_of,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(VOCABULARY, do_lower_case=True)


def test_entities_by_hand(tokenizer):
    """Check that I- starts an entity after O, after another type and at the start of a text."""
    texts = ["Anna York Paris is, London", "Cafe\u0301 😀😀 東京"]
    tokens = tokenizer.tokenize_with_offsets(texts)
    windows = windows_of(tokens)
    labels_T = np.array([2, 4, 3, 0, 0, 4, 4, 0, 4, 2], np.int32)
    prediction = entities(texts, windows, logits_of(windows, labels_T, 5), BIO)
    assert found(prediction) == [
        [
            (0, 4, "PER", "Anna"),
            (5, 9, "LOC", "York"),
            (10, 15, "LOC", "Paris"),
            (20, 26, "LOC", "London"),
        ],
        [(0, 5, "LOC", "Cafe\u0301"), (9, 10, "LOC", "東"), (10, 11, "PER", "京")],
    ]
    for texts_of_row, row in zip(texts, found(prediction), strict=True):
        assert all(texts_of_row[start:end] == text for start, end, _, text in row)


def test_the_score_is_the_mean_probability_of_the_labels(tokenizer):
    texts = ["new yorks !"]
    windows = windows_of(tokenizer.tokenize_with_offsets(texts))
    probabilities = np.full((1, 6, 5), 0.0)
    probabilities[0, :, :] = [0.96, 0.01, 0.01, 0.01, 0.01]
    probabilities[0, 1] = [0.1, 0.1, 0.1, 0.6, 0.1]
    probabilities[0, 2] = [0.05, 0.05, 0.05, 0.05, 0.8]
    probabilities[0, 3] = [0.0, 0.0, 1.0, 0.0, 0.0]  # The logits of ##s are ignored.
    prediction = entities(texts, windows, np.log(probabilities + 1e-30), BIO)
    assert found(prediction) == [[(0, 9, "LOC", "new yorks")]]
    np.testing.assert_allclose(prediction["entity_score"], [[0.7]], rtol=1e-5)


def test_the_margin_is_of_the_tokens_that_have_labels(tokenizer):
    tokens = tokenizer.tokenize_with_offsets(["Berliners met Anna", "", "met Paris"])
    windows = windows_of(tokens, size=4, stride=2)
    names = [ENTRIES[token] for token in tokens.ids.flat_values.numpy()]
    logits = logits_of(windows, np.zeros(len(names), np.int32), 5)
    unlabelled = in_windows(windows, [int(name.startswith("##")) for name in names])
    logits[unlabelled.to_tensor(0).numpy() == 1] = 0
    gap = (np.exp(9) - 1) / (np.exp(9) + 4)
    np.testing.assert_allclose(min_top2_gap(windows, logits, 3), [gap, np.inf, gap], rtol=1e-5)
    paris = in_windows(windows, [int(name == "paris") for name in names])
    logits[paris.to_tensor(0).numpy() == 1] = 0
    np.testing.assert_allclose(min_top2_gap(windows, logits, 3), [gap, np.inf, 0], rtol=1e-5)


def test_empty_batches_empty_texts_and_texts_without_entities(tokenizer):
    dtypes = {
        "entity_text": tf.string,
        "entity_type": tf.string,
        "entity_start": tf.int32,
        "entity_end": tf.int32,
        "entity_score": tf.float32,
        "num_entities": tf.int32,
    }
    for texts in ([], [""], ["", " \x00", ""], ["the", ""]):
        tokens = tokenizer.tokenize_with_offsets(tf.constant(texts, tf.string))
        windows = windows_of(tokens)
        labels_T = np.zeros(int(tokens.ids.row_splits[-1]), np.int32)
        prediction = entities(
            tf.constant(texts, tf.string), windows, logits_of(windows, labels_T, 5), BIO
        )
        assert {name: values.dtype for name, values in prediction.items()} == dtypes
        assert prediction["num_entities"].numpy().tolist() == [0] * len(texts)
        for name, values in prediction.items():
            assert name == "num_entities" or values.shape == (len(texts), 0)


def test_bytes_that_are_no_utf8_count_as_in_python(tokenizer):
    sent = b"\xff\xe6\x9d Anna \xc3 Paris\xf0\x9f"
    tokens = tokenizer.tokenize_with_offsets([sent])
    windows = windows_of(tokens)
    labels_T = np.where(np.isin(tokens.ids.flat_values, [VOCABULARY["anna"]]), 1, 0)
    labels_T[tokens.ids.flat_values.numpy() == VOCABULARY["paris"]] = 3
    prediction = entities(
        tf.constant([sent]),
        windows,
        logits_of(windows, labels_T.astype(np.int32), 5),
        BIO,
    )
    text = sent.decode("utf-8", "replace")
    assert [(kind, text[start:end]) for start, end, kind, _ in found(prediction)[0]] == [
        ("PER", "Anna"),
        ("LOC", "Paris"),
    ]


def random_text(rng):
    """Return a text and its (start, end, type): adjacent entities, also at both ends."""
    nouns = [
        "Anna",
        "Paris",
        "U.S.",
        "new york",
        "Berliners",
        "東京",
        "cafe\u0301",
        "New-York City",
    ]
    others = ["in", "the", "I", "don't", ".", "(", "/", "\u200b", "😀", "strange\u0301words"]
    text, spans = "", []
    for _ in range(rng.randrange(0, 30)):
        if rng.random() < 0.4:
            noun = rng.choice(nouns)
            if (text and text[-1].isalnum()) or text.endswith(("\u0301", "😀", "\u200b")):
                text += " "
            spans.append((len(text), len(text) + len(noun), rng.choice(BIO.types)))
            text += noun + rng.choice([" ", "/", "'s ", "", ")"])
        else:
            if (text and text[-1].isalnum()) or text.endswith("\u0301"):
                text += " "
            text += rng.choice(others) + rng.choice([" ", "  ", "\t", ""])
    return text, spans


@pytest.mark.parametrize("sizes", [{}, {"size": 7, "stride": 4}, {"size": 3, "stride": 1}])
def test_spans_are_restored_for_any_windows(tokenizer, sizes):
    rng = random.Random(5)
    texts, spans = zip(*(random_text(rng) for _ in range(150)), strict=True)
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels, *counts = label_spans(BIO, texts, tokens, spans, firsts(tokens))
    assert counts == [0, 0]
    expected = [
        [(start, end, kind, text[start:end]) for start, end, kind in of_text]
        for text, of_text in zip(texts, spans, strict=True)
    ]
    assert sum(map(len, expected)) > 500
    assert decoded(texts, tokens, labels.labels, **sizes) == expected


def test_windows_may_come_in_any_order(tokenizer):
    texts = ["Anna in Paris, London", "", "I met the U.S. in New York"]
    spans = [
        [(0, 4, "PER"), (8, 13, "LOC"), (15, 21, "LOC")],
        [],
        [(10, 14, "LOC"), (18, 26, "LOC")],
    ]
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels_T = label_spans(BIO, texts, tokens, spans, firsts(tokens))[0].labels
    windows = windows_of(tokens, size=4, stride=2)
    order = np.random.default_rng(3).permutation(len(windows.example_W))
    packed = Packed(*(tf.gather(column, order) for column in windows.packed[:4]))
    windows = Windows(
        packed, *(None if column is None else tf.gather(column, order) for column in windows[1:])
    )
    logits = logits_of(windows, labels_T, 5)
    np.testing.assert_array_equal(
        in_text_order(windows, logits).numpy().argmax(-1)[labels_T >= 0], labels_T[labels_T >= 0]
    )
    prediction = found(entities(texts, windows, logits, BIO))
    assert [[entity[:3] for entity in row] for row in prediction] == spans


def test_decoding_agrees_with_seqeval(tokenizer):
    """Draw any sequence of labels, on sentences whose words are one token each."""
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    rng = np.random.default_rng(1)
    sentences = [["paris"] * size for size in rng.integers(0, 12, 300)]
    tags = [" ".join(rng.choice(BIO.labels, len(words))) for words in sentences]
    texts, tokens, labelled = from_words(tokenizer, sentences, tags)
    prediction = decoded(texts, tokens, labelled.labels, size=5, stride=3)
    step = len("paris ")
    assert [
        [(kind, start // step, end // step) for start, end, kind, _ in row] for row in prediction
    ] == [get_entities(of_text.split()) for of_text in tags]
    assert word_predictions(BIO, labelled.labels, labelled) == [of_text.split() for of_text in tags]


def test_the_graph_has_only_tensorflow_operations(tokenizer):
    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([None, None, 5])],
        autograph=False,
    )
    def prediction(texts, logits):
        tokens = tokenizer.tokenize_with_offsets(texts)
        lengths = tokens.ids.row_lengths()
        packed = Packed(tokens.ids, tokens.ids, tokens.starts, tokens.ends)
        rows = tf.range(tf.size(lengths))
        is_max_context = tf.ones_like(tokens.ids, tf.bool)
        zeros = tf.zeros_like(rows)
        windows = Windows(packed, rows, zeros, zeros, is_max_context, is_first=is_max_context)
        return entities(texts, windows, logits, BIO)

    logits = np.zeros((2, 3, 5), np.float32)
    logits[0, 1, 3] = logits[1, 0, 1] = logits[1, 1, 2] = 9
    row = found(prediction(tf.constant(["in Paris", "Anna-"]), logits))
    assert row == [[(3, 8, "LOC", "Paris")], [(0, 5, "PER", "Anna-")]]
    assert found(prediction(tf.constant([], tf.string), np.zeros((0, 0, 5), np.float32))) == []
    operations = {
        node.op
        for function in prediction.get_concrete_function().graph.as_graph_def().library.function
        for node in function.node_def
    } | {operation.type for operation in prediction.get_concrete_function().graph.get_operations()}
    assert not [name for name in operations if "PyFunc" in name]
