"""Entities: labels of tokens from words or spans, and back, on literals, at random, on WNUT17."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary
from bert_tf.text.packing import Packed
from tasks.entity_labels import (
    NO_LABEL,
    BioLabels,
    check_spans,
    entity_type,
    join_words,
    label_spans,
    label_words,
    word_predictions,
)
from tasks.entity_spans import entities, in_text_order, in_windows

ENTRIES = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] paris london berlin ##er ##s anna u s it don t new york city "
    "in the is cafe great i met / ( ) . , ' ! - 東 京"
).split()
VOCABULARY = Vocabulary(ENTRIES)
BIO = BioLabels(("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))


class Windows(NamedTuple):
    packed: Packed
    owner_W: tf.Tensor
    begin_W: tf.Tensor
    offset_W: tf.Tensor
    is_best: tf.RaggedTensor


def windows_of(tokens, vocabulary=VOCABULARY, size=1000, stride=1000):
    """Windows of up to `size` tokens every `stride`; the last that has a token is its best."""
    columns = {name: getattr(tokens, name).to_list() for name in ("ids", "starts", "ends")}
    rows, owners, begins, best = {name: [] for name in columns}, [], [], []
    for owner, ids in enumerate(columns["ids"]):
        begin = 0
        while True:
            end = min(begin + size, len(ids))
            is_last = end == len(ids)
            special = {"ids": ("[CLS]", "[SEP]")}
            for name, of_texts in columns.items():
                first, last = (vocabulary[s] if name in special else -1 for s in ("[CLS]", "[SEP]"))
                rows[name].append([first, *of_texts[owner][begin:end], last])
            owners.append(owner)
            begins.append(begin)
            best.append([False, *(is_last or n < begin + stride for n in range(begin, end)), False])
            if is_last:
                break
            begin += stride
    ragged = {
        name: tf.ragged.constant(values, tf.int32, ragged_rank=1) for name, values in rows.items()
    }
    return Windows(
        Packed(ragged["ids"], tf.zeros_like(ragged["ids"]), ragged["starts"], ragged["ends"]),
        tf.constant(owners, tf.int32),
        tf.constant(begins, tf.int32),
        tf.ones([len(owners)], tf.int32),
        tf.ragged.constant(best, tf.bool, ragged_rank=1),
    )


def logits_of(windows, labels_T, num_labels, seed=0):
    """One-hot times 9 where a label stands; elsewhere, in other windows too, anything."""
    labels = in_windows(windows, tf.constant(labels_T)).to_tensor(NO_LABEL).numpy()
    anything = np.random.default_rng(seed).normal(0, 20, (*labels.shape, num_labels))
    one_hot = 9.0 * (labels[..., np.newaxis] == np.arange(num_labels))
    return np.where(labels[..., np.newaxis] >= 0, one_hot, anything).astype(np.float32)


def found(answer):
    """The answer -> for each text its (start, end, type, text), having looked at the padding."""
    answer = {name: values.numpy() for name, values in answer.items()}
    result = []
    for row, count in enumerate(answer["num_entities"]):
        fields = [answer[f"entity_{name}"][row] for name in ("start", "end", "type", "text")]
        assert all((field[count:] == -1).all() for field in fields[:2])
        assert all((field[count:] == b"").all() for field in fields[2:])
        assert (answer["entity_score"][row][count:] == -1).all()
        result.append(
            [
                (int(start), int(end), name.decode(), text.decode())
                for start, end, name, text in zip(*(field[:count] for field in fields), strict=True)
            ]
        )
    return result


def decoded(texts, tokens, labels_T, bio=BIO, vocabulary=VOCABULARY, **window_sizes):
    windows = windows_of(tokens, vocabulary, **window_sizes)
    logits = logits_of(windows, labels_T, len(bio.labels))
    return found(entities(tf.constant(texts, tf.string), windows, logits, bio, vocabulary))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(VOCABULARY, do_lower_case=True)


def from_words(tokenizer, sentences, tags, bio=BIO):
    words = join_words(sentences)
    tokens = tokenizer.tokenize_with_offsets(words.texts)
    ids = np.array([bio.labels.index(tag) for of_text in tags for tag in of_text.split()], np.int32)
    return words, tokens, label_words(bio, words, tokens, ids, tokenizer.vocabulary)


def named(tokens, labels_T):
    """[(entry, label), ...] of all tokens."""
    return [
        (ENTRIES[token], BIO.labels[label] if label != NO_LABEL else None)
        for token, label in zip(tokens.ids.flat_values.numpy(), labels_T, strict=True)
    ]


def test_what_bio_labels_say():
    bio = BioLabels(("O", "I-PER", "B-PER", "B-a-b", "I-a-b"))
    assert bio.types == ("PER", "a-b")
    assert bio.type_C.tolist() == [-1, 0, 0, 1, 1]
    assert bio.is_begin_C.tolist() == [False, False, True, True, False]
    assert bio.inside_C.tolist() == [0, 1, 1, 4, 4]
    assert bio.begin_Y.tolist() == [2, 3]
    assert BioLabels.of_types(("X", "Y")).labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    assert entity_type("I-LOC", "") == "LOC"
    for labels in ((), ("O",), ("B-X", "I-X", "O"), ("O", "B-X"), ("O", "B-X", "I-X", "I-X")):
        with pytest.raises(UserError, match="labels: .*wanted O first, then B- and I- of one"):
            BioLabels(labels)
    for tag in ("", "B-", "LOC", "E-LOC", "O-LOC", "b-LOC"):
        with pytest.raises(UserError, match=f"a.conll:3: tag '{tag}', wanted O, B-TYPE or I-TYPE"):
            entity_type(tag, "a.conll:3")


def test_words_of_a_column_file_label_their_first_piece(tokenizer):
    words, tokens, labelled = from_words(
        tokenizer,
        [["Anna", "met", "Berliners", "."], ["the", "\u200b", "U.S.", "don't"], ["\x00"]],
        ["B-PER O B-LOC O", "O B-LOC B-LOC O", "B-PER"],
    )
    assert words.texts == ["Anna met Berliners .", "the \u200b U.S. don't", "\x00"]
    assert words.starts.tolist() == [0, 5, 9, 19, 0, 4, 6, 11, 0]
    assert named(tokens, labelled.labels) == [
        *(("anna", "B-PER"), ("met", "O"), ("berlin", "B-LOC"), ("##er", None), ("##s", None)),
        (".", "O"),
        *(("the", "O"), ("u", "B-LOC"), (".", "I-LOC"), ("s", "I-LOC"), (".", "I-LOC")),
        *(("don", "O"), ("'", "O"), ("t", "O")),
    ]
    assert labelled.firsts.tolist() == [0, 1, 2, 5, 6, -1, 7, 11, -1]
    assert labelled.splits.tolist() == [0, 4, 8, 9]
    assert labelled.num_without_token == 2
    assert decoded(words.texts, tokens, labelled.labels) == [
        [(0, 4, "PER", "Anna"), (9, 18, "LOC", "Berliners")],
        [(6, 10, "LOC", "U.S.")],
        [],
    ]


def test_predicted_tags_stand_on_the_words_of_the_file(tokenizer):
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
    result = label_spans(BIO, texts, tokens, spans, VOCABULARY)
    assert named(tokens, result.tokens.labels) == [
        *(("i", "O"), ("met", "O"), ("anna", "B-PER"), ("'", "O")),
        *(("s", "O"), ("paris", "B-LOC"), ("/", "O"), ("london", "B-LOC"), ("!", "O")),
        *(("berlin", "B-LOC"), ("##er", None), ("##s", None), ("in", "O")),
        *(("new", "B-LOC"), ("york", "I-LOC"), ("the", "O")),
    ]
    assert (result.num_widened, result.num_lost) == (1, 0)
    assert decoded(texts, tokens, result.tokens.labels) == [
        [(6, 10, "PER", "Anna"), (13, 18, "LOC", "Paris"), (19, 25, "LOC", "London")],
        [],
        [(0, 9, "LOC", "Berliners"), (14, 22, "LOC", "New York")],
        [],
    ]
    assert result.tokens.splits.tolist() == [0, 9, 9, 13, 14]


def test_entities_that_share_a_basic_token_or_have_none(tokenizer):
    texts = ["BerlinAnna York", "a  b"]
    spans = [[(0, 6, "LOC"), (6, 10, "PER")], [(1, 3, "LOC")]]
    tokens = tokenizer.tokenize_with_offsets(texts)
    result = label_spans(BIO, texts, tokens, spans, VOCABULARY)
    assert (result.num_widened, result.num_lost) == (1, 2)
    assert decoded(texts, tokens, result.tokens.labels) == [[(0, 10, "LOC", "BerlinAnna")], []]
    # What is left of the second is its own.
    spans[0][1] = (6, 15, "PER")
    result = label_spans(BIO, texts, tokens, spans, VOCABULARY)
    assert (result.num_widened, result.num_lost) == (1, 1)
    assert decoded(texts, tokens, result.tokens.labels) == [
        [(0, 10, "LOC", "BerlinAnna"), (11, 15, "PER", "York")],
        [],
    ]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((3, 3, "LOC"), "a.jsonl:2: entity 3 to 3, wanted 0 <= start < end <= 12"),
        ((-1, 3, "LOC"), "entity -1 to 3, wanted"),
        ((9, 13, "LOC"), "entity 9 to 13, wanted"),
        ((0, 3, "ORG"), "a.jsonl:2: entity type 'ORG' is none of the task's: PER, LOC"),
        ((4, 6, "LOC"), "a.jsonl:2: entities 4 to 6 and 5 to 8 overlap"),
    ],
)
def test_spans_that_cannot_be_are_refused(span, message):
    good = [(5, 8, "LOC"), (0, 2, "PER")]
    assert check_spans(good, "twelve chars", BIO.types, "a.jsonl:2") == good[::-1]
    with pytest.raises(UserError, match=message):
        check_spans([*good, span], "twelve chars", BIO.types, "a.jsonl:2")


def test_the_answer_by_hand(tokenizer):
    """An I- begins an entity after O, after another type and at a text's start."""
    texts = ["Anna York Paris is, London", "Cafe\u0301 😀😀 東京"]
    tokens = tokenizer.tokenize_with_offsets(texts)
    windows = windows_of(tokens)
    labels_T = np.array([2, 4, 3, 0, 0, 4, 4, 0, 4, 2], np.int32)
    answer = entities(texts, windows, logits_of(windows, labels_T, 5), BIO, VOCABULARY)
    assert found(answer) == [
        [
            (0, 4, "PER", "Anna"),
            (5, 9, "LOC", "York"),
            (10, 15, "LOC", "Paris"),
            (20, 26, "LOC", "London"),
        ],
        [(0, 5, "LOC", "Cafe\u0301"), (9, 10, "LOC", "東"), (10, 11, "PER", "京")],
    ]
    for texts_of_row, row in zip(texts, found(answer), strict=True):
        assert all(texts_of_row[start:end] == text for start, end, _, text in row)


def test_the_score_is_the_mean_of_the_labels_probabilities(tokenizer):
    texts = ["new yorks !"]
    windows = windows_of(tokenizer.tokenize_with_offsets(texts))
    probabilities = np.full((1, 6, 5), 0.0)
    probabilities[0, :, :] = [0.96, 0.01, 0.01, 0.01, 0.01]
    probabilities[0, 1] = [0.1, 0.1, 0.1, 0.6, 0.1]
    probabilities[0, 2] = [0.05, 0.05, 0.05, 0.05, 0.8]
    probabilities[0, 3] = [0.0, 0.0, 1.0, 0.0, 0.0]  # ##s: nobody looks at it.
    answer = entities(texts, windows, np.log(probabilities + 1e-30), BIO, VOCABULARY)
    assert found(answer) == [[(0, 9, "LOC", "new yorks")]]
    np.testing.assert_allclose(answer["entity_score"], [[0.7]], rtol=1e-5)


def test_no_texts_empty_texts_and_no_entities(tokenizer):
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
        answer = entities(
            tf.constant(texts, tf.string), windows, logits_of(windows, labels_T, 5), BIO, VOCABULARY
        )
        assert {name: values.dtype for name, values in answer.items()} == dtypes
        assert answer["num_entities"].numpy().tolist() == [0] * len(texts)
        for name, values in answer.items():
            assert name == "num_entities" or values.shape == (len(texts), 0)


def test_bytes_that_are_no_utf8_count_as_python_counts_them(tokenizer):
    sent = b"\xff\xe6\x9d Anna \xc3 Paris\xf0\x9f"
    tokens = tokenizer.tokenize_with_offsets([sent])
    windows = windows_of(tokens)
    labels_T = np.where(np.isin(tokens.ids.flat_values, [VOCABULARY["anna"]]), 1, 0)
    labels_T[tokens.ids.flat_values.numpy() == VOCABULARY["paris"]] = 3
    answer = entities(
        tf.constant([sent]),
        windows,
        logits_of(windows, labels_T.astype(np.int32), 5),
        BIO,
        VOCABULARY,
    )
    text = sent.decode("utf-8", "replace")
    assert [(kind, text[start:end]) for start, end, kind, _ in found(answer)[0]] == [
        ("PER", "Anna"),
        ("LOC", "Paris"),
    ]


def random_text(rng):
    """A text with its (start, end, type): entities next to each other, at either end, in chunks."""
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
def test_spans_come_back_over_any_windows(tokenizer, sizes):
    rng = random.Random(5)
    texts, spans = zip(*(random_text(rng) for _ in range(150)), strict=True)
    tokens = tokenizer.tokenize_with_offsets(texts)
    result = label_spans(BIO, texts, tokens, spans, VOCABULARY)
    assert (result.num_widened, result.num_lost) == (0, 0)
    wanted = [
        [(start, end, kind, text[start:end]) for start, end, kind in of_text]
        for text, of_text in zip(texts, spans, strict=True)
    ]
    assert sum(map(len, wanted)) > 500
    assert decoded(texts, tokens, result.tokens.labels, **sizes) == wanted


def test_windows_may_come_in_any_order(tokenizer):
    texts = ["Anna in Paris, London", "", "I met the U.S. in New York"]
    spans = [
        [(0, 4, "PER"), (8, 13, "LOC"), (15, 21, "LOC")],
        [],
        [(10, 14, "LOC"), (18, 26, "LOC")],
    ]
    tokens = tokenizer.tokenize_with_offsets(texts)
    labels_T = label_spans(BIO, texts, tokens, spans, VOCABULARY).tokens.labels
    windows = windows_of(tokens, size=4, stride=2)
    order = np.random.default_rng(3).permutation(len(windows.owner_W))
    packed = Packed(*(tf.gather(column, order) for column in windows.packed))
    windows = Windows(packed, *(tf.gather(column, order) for column in windows[1:]))
    logits = logits_of(windows, labels_T, 5)
    np.testing.assert_array_equal(
        in_text_order(windows, logits).numpy().argmax(-1)[labels_T >= 0], labels_T[labels_T >= 0]
    )
    answer = found(entities(texts, windows, logits, BIO, VOCABULARY))
    assert [[entity[:3] for entity in row] for row in answer] == spans


def test_decoding_agrees_with_seqeval(tokenizer):
    """Any sequence of labels, on sentences whose words are one token each."""
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    rng = np.random.default_rng(1)
    sentences = [["paris"] * size for size in rng.integers(0, 12, 300)]
    tags = [" ".join(rng.choice(BIO.labels, len(words))) for words in sentences]
    words, tokens, labelled = from_words(tokenizer, sentences, tags)
    answer = decoded(words.texts, tokens, labelled.labels, size=5, stride=3)
    step = len("paris ")
    assert [
        [(kind, start // step, end // step) for start, end, kind, _ in row] for row in answer
    ] == [get_entities(of_text.split()) for of_text in tags]
    assert word_predictions(BIO, labelled.labels, labelled) == [of_text.split() for of_text in tags]


def test_it_is_a_graph_of_tensorflow_alone(tokenizer):
    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([None, None, 5])],
        autograph=False,
    )
    def answer(texts, logits):
        tokens = tokenizer.tokenize_with_offsets(texts)
        lengths = tokens.ids.row_lengths()
        packed = Packed(tokens.ids, tokens.ids, tokens.starts, tokens.ends)
        rows = tf.range(tf.size(lengths))
        is_best = tf.ones_like(tokens.ids, tf.bool)
        windows = Windows(packed, rows, tf.zeros_like(rows), tf.zeros_like(rows), is_best)
        return entities(texts, windows, logits, BIO, VOCABULARY)

    logits = np.zeros((2, 3, 5), np.float32)
    logits[0, 1, 3] = logits[1, 0, 1] = logits[1, 1, 2] = 9
    row = found(answer(tf.constant(["in Paris", "Anna-"]), logits))
    assert row == [[(3, 8, "LOC", "Paris")], [(0, 5, "PER", "Anna-")]]
    assert found(answer(tf.constant([], tf.string), np.zeros((0, 0, 5), np.float32))) == []
    operations = {
        node.op
        for function in answer.get_concrete_function().graph.as_graph_def().library.function
        for node in function.node_def
    } | {operation.type for operation in answer.get_concrete_function().graph.get_operations()}
    assert not [name for name in operations if "PyFunc" in name]


def read_columns(path):
    sentences, tags = [[]], [[]]
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            word, tag = line.strip().split("\t")
            sentences[-1].append(word)
            tags[-1].append(tag)
        elif sentences[-1]:
            sentences.append([])
            tags.append([])
    return sentences, [" ".join(of_text) for of_text in tags]


def test_all_entities_of_wnut17_come_back(data_dir):
    get_entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    sentences, tags = read_columns(data_dir / "ner" / "wnut17" / "wnut17train.conll")
    bio = BioLabels.of_types(
        sorted({entity_type(tag, "") for of_text in tags for tag in of_text.split()} - {None})
    )
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    tokenizer = Tokenizer(vocabulary, do_lower_case=True)
    words, tokens, labelled = from_words(tokenizer, sentences, tags, bio)
    wanted = []
    for row, (text, of_text) in enumerate(zip(words.texts, tags, strict=True)):
        starts = words.starts[words.splits[row] : words.splits[row + 1]]
        ends = starts + [len(word) for word in sentences[row]]
        wanted.append(
            [
                (int(starts[first]), int(ends[last]), kind, text[starts[first] : ends[last]])
                for kind, first, last in get_entities(of_text.split())
            ]
        )
    assert sum(map(len, wanted)) > 1900
    windows = {"size": 20, "stride": 12}
    assert decoded(words.texts, tokens, labelled.labels, bio, vocabulary, **windows) == wanted
    predictions_T = np.where(labelled.labels >= 0, labelled.labels, 0)
    assert word_predictions(bio, predictions_T, labelled) == [of_text.split() for of_text in tags]
