"""Instances: a small corpus checked by hand, and real text against the released rules."""

import itertools
import random

import numpy as np
import pytest

from bert_tf import UserError, Vocabulary
from bert_tf.data import instances as module
from bert_tf.data.instances import TokenizedDocuments, make_instances, to_examples
from tests.google_instances import instances_of, truncate

SETTINGS = {"max_seq_length": 128, "short_seq_prob": 0.1, "dupe_factor": 1, "seed": 7}


def tokenized(documents):
    """Convert lists of documents, sentences and token ids to `TokenizedDocuments`."""
    sentences = [sentence for document in documents for sentence in document]
    return TokenizedDocuments(
        np.array([token for sentence in sentences for token in sentence], np.int32),
        np.cumsum([0, *map(len, sentences)]),
        np.cumsum([0, *map(len, documents)]),
    )


def segments(instances, ids):
    """Return [(tokens of A, tokens of B, whether B is random)]."""
    return [
        (ids[a:b].tolist(), ids[c:d].tolist(), bool(is_random))
        for a, b, c, d, is_random in zip(
            instances.a_begin,
            instances.a_end,
            instances.b_begin,
            instances.b_end,
            instances.is_random_next,
            strict=True,
        )
    ]


# Five documents of four sentences of three tokens. Digits of a token: document, sentence, index.
TWENTY = [
    [[100 * document + 10 * sentence + position for position in range(3)] for sentence in range(4)]
    for document in range(1, 6)
]


def scripted(monkeypatch, draws):
    """Make random.Random(...).random() return `draws` in order."""
    values = iter(draws)
    monkeypatch.setattr(random.Random, "random", lambda self: next(values))


def test_instances_of_twenty_lines_follow_scripted_draws(monkeypatch):
    # The budget is 3 + 9 tokens: three sentences per chunk.
    # Not short. Of sentences 0 to 2, A is the first; B is the actual continuation.
    first = [0.9, 0.0, 0.7]
    # Sentence 3 is alone, so its B is random without a draw:
    # the third of four other documents is document 4, starting at its second sentence.
    first += [0.5, 0.3]
    second = [0.9, 0.99, 0.2]  # A has two sentences; B is random:
    second += [0.0, 0.99]  # the last sentence of document 1. Sentence 2 is put back.
    second += [0.0, 0.6]  # Of sentences 2 and 3, A is the first; B follows.
    # Three draws of the target: short, 2 + int(0.2 * 8) = 3 tokens, so one sentence per chunk.
    third = [0.05, 0.2]
    third += [0.0, 0.0] * 4  # B is the first sentence of document 1, four times.
    rest = [0.9, 0.0, 0.7, 0.0, 0.0] * 2
    scripted(monkeypatch, first + second + third + rest)
    documents = tokenized(TWENTY)
    made = make_instances(documents, **{**SETTINGS, "max_seq_length": 12})
    expected = [
        ([110 - 10 + p for p in range(3)], [110, 111, 112, 120, 121, 122], False),
        ([130, 131, 132], [410, 411, 412, 420, 421, 422], True),
        ([200, 201, 202, 210, 211, 212], [130, 131, 132], True),
        ([220, 221, 222], [230, 231, 232], False),
        *[([300 + 10 * s + p for p in range(3)], [100, 101, 102], True) for s in range(4)],
        *[
            pair
            for d in (400, 500)
            for pair in (
                ([d, d + 1, d + 2], [d + 10 + 10 * s + p for s in (0, 1) for p in range(3)], False),
                ([d + 30, d + 31, d + 32], [100, 101, 102, 110, 111, 112], True),
            )
        ],
    ]
    assert sorted(segments(made, documents.ids)) == sorted(expected)


def test_an_example_has_the_released_layout():
    vocabulary = Vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    one = np.array([0])
    made = module.Instances(one + 1, one + 3, one + 5, one + 6, one.astype(bool))
    ids = np.arange(10, 20, dtype=np.int32)
    examples = to_examples(made, ids, vocabulary, 8)
    assert examples["input_ids"].tolist() == [[2, 11, 12, 3, 15, 3, 0, 0]]
    assert examples["input_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert examples["segment_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert examples["next_sentence_labels"].tolist() == [[0]]


def test_pairs_are_truncated_like_the_released_code():
    """Check the tokens kept for every pair of lengths; a fair coin decides which end loses one."""
    for length_a, length_b in itertools.product(range(1, 12), repeat=2):
        a, b = list(range(length_a)), list(range(length_b))
        truncate(a, b, 9, random.Random(0))
        zeros = np.zeros(400, np.int64)
        pairs = module.Instances(zeros, zeros + length_a, zeros, zeros + length_b, zeros)
        cut = module._truncate(pairs, 9, np.random.default_rng(1))
        assert set(cut.a_end - cut.a_begin) == {len(a)}
        assert set(cut.b_end - cut.b_begin) == {len(b)}
        for begin, end, length in (
            (cut.a_begin, cut.a_end, length_a),
            (cut.b_begin, cut.b_end, length_b),
        ):
            lost = length - (end - begin)[0]
            assert begin.min() >= 0 and end.max() <= length
            assert abs(begin.mean() - lost / 2) <= 5 * (lost / 4 / 400) ** 0.5


def test_a_random_next_sentence_is_from_another_document_unless_configured():
    documents = tokenized(TWENTY[:2])
    made = make_instances(documents, **{**SETTINGS, "dupe_factor": 200, "short_seq_prob": 0.5})
    pairs = segments(made, documents.ids)
    assert {a[0] // 100 == b[0] // 100 for a, b, is_random in pairs if is_random} == {False}
    assert {a[0] // 100 == b[0] // 100 for a, b, is_random in pairs if not is_random} == {True}
    alone = tokenized(TWENTY[:1])
    with pytest.raises(UserError, match="1 documents with tokens, expected at least 2"):
        make_instances(alone, **SETTINGS)
    released = make_instances(alone, **{**SETTINGS, "seed": 2}, same_document_next=True)
    assert released.is_random_next.any()


def test_seeds_and_duplicates_differ_and_are_reproducible():
    documents = tokenized(TWENTY)
    one, again, other = (
        segments(make_instances(documents, **{**SETTINGS, "seed": seed}), documents.ids)
        for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.fixture(scope="module")
def novels(data_dir):
    """Return 150 documents of real text, whose "tokens" are numbered words."""
    text = (data_dir / "text" / "books.txt").read_text(encoding="utf-8")[:3_000_000]
    documents, number = [], 0
    for part in text.split("\n\n")[:150]:
        documents.append([])
        for line in part.split("\n"):
            words = len(line.split())
            if words:
                documents[-1].append(list(range(number, number + words)))
                number += words
    return [document for document in documents if document]


@pytest.mark.slow
def test_instances_of_real_text_are_distributed_like_the_released_rules(novels):
    documents, rng = tokenized(novels), random.Random(3)
    settings = {**SETTINGS, "short_seq_prob": 0.0, "dupe_factor": 20}
    made = segments(make_instances(documents, **settings), documents.ids)
    released = [
        instance
        for _ in range(20)
        for index in range(len(novels))
        for instance in instances_of(novels, index, rng, 128, 0.0)
    ]
    assert abs(len(made) / len(released) - 1) < 0.01
    for name, of in {
        "length": lambda a, b, is_random: len(a) + len(b),
        "length of A": lambda a, b, is_random: len(a),
        "full": lambda a, b, is_random: len(a) + len(b) == 125,
        "random": lambda a, b, is_random: is_random,
        "length of a random B": lambda a, b, is_random: len(b) * is_random,
        "single tokens": lambda a, b, is_random: len(a) == 1,
        "where A begins": lambda a, b, is_random: a[0] / documents.ids[-1],
        "where B begins": lambda a, b, is_random: b[0] / documents.ids[-1],
    }.items():
        ours, theirs = (
            np.array([of(*pair) for pair in pairs], float) for pairs in (made, released)
        )
        # Examples of one document are correlated, so the tolerance is twice the deviation.
        error = (ours.var() / len(ours) + theirs.var() / len(theirs)) ** 0.5
        assert abs(ours.mean() - theirs.mean()) < 2 * 4 * error, name
        assert abs(ours.std() / theirs.std() - 1) < 0.03, name


def test_a_tenth_of_the_documents_is_shortened_to_a_uniform_length():
    rng = random.Random(5)
    targets = np.array([module._target(125, 0.1, rng.random) for _ in range(200_000)])
    short = targets[targets != 125]
    # A short target is of 125 tokens as well, once in 124 draws.
    assert abs(len(short) / len(targets) - 0.1 * 123 / 124) < 5 * (0.1 * 0.9 / len(targets)) ** 0.5
    counts = np.bincount(short, minlength=126)[2:125]
    assert counts.min() > 0 and counts.sum() == len(short)
    expected = len(short) / 123
    # Chi-squared statistic.
    assert ((counts - expected) ** 2 / expected).sum() < 123 + 5 * (2 * 123) ** 0.5


def test_segments_of_real_text_are_contiguous_within_documents(novels):
    documents = tokenized(novels)
    made = make_instances(documents, **{**SETTINGS, "dupe_factor": 3})
    starts = documents.sentence_splits[documents.document_splits]
    owner = np.searchsorted(starts, documents.ids, side="right")
    follows = 0
    for a, b, is_random in segments(made, documents.ids):
        for part in (a, b):
            assert part == list(range(part[0], part[0] + len(part)))  # The tokens are consecutive.
            assert owner[part[0]] == owner[part[-1]]
        assert (owner[a[0]] == owner[b[0]]) != is_random
        follows += not is_random and b[0] == a[-1] + 1
    assert follows > 100  # B starts where A ends, unless a truncation lies between them.
