"""Excerpts of long texts, whose tokens equal those of the complete text."""

import json
import random
import unicodedata

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, Vocabulary
from bert_tf.text import tokenizer as tokenizer_module
from bert_tf.text import unicode_tables
from bert_tf.text.encoder_inputs import pack
from bert_tf.text.tokenizer import Tokens, tokenize_masked
from tests.conftest import WORDS

LETTERS = [*map(chr, range(97, 123)), *"\u0301\u03c3\uac00\u0131\u4e2d"]
VOCABULARY = Vocabulary(
    list(dict.fromkeys([*WORDS, *(f"##{letter}" for letter in LETTERS), *LETTERS[:26]]))
)
# Characters with context: marks, sigmas, transparent characters, long words, invalid bytes.
UNITS = [
    *("a", "the bill", " ", "\n", "!", "-", "'", ".", "A\u03a3", "\u03a3", "\u03a3'", "'\u03a3a"),
    *(
        "\u0301",
        "\u0323\u0301",
        "\u0344",
        "\uac00",
        "\u4e2d",
        "\u5b57",
        "\u9fff",
        "\u3042",
        "\u4dc0",
    ),
    *("\U00020000", "\U0001f600", "\u00ad", "\u200d", "\u2028", "\x00", "x" * 70, "[MASK]", "["),
    *(b"\xff", b"\xe5", b"\xe5\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80"),
]
MODES = ("head", "tail", "head_tail")


def random_texts(count, seed):
    rng = random.Random(seed)
    texts = [b"", b" " * 300, b"a" * 300, "\u0301".encode() * 300, b"!" * 300, b"\xe5" * 300]
    for _ in range(count):
        units = rng.sample(UNITS, rng.randint(1, 6))
        chosen = rng.choices(units, k=rng.randint(0, 120))
        texts.append(b"".join(u if isinstance(u, bytes) else u.encode() for u in chosen))
    return texts


@pytest.fixture(
    params=[
        (True, None),
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ((False, None), (True, False), (False, True))
        ),
    ]
)
def tokenizer(request):
    return Tokenizer(VOCABULARY, *request.param)


def assert_same_ends(tokenize, texts, monkeypatch, max_tokens=6, reach=24):
    """Compare each mode, with small steps and a small reach so that every branch is taken."""
    monkeypatch.setattr(tokenizer_module, "BYTES_PER_TOKEN", 2)
    monkeypatch.setattr(tokenizer_module, "REACH", reach)
    traced = tf.function(
        lambda texts: [
            tokenize(texts),
            *(tokenizer_module.tokenize_ends(tokenize, texts, max_tokens, mode) for mode in MODES),
        ],
        input_signature=[tf.TensorSpec([None], tf.string)],
        autograph=False,
    )
    complete, *ends = traced(tf.constant(texts, tf.string))
    read = dict(zip(MODES, ends, strict=True))
    for mode in MODES:
        reference, actual = (
            pack([tokens], VOCABULARY, max_tokens + 2, mode) for tokens in (complete, read[mode])
        )
        for name in ("input_ids", "starts", "ends"):
            expected, found = getattr(reference, name), getattr(actual, name)
            if expected is None:
                assert found is None
                continue
            np.testing.assert_array_equal(found.row_splits, expected.row_splits)
            np.testing.assert_array_equal(found.flat_values, expected.flat_values, err_msg=mode)
    return complete, read


@pytest.mark.slow
def test_random_texts_have_the_tokens_of_the_complete_text(tokenizer, monkeypatch):
    texts = random_texts(500, seed=1)
    complete, read = assert_same_ends(tokenizer.tokenize_with_offsets, texts, monkeypatch)
    for mode in MODES:  # The excerpt is shorter than the text.
        assert len(read[mode].ids.flat_values) < 0.9 * len(complete.ids.flat_values)


@pytest.mark.slow
def test_conformance_strings_have_the_tokens_of_the_complete_text(data_dir, monkeypatch):
    strings = json.loads((data_dir / "conformance" / "random_strings.json").read_text())
    rng = random.Random(0)
    texts = ["".join(rng.sample(strings, 3)).encode("utf-8", "surrogatepass") for _ in range(2000)]
    tokenizer = Tokenizer(VOCABULARY, True)
    assert_same_ends(tokenizer.tokenize_with_offsets, texts, monkeypatch, max_tokens=10)


@pytest.mark.slow
def test_literal_masks_are_never_split(monkeypatch):
    tokenizer = Tokenizer(VOCABULARY, True)

    def tokenize(texts):
        return tokenize_masked(texts, tokenizer.tokenize, VOCABULARY)

    texts = [*random_texts(300, seed=2), b"[MASK]" * 40, b"[MASK] a]" * 40, b"x[MASK]]" * 40]
    assert_same_ends(tokenize, texts, monkeypatch)


def test_texts_are_tokenized_again_only_if_a_long_one_has_too_few_tokens():
    seen = []

    def tokenize(texts):
        seen.append([len(text) for text in texts.numpy()])
        words = tf.strings.split(texts)
        return Tokens(words.with_values(tf.ones_like(words.flat_values, tf.int32)))

    texts = tf.constant(["a b", "ab " * 400, " " * 900 + "ab " * 400])
    tokenizer_module.tokenize_ends(tokenize, texts[:1], 10)
    assert seen == [[3]]
    seen.clear()
    tokens = tokenizer_module.tokenize_ends(tokenize, texts, 10)
    # For one text 160 bytes suffice; of the other, 640 are too few, and 2,560 exceed its length.
    assert seen == [[3, 158, 160], [3, 158, 640], [3, 158, 2100]]
    assert tokens.ids.row_lengths().numpy().tolist()[::2] == [2, 400]


@pytest.mark.medium
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_offsets", [False, True])
def test_the_loop_in_a_graph_reads_as_much_as_without_a_graph(mode, with_offsets):
    def tokenize(texts):
        words = tf.strings.split(texts)
        lengths = words.with_values(tf.strings.length(words.flat_values))
        return Tokens(lengths, lengths - 1, lengths) if with_offsets else Tokens(lengths)

    def read(texts):
        return tokenizer_module.tokenize_ends(tokenize, texts, 10, mode)

    texts = tf.constant(["a b", "ab " * 400, " " * 900 + "abc " * 400 + " " * 900, ""])
    traced = tf.function(read, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
    for some in (texts, texts[:1], texts[1:3], texts[:0]):
        expected, actual = read(some), traced(some)
        assert actual.ids.to_list() == expected.ids.to_list()
        assert (actual.starts is None) == (not with_offsets)
        if with_offsets:
            assert actual.starts.to_list() == expected.starts.to_list()
            assert actual.ends.to_list() == expected.ends.to_list()
    assert 20 <= len(read(texts).ids[2]) <= 400


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False])
def test_characters_that_allow_a_cut_separate_words_and_are_not_transparent(lower, strip):
    tables = unicode_tables.load(lower, strip)
    kinds = unicode_tables.expand(tables.index, tables.pages) & (1 << unicode_tables.KIND_BITS) - 1
    cases = unicode_tables.expand(tables.case_index, tables.case_pages)
    first, last = (ord(bytes([lead, 0x80, 0x80]).decode()) for lead in tokenizer_module.IDEOGRAPHS)
    codes = [*tokenizer_module.CUT_BEFORE, *range(first, last + 0x1000)]
    assert (first, codes[-1]) == (0x5000, 0x9FFF)
    assert set(kinds[codes]) <= {unicode_tables.SPACE, unicode_tables.ALONE}
    assert set(cases[codes]) == {unicode_tables.UNCASED}
    assert not any(unicodedata.combining(chr(code)) for code in codes)
