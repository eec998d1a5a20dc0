"""Vocabulary and packing, on literals small enough to check by hand."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary, pack
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.tokenizer import Tokens
from tests.conftest import WORDS
from tests.rows import as_others_write


def ragged(*rows):
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def test_pack_accepts_one_and_two_segments(vocabulary):
    a, b = (
        Tokens(ragged([5, 6], [], [5, 6, 7, 8, 9])),
        Tokens(ragged([7], [10, 11], [10, 11, 12, 13, 14])),
    )
    inputs = to_padded(pack([a, b], vocabulary, 8), vocabulary)
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
    alone = to_padded(pack([a], vocabulary, 5), vocabulary, length=6)
    np.testing.assert_array_equal(
        alone["input_ids"], [[2, 5, 6, 3, 0, 0], [2, 3, 0, 0, 0, 0], [2, 5, 6, 7, 3, 0]]
    )
    np.testing.assert_array_equal(alone["segment_ids"], np.zeros((3, 6)))


def test_offsets_are_packed_with_minus_1_at_special_tokens(vocabulary):
    a = Tokens(ragged([5, 6]), ragged([0, 4]), ragged([3, 8]))
    b = Tokens(ragged([7]), ragged([0]), ragged([2]))
    packed = pack([a, b], vocabulary, 8)
    assert packed.starts.to_list() == [[-1, 0, 4, -1, 0, -1]]
    assert packed.ends.to_list() == [[-1, 3, 8, -1, 2, -1]]


def test_truncation_removes_from_the_longer_segment_like_the_released_code(vocabulary):
    lengths = [(a, b) for a in range(9) for b in range(9)]
    segments = [
        Tokens(ragged(*(list(range(5, 5 + pair[which])) for pair in lengths))) for which in (0, 1)
    ]
    for budget in range(1, 13):
        packed = pack(segments, vocabulary, budget + 3).input_ids.to_list()
        for row, (a, b) in zip(packed, lengths, strict=True):
            pair = (a, b)
            while a + b > budget:
                a, b = (a - 1, b) if a > b else (a, b - 1)
            expected = [2, *range(5, 5 + a), 3, *range(5, 5 + b), 3]
            assert row == expected, (pair, budget)


def test_truncation_keeps_the_head_the_tail_or_both(vocabulary):
    """Keep 6 of ten tokens: a quarter of 6, rounded up, is 2."""
    row = list(range(10, 20))
    text = Tokens(ragged(row, [5]), ragged(row, [0]), ragged([n + 1 for n in row], [1]))
    kept = {
        "head": [10, 11, 12, 13, 14, 15],
        "tail": [14, 15, 16, 17, 18, 19],
        "head_tail": [10, 11, 16, 17, 18, 19],
    }
    for truncation, expected in kept.items():
        packed = pack([text], vocabulary, 8, truncation)
        assert packed.input_ids.to_list() == [[2, *expected, 3], [2, 5, 3]]
        assert packed.segment_ids.to_list() == [[0] * 8, [0] * 3]
        assert packed.starts.to_list() == [[-1, *expected, -1], [-1, 0, -1]]
        assert packed.ends.to_list() == [[-1, *(n + 1 for n in expected), -1], [-1, 1, -1]]
    # Of a pair, A keeps 4 tokens and B both of its tokens.
    pair = [Tokens(text.ids), Tokens(ragged([7, 8], [9]))]
    packed = pack(pair, vocabulary, 9, "head_tail")
    assert packed.input_ids.to_list() == [[2, 10, 17, 18, 19, 3, 7, 8, 3], [2, 5, 3, 9, 3]]
    with pytest.raises(ValueError, match="truncation='middle': expected one of head, tail, head_t"):
        pack([text], vocabulary, 8, "middle")


def test_head_tail_keeps_the_published_128_and_382_of_512(vocabulary):
    packed = pack([Tokens(ragged(list(range(1000))))], vocabulary, 512, "head_tail")
    expected = [2, *range(128), *range(1000 - 382, 1000), 3]
    assert packed.input_ids.to_list() == [expected]


@pytest.mark.parametrize("num_segments", [1, 2])
def test_truncation_equals_lists_truncated_token_by_token(vocabulary, num_segments):
    """Put rows of all lengths into one batch; the mode must not affect the length that is kept."""
    rng = np.random.default_rng(num_segments)
    texts = [[rng.integers(5, 99, rng.integers(0, 30)).tolist() for _ in range(40)] for _ in "ab"]
    for truncation in ("head", "tail", "head_tail"):
        for room in (1, 2, 5, 16, 23, 60):
            segments = [Tokens(ragged(*rows)) for rows in texts[:num_segments]]
            packed = pack(segments, vocabulary, room + 1 + num_segments, truncation)
            for row, ids in zip(zip(*texts, strict=True), packed.input_ids.to_list(), strict=True):
                keep = [len(segment) for segment in row[:num_segments]]
                while sum(keep) > room:
                    keep[0 if len(keep) == 1 or keep[0] > keep[1] else 1] -= 1
                expected = [2]
                for segment, count in zip(row, keep, strict=False):
                    segment = list(segment)
                    quarter = -(-count // 4)
                    at = {"head": count, "tail": 0, "head_tail": quarter}[truncation]
                    while len(segment) > count:
                        del segment[at]
                    expected += [*segment, 3]
                assert ids == expected, (truncation, room, row)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*WORDS, "the"], "repeats 'the' of line 6"),
        ([*WORDS, "", "x"], "line 30 is empty"),
        (["[PAD]", "[UNK]", "a"], r"3 entries without \[CLS\], \[SEP\], \[MASK\]"),
    ],
)
def test_an_invalid_vocabulary_is_rejected(tmp_path, lines, message):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        Vocabulary.load(path)


def test_a_vocabulary_is_split_at_newlines_only_and_saved_unchanged(tmp_path):
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
    ids = Tokenizer(vocabulary, True).tokenize(tf.constant(["last # ##"])).ids.to_list()
    assert ids == [[vocabulary["last"], *[vocabulary["[UNK]"]] * 3]]


@pytest.mark.parametrize(
    ("name", "size", "cased"),
    [
        ("uncased", 30522, False),
        ("cased", 28996, True),
        ("multi_cased", 119547, True),
        ("chinese", 21128, False),
    ],
)
def test_released_vocabularies_load_and_their_case_is_detected(data_dir, name, size, cased):
    vocabulary = Vocabulary.load(data_dir / "vocab" / name / "vocab.txt")
    assert len(vocabulary) == size
    assert vocabulary.looks_cased() is cased
    assert vocabulary.normalization() == {"do_lower_case": not cased, "strip_accents": None}
    Tokenizer(vocabulary, not cased)


def test_a_vocabulary_of_other_programs_is_saved_as_its_entries(tmp_path, vocabulary):
    """Others match the raw lines, so that the file of a conversion may have no stray blanks."""
    text = vocabulary.to_bytes().decode()
    for name, data in as_others_write(text).items():
        (tmp_path / "vocab.txt").write_bytes(data)
        loaded = Vocabulary.load(tmp_path / "vocab.txt")
        assert loaded.lines == loaded.entries == vocabulary.entries, name
        assert loaded.sha256 == vocabulary.sha256
    stray = Vocabulary([f"{word} \t" for word in WORDS] + ["the\u3000\u00e9"])
    assert stray.to_bytes() == Vocabulary([*WORDS, "the\u3000\u00e9"]).to_bytes()
    # Entries of the released Chinese vocabulary, which match no text.
    assert Vocabulary([*WORDS, "\u2028", "##\u2028"]).lines[-2:] == ("\u2028", "##\u2028")
    with pytest.raises(UserError, match="line 30 repeats 'the' of line 6"):
        Vocabulary([*WORDS, "the "])
    (tmp_path / "vocab.txt").write_text(text.replace("the\n", "the\r\n\r\n"))
    with pytest.raises(UserError, match="line 7 is empty"):
        Vocabulary.load(tmp_path / "vocab.txt")
