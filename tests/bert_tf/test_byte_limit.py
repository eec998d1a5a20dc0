"""Byte limit of strings, which never splits a character."""

import pytest
import tensorflow as tf

from bert_tf.text.tokenizer import MAX_BYTES, truncate_utf8


def cut(texts, most):
    return truncate_utf8(tf.constant(texts, tf.string), most).numpy().tolist()


def test_long_texts_are_cut_between_characters():
    texts = ["", "ab", "abc", "aé", "é€", "€", "\U0001f600", "a\U0001f600"]
    assert cut(texts, 2) == [b"", b"ab", b"ab", b"a", "é".encode(), b"", b"", b"a"]
    assert cut(texts, 4) == [
        *(text.encode() for text in ["", "ab", "abc", "aé", "é", "€", "\U0001f600", "a"])
    ]


@pytest.mark.parametrize("most", range(1, 14))
def test_the_result_equals_decoding_the_first_bytes_in_python(most):
    text = "aé€\U0001f600é€b\U0001f600"
    (actual,) = cut([text], most)
    assert actual.decode() == text.encode()[:most].decode("utf-8", "ignore")


def test_invalid_utf8_is_cut_at_the_limit():
    assert cut([b"\x80" * 9, b"\xff" * 9], 5) == [b"\x80" * 5, b"\xff" * 5]


def test_any_shape_is_preserved():
    assert cut([["abc", "d"], ["", "éf"]], 2) == [[b"ab", b"d"], [b"", "é".encode()]]
    assert cut([], 2) == []
    assert truncate_utf8(tf.zeros([3, 0], tf.string)).shape == (3, 0)


def test_the_limit_is_one_mebibyte():
    (actual,) = truncate_utf8(tf.constant(["x" * (MAX_BYTES + 7)])).numpy()
    assert len(actual) == 2**20
