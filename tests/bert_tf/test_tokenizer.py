"""The tokenizer against the released rules: literals, every code point, context, conformance."""

import functools
import itertools
import json
import random
import sys
import unicodedata

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, Vocabulary
from bert_tf.text import unicode_tables
from tests import small, tokenization
from tests.conftest import WORDS

SPECIALS = WORDS[:5]
JAMO = ("\u1112", "##\u1161", "##\u11ab", "##\u1100")
GREEK = ("οδος", "οδοσ", "σ", "ς", "α", "'", "##σ", "##ς")
# Building the graphs of a tokenizer takes a second or two, so most tests share those of one.
VOCABULARY = Vocabulary([*WORDS, *JAMO, *GREEK, "Bill", "Café", "café", "Cafe", "é", "##é", "##a"])
cached_tokenizer = functools.cache(Tokenizer)


def covered(text, vocabulary=VOCABULARY, do_lower_case=True, strip_accents=None):
    """Return [(entry, the characters it covers)] for one text."""
    tokenizer = cached_tokenizer(vocabulary, do_lower_case, strip_accents)
    tokens = tokenizer.tokenize_with_offsets(tf.constant([text]))
    if strip_accents is None:  # Otherwise the second graph would be built for one text.
        np.testing.assert_array_equal(tokens.ids[0], tokenizer.tokenize(tf.constant([text])).ids[0])
    characters = text if isinstance(text, str) else text.decode("utf-8", "replace")
    parts = zip(*(part[0].numpy() for part in tokens[:3]), strict=True)
    return [(vocabulary.entries[i], characters[start:end]) for i, start, end in parts]


def all_ids(tokenizer, texts):
    """Return the ids of many texts, one list per text."""
    tokenize = tf.function(
        lambda texts: tokenizer.tokenize(texts).ids,
        input_signature=[tf.TensorSpec([None], tf.string)],
        autograph=False,
    )
    return [
        row
        for start in range(0, len(texts), 32768)
        for row in tokenize(tf.constant(texts[start : start + 32768])).to_list()
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable!", [("un", "un"), ("##aff", "aff"), ("##able", "able"), ("!", "!")]),
        (
            "The BILL,  open?",
            [("the", "The"), ("bill", "BILL"), (",", ","), ("open", "open"), ("?", "?")],
        ),
        ("Café bill", [("cafe", "Café"), ("bill", "bill")]),
        (
            "Cafe\u0301 bill",
            [("cafe", "Cafe\u0301"), ("bill", "bill")],
        ),  # The accent is a separate code point.
        ("\u0301a\u0301\u0323 b", [("a", "a\u0301\u0323"), ("b", "b")]),
        ("a中b", [("a", "a"), ("中", "中"), ("b", "b")]),
        (
            "bi\u00adll b\u200dill",
            [("bill", "bi\u00adll"), ("bill", "b\u200dill")],
        ),  # Format characters are removed.
        ("\u200dbill\u200d a", [("bill", "bill"), ("a", "a")]),
        (
            "\U0001f469\u200d\U0001f680 bill",
            [("[UNK]", "\U0001f469\u200d\U0001f680"), ("bill", "bill")],
        ),
        (
            "\U0001f1e9\U0001f1ea\U0001f600!",
            [("[UNK]", "\U0001f1e9\U0001f1ea\U0001f600"), ("!", "!")],
        ),
        (b"a \xff\xfe bill", [("a", "a"), ("bill", "bill")]),
        (b"a\xf0\x9f bill\xe2\x82", [("a", "a"), ("bill", "bill")]),
        (b"bi\x00ll\x07", [("bill", "bi\x00ll")]),
        ("the\u2028bill\u00a0a\u3000b", [("the", "the"), ("bill", "bill"), ("a", "a"), ("b", "b")]),
        ("xyz", [("[UNK]", "xyz")]),
        ("[MASK] the", [("[UNK]", "["), ("[UNK]", "MASK"), ("[UNK]", "]"), ("the", "the")]),
        ("", []),
        (" \t\n\u200d\u0301", []),
    ],
)
def test_tokens_and_the_characters_they_cover(text, expected):
    assert covered(text) == expected


def test_hangul_is_decomposed_and_each_piece_covers_its_syllable():
    """Decompose a syllable to two or three jamo; a piece may end inside of it."""
    assert covered("\ud55c\uac00") == [
        ("\u1112", "\ud55c"),
        ("##\u1161", "\ud55c"),
        ("##\u11ab", "\ud55c"),
        ("##\u1100", "\uac00"),
        ("##\u1161", "\uac00"),
    ]


def test_an_entry_that_no_text_contains_is_no_token_of_a_word_that_is_too_long():
    tokenizer = Tokenizer(Vocabulary([*SPECIALS, "\ufffd", "ä", "b"]), do_lower_case=False)
    tokens = tokenizer.tokenize_with_offsets(tf.constant(["é" * 201, "ä b"]))
    assert [part.to_list() for part in tokens[:3]] == [
        [[1], [6, 7]],
        [[0], [0, 2]],
        [[201], [1, 3]],
    ]


def test_sigma_is_final_where_python_makes_it_final():
    assert covered("ΟΔΟΣ ΟΔΟΣ' Σ Α'Σ") == [
        ("οδος", "ΟΔΟΣ"),
        ("οδος", "ΟΔΟΣ"),
        ("'", "'"),
        ("σ", "Σ"),
        ("α", "Α"),
        ("'", "'"),
        ("ς", "Σ"),
    ]


@pytest.mark.slow
def test_marks_are_reordered_canonically():
    """Use U+1D165 (class 216) and U+302E (224), which are not Mn and therefore are kept."""
    vocabulary = Vocabulary([*SPECIALS, "a\U0001d165\u302e", "##\u302e"])
    for text in (
        "a\U0001d165\u302e",
        "a\u302e\U0001d165",
        "a\u302e\u0301\U0001d165",
        "a\u302e\u200d\U0001d165",
    ):
        assert [entry for entry, _ in covered(text, vocabulary)] == ["a\U0001d165\u302e"]
    # A stripped mark of class 0 between them blocks the reordering.
    assert [entry for entry, _ in covered("a\u302e\u0941\U0001d165", vocabulary)] == ["[UNK]"]


def test_cased_text_keeps_case_and_accents():
    assert covered("Bill bill Café", do_lower_case=False) == [
        ("Bill", "Bill"),
        ("bill", "bill"),
        ("Café", "Café"),
    ]
    assert covered("Café", strip_accents=False) == [("café", "Café")]
    stripped = covered("Bill Café", do_lower_case=False, strip_accents=True)
    assert stripped == [("Bill", "Bill"), ("Cafe", "Café")]


def test_words_of_200_characters_have_pieces_and_longer_ones_are_unknown():
    tokenizer = cached_tokenizer(VOCABULARY, False, None)
    ids = tokenizer.tokenize(tf.constant(["é" * 200, "é" * 201, "a" * 200, "a" * 201])).ids
    assert ids.row_lengths().numpy().tolist() == [200, 1, 200, 1]
    assert ids[1].numpy().tolist() == ids[3].numpy().tolist() == [VOCABULARY["[UNK]"]]


def test_empty_batches_and_a_megabyte_are_tokenized():
    tokenizer = cached_tokenizer(VOCABULARY, True, None)
    for texts in ([], [""], ["", ""]):
        tokens = tokenizer.tokenize_with_offsets(tf.constant(texts, tf.string))
        assert (
            tokens.ids.to_list()
            == tokens.starts.to_list()
            == tokens.ends.to_list()
            == [[] for _ in texts]
        )
    tokens = tokenizer.tokenize_with_offsets(
        tf.constant(["bill " * 200_000, "a" * 1_000_000, "\u0301" * 500_000, "bill"])
    )
    np.testing.assert_array_equal(tokens.ids.row_lengths(), [200_000, 1, 0, 1])
    assert (tokens.starts[0][-1], tokens.ends[0][-1]) == (999_995, 999_999)
    assert (tokens.starts[1][0], tokens.ends[1][0]) == (0, 1_000_000)


def test_tokens_of_a_text_do_not_depend_on_its_batch():
    texts = [
        "Σ",
        "ΑΣ",
        "\u0301",
        "\u302e",
        "\U0001d165",
        "a",
        "中",
        " ",
        "\ud55c",
        b"\xe2\x82".decode("latin1"),
        "bill",
    ]
    tokenizer = cached_tokenizer(VOCABULARY, True, None)
    for order in (texts, texts[::-1], [text for text in texts for _ in range(2)]):
        together = tokenizer.tokenize_with_offsets(tf.constant(order))
        for row, text in enumerate(order):
            alone = tokenizer.tokenize_with_offsets(tf.constant([text]))
            for actual, expected in zip(together[:3], alone[:3], strict=True):
                assert actual[row].numpy().tolist() == expected[0].numpy().tolist(), text


def character_vocabulary(texts, do_lower_case):
    """Return a vocabulary of all characters of the normalized texts, so that no id is [UNK]."""
    characters = sorted(
        {
            character
            for text in texts
            for word in tokenization.words(text, do_lower_case)
            for character in word
        }
    )
    return Vocabulary([*SPECIALS, *characters, *("##" + character for character in characters)])


def assert_as_the_reference(texts, do_lower_case):
    vocabulary = character_vocabulary(texts, do_lower_case)
    ids = {entry: number for number, entry in enumerate(vocabulary.entries)}
    for text, actual in zip(
        texts, all_ids(Tokenizer(vocabulary, do_lower_case), texts), strict=True
    ):
        assert actual == tokenization.tokenize(text, ids, do_lower_case), ascii(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "do_lower_case",
    [
        pytest.param(True, id="uncased"),
        pytest.param(False, id="cased", marks=pytest.mark.slow),
    ],
)
def test_every_assigned_code_point_alone_inside_and_next_to_letters(do_lower_case):
    assigned = filter(tokenization.is_assigned, map(chr, range(sys.maxunicode + 1)))
    assert_as_the_reference(
        [f"{character} a{character}b {character}a" for character in assigned], do_lower_case
    )


@pytest.mark.parametrize("do_lower_case", [True, False], ids=["uncased", "cased"])
def test_random_strings_of_characters_with_context(do_lower_case):
    """Draw sigmas, transparent and decomposable characters, marks of all classes, removed ones."""
    pool = (
        "Σσςa1B.'\u00b7\u2019:- "
        "\u3000\t\u200d\u00ad\u0345\u02b0\u0301\u0323\u0327\u0941\u093f\u302e\u302f\u1b44\u0bca\ud55c\uac00\u1112"
        "\u0130I\u00df\u1e9e中\uf900\u2260\u1fef\ufffd\0\x1c\u2028\U0001d165\U0001d16d\U0001d160\U00016ff0\U0001f600"
    )
    rng = random.Random(0)
    assert_as_the_reference(
        ["".join(rng.choices(pool, k=rng.randint(1, 12))) for _ in range(20_000)], do_lower_case
    )


# Among them entries that no word contains, which may not match across spaces and punctuation.
ASCII_ENTRIES = (
    "a", "b", "##a", "##b", "ab", "##ab", "A", "##B", "1", "##1a", "#", "##", "###", "-", "--",
    "##-", "a-b", "a b", "a\tb", "'", "'s", "##'s", "a.b", "##.", " ", "[", "$$", "the", "##e",
)  # fmt: skip


@pytest.mark.parametrize("do_lower_case", [True, False], ids=["uncased", "cased"])
@pytest.mark.parametrize("count", small.fast([20_000, 97_000], 20_000))
def test_random_ascii_strings_with_control_characters(do_lower_case, count):
    vocabulary = Vocabulary([*SPECIALS, *ASCII_ENTRIES])
    rng = random.Random(0)
    pools = (
        "".join(map(chr, range(128))),
        "".join(map(chr, range(32, 127))) + "\t\n\r",
        "abAB .'#-$[1\t",
    )
    texts = ["".join(rng.choices(rng.choice(pools), k=rng.randint(0, 24))) for _ in range(count)]
    texts += [" ".join(rng.choices(vocabulary.entries, k=8)) for _ in range(2_000)]
    long_words = itertools.product("aB1", range(198, 204), " .-a")
    texts += [letter * length + last for letter, length, last in long_words]
    tokenizer = Tokenizer(vocabulary, do_lower_case)
    ids = {entry: number for number, entry in enumerate(vocabulary.entries)}
    tokens = tokenizer.tokenize_with_offsets(tf.constant(texts))
    for text, actual in zip(texts, tokens.ids.to_list(), strict=True):
        assert actual == tokenization.tokenize(text, ids, do_lower_case), ascii(text)
    # Beside a text of other characters and alone, through either path, texts have equal offsets.
    mixed = tokenizer.tokenize_with_offsets(tf.constant([text + "\u3000" for text in texts]))
    for actual, expected in zip(tokens[:3], mixed[:3], strict=True):
        np.testing.assert_array_equal(actual.row_splits, expected.row_splits)
        np.testing.assert_array_equal(actual.flat_values, expected.flat_values)


@pytest.mark.slow
def test_the_tables_equal_the_unicode_data_of_python():
    """Compare all code points with Python's own; only later additions to Unicode may differ."""
    is_same_version = unicodedata.unidata_version == unicode_tables.unicode_version()
    for case in ((True, True), (False, False)):  # Uncased and cased, as released.
        ours, made = unicode_tables.load(*case), unicode_tables.compute(*case)
        for index, pages in (("index", "pages"), ("case_index", "case_pages")):
            values = [
                unicode_tables.expand(getattr(tables, index), getattr(tables, pages))
                for tables in (ours, made)
            ]
            different = map(chr, np.flatnonzero(values[0] != values[1]))
            assert not [ascii(text) for text in different if tokenization.is_assigned(text)]
        if is_same_version:
            for name, array in vars(ours).items():
                np.testing.assert_array_equal(array, getattr(made, name), err_msg=name)


@pytest.mark.parametrize("name", ["uncased", "cased"])
@pytest.mark.parametrize("kind", ["multilingual", "random"])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.medium)])
def test_ids_equal_the_released_ids(data_dir, name, kind, step):
    """Compare with the released code: 91,270 lines of 380 languages, 100,000 hard strings."""
    if kind == "multilingual":
        texts = (
            (data_dir / "multilingual" / "all_lines.txt").read_bytes().decode("utf-8").split("\n")
        )
    else:
        texts = json.loads(
            (data_dir / "conformance" / "random_strings.json").read_text(encoding="utf-8")
        )
    with np.load(data_dir / "conformance" / f"{kind}_ids_{name}.npz") as released:
        ids, lengths = released["ids"], released["lengths"]
    vocabulary = Vocabulary.load(data_dir / "vocab" / name / "vocab.txt")
    assert len(lengths) in (91_270, 100_000)
    actual = all_ids(Tokenizer(vocabulary, name == "uncased"), texts[: len(lengths) : step])
    expected = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])[::step]]
    assert [
        number
        for number, pair in enumerate(zip(actual, expected, strict=True))
        if pair[0] != pair[1]
    ] == []


def test_ids_of_the_reference_equal_the_released_ids(data_dir):
    """Check a sample of the slow reference, which the tests above compare with."""
    texts = json.loads(
        (data_dir / "conformance" / "random_strings.json").read_text(encoding="utf-8")
    )
    for name in ("uncased", "cased"):
        ids = {
            entry: number
            for number, entry in enumerate(
                Vocabulary.load(data_dir / "vocab" / name / "vocab.txt").entries
            )
        }
        with np.load(data_dir / "conformance" / f"random_ids_{name}.npz") as released:
            expected = np.split(released["ids"], np.cumsum(released["lengths"])[:-1])
        for number in range(0, len(texts), 25):
            assert (
                tokenization.tokenize(texts[number], ids, name == "uncased")
                == expected[number].tolist()
            ), ascii(texts[number])
