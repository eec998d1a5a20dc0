"""The limit of a string's bytes, which cuts no character in two."""

import pytest
import tensorflow as tf

from bert_tf.text.byte_limit import MAX_BYTES, truncate_utf8


def cut(texts, most):
    return truncate_utf8(tf.constant(texts, tf.string), most).numpy().tolist()


def test_texts_within_the_limit_stay_and_others_end_with_a_character():
    texts = ["", "ab", "abc", "aé", "é€", "€", "\U0001f600", "a\U0001f600"]
    assert cut(texts, 2) == [b"", b"ab", b"ab", b"a", "é".encode(), b"", b"", b"a"]
    assert cut(texts, 4) == [
        *(text.encode() for text in ["", "ab", "abc", "aé", "é", "€", "\U0001f600", "a"])
    ]


@pytest.mark.parametrize("most", range(1, 14))
def test_it_is_pythons_decoding_of_the_first_bytes(most):
    text = "aé€\U0001f600é€b\U0001f600"
    (actual,) = cut([text], most)
    assert actual.decode() == text.encode()[:most].decode("utf-8", "ignore")


def test_bytes_that_are_no_text_are_cut_at_the_limit():
    assert cut([b"\x80" * 9, b"\xff" * 9], 5) == [b"\x80" * 5, b"\xff" * 5]


def test_any_shape_is_kept():
    assert cut([["abc", "d"], ["", "éf"]], 2) == [[b"ab", b"d"], [b"", "é".encode()]]
    assert cut([], 2) == []
    assert truncate_utf8(tf.zeros([3, 0], tf.string)).shape == (3, 0)


def test_the_limit_is_a_mebibyte():
    (actual,) = truncate_utf8(tf.constant(["x" * (MAX_BYTES + 7)])).numpy()
    assert len(actual) == 2**20
