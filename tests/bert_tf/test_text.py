"""Vocabulary, tokenizer and packing, on literals small enough to check by hand."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary, pack
from bert_tf.text.packing import padded
from bert_tf.text.tokenizer import Tokens
from tests.conftest import WORDS


def tokenize(text, vocabulary, do_lower_case=True):
    """[(entry, the characters that it covers)] of one text."""
    tokenizer = Tokenizer(vocabulary, do_lower_case)
    ids, starts, ends = tokenizer.tokenize_with_offsets(tf.constant([text]))
    np.testing.assert_array_equal(ids[0], tokenizer.tokenize(tf.constant([text])).ids[0])
    characters = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return [
        (vocabulary.entries[i], characters[start:end])
        for i, start, end in zip(*(part[0].numpy() for part in (ids, starts, ends)), strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
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
        ),  # The accent as a code point of its own.
        ("a中b", [("a", "a"), ("中", "中"), ("b", "b")]),
        ("\U0001f600 bill", [("[UNK]", "\U0001f600"), ("bill", "bill")]),
        (b"a \xff\xfe bill", [("a", "a"), ("bill", "bill")]),
        ("xyz", [("[UNK]", "xyz")]),
        ("", []),
        (" \t\n ", []),
    ],
)
def test_tokens_and_the_characters_they_cover(vocabulary, text, wanted):
    got = tokenize(text, vocabulary)
    if isinstance(
        text, bytes
    ):  # What stands for undecodable bytes is a token or not; the rest has to be found behind it.
        got = [pair for pair in got if pair[0] != "[UNK]"]
    assert got == wanted


def test_cased_text_keeps_case_and_accents():
    vocabulary = Vocabulary([*WORDS, "Bill", "Café"])
    assert tokenize("Bill bill Café", vocabulary, do_lower_case=False) == [
        ("Bill", "Bill"),
        ("bill", "bill"),
        ("Café", "Café"),
    ]


def test_batches_of_none_and_a_megabyte(vocabulary):
    tokenizer = Tokenizer(vocabulary, True)
    assert tokenizer.tokenize_with_offsets(tf.constant([], tf.string)).ids.shape[0] == 0
    tokens = tokenizer.tokenize_with_offsets(
        tf.constant(["bill " * 200_000, "a" * 1_000_000, "bill"])
    )
    np.testing.assert_array_equal(tokens.ids.row_lengths(), [200_000, 1, 1])
    assert (tokens.starts[0][-1], tokens.ends[0][-1]) == (999_995, 999_999)


def test_accents_against_the_case_are_refused(vocabulary):
    with pytest.raises(
        UserError, match="strip_accents=False with do_lower_case=True is not supported"
    ):
        Tokenizer(vocabulary, True, strip_accents=False)


def ragged(*rows):
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def test_pack_of_one_and_of_two_segments(vocabulary):
    a, b = (
        Tokens(ragged([5, 6], [], [5, 6, 7, 8, 9])),
        Tokens(ragged([7], [10, 11], [10, 11, 12, 13, 14])),
    )
    inputs = padded(pack([a, b], vocabulary, 8), vocabulary)
    np.testing.assert_array_equal(
        inputs["input_ids"],
        [[2, 5, 6, 3, 7, 3, 0, 0], [2, 3, 10, 11, 3, 0, 0, 0], [2, 5, 6, 7, 3, 10, 11, 3]],
    )
    np.testing.assert_array_equal(
        inputs["segment_ids"],
        [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]],
    )
    np.testing.assert_array_equal(
        inputs["input_mask"],
        [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]],
    )
    alone = padded(pack([a], vocabulary, 5), vocabulary, length=6)
    np.testing.assert_array_equal(
        alone["input_ids"], [[2, 5, 6, 3, 0, 0], [2, 3, 0, 0, 0, 0], [2, 5, 6, 7, 3, 0]]
    )
    np.testing.assert_array_equal(alone["segment_ids"], np.zeros((3, 6)))


def test_offsets_are_packed_along_with_minus_one_at_specials(vocabulary):
    a = Tokens(ragged([5, 6]), ragged([0, 4]), ragged([3, 8]))
    b = Tokens(ragged([7]), ragged([0]), ragged([2]))
    packed = pack([a, b], vocabulary, 8)
    assert packed.starts.to_list() == [[-1, 0, 4, -1, 0, -1]]
    assert packed.ends.to_list() == [[-1, 3, 8, -1, 2, -1]]


def test_truncation_pops_from_the_longer_like_the_released_code(vocabulary):
    lengths = [(a, b) for a in range(9) for b in range(9)]
    segments = [
        Tokens(ragged(*(list(range(5, 5 + pair[which])) for pair in lengths))) for which in (0, 1)
    ]
    for budget in range(1, 13):
        packed = pack(segments, vocabulary, budget + 3)
        for row, (a, b) in enumerate(lengths):
            while a + b > budget:
                a, b = (a - 1, b) if a > b else (a, b - 1)
            wanted = [2, *range(5, 5 + a), 3, *range(5, 5 + b), 3]
            assert packed.input_ids[row].numpy().tolist() == wanted, (lengths[row], budget)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*WORDS, "the"], "repeats 'the' of line 6"),
        ([*WORDS, "", "x"], "line 30 is empty"),
        (["[PAD]", "[UNK]", "a"], r"3 entries without \[CLS\], \[SEP\], \[MASK\]"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path, lines, message):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        Vocabulary.load(path)


def test_a_vocabulary_is_split_at_newlines_only_and_saved_as_it_was(tmp_path):
    content = "".join(line + "\n" for line in [*WORDS, "\u2028", "##\u2028", "last"]).encode()
    (tmp_path / "vocab.txt").write_bytes(content)
    vocabulary = Vocabulary.load(tmp_path / "vocab.txt")
    assert (vocabulary[""], vocabulary["##"], vocabulary["last"]) == (
        len(WORDS),
        len(WORDS) + 1,
        len(WORDS) + 2,
    )
    vocabulary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_bytes() == content
    assert tokenize("last #", vocabulary) == [("last", "last"), ("[UNK]", "#")]


@pytest.mark.parametrize(
    ("name", "size", "cased"),
    [
        ("uncased", 30522, False),
        ("cased", 28996, True),
        ("multi_cased", 119547, True),
        ("chinese", 21128, False),
    ],
)
def test_released_vocabularies_load_and_show_their_case(data_dir, name, size, cased):
    vocabulary = Vocabulary.load(data_dir / "vocab" / name / "vocab.txt")
    assert len(vocabulary) == size
    assert vocabulary.looks_cased() is cased
    Tokenizer(vocabulary, not cased)


def test_plain_english_has_the_released_ids(data_dir):
    """On rare Unicode this tokenizer may differ; every line of plain ASCII has to be right."""
    lines = (data_dir / "multilingual" / "all_lines.txt").read_text(encoding="utf-8").split("\n")
    with np.load(data_dir / "conformance" / "multilingual_ids_uncased.npz") as expected:
        expected_ids = np.split(expected["ids"], np.cumsum(expected["lengths"])[:-1])
    chosen = [
        row for row in range(len(expected_ids)) if lines[row].isascii() and lines[row].isprintable()
    ]
    assert len(chosen) > 5000
    tokenizer = Tokenizer(Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt"), True)
    ids = tokenizer.tokenize(tf.constant([lines[row] for row in chosen])).ids.to_list()
    assert ids == [expected_ids[row].tolist() for row in chosen]
