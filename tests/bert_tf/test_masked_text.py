"""Texts with a literal [MASK], which are split there before they are tokenized."""

import pytest
import tensorflow as tf

from bert_tf import Tokenizer
from bert_tf.text.tokenizer import tokenize_masked


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return Tokenizer(vocabulary, do_lower_case=True)


def ids(texts, tokenizer):
    texts = tf.constant(texts, tf.string)
    return tokenize_masked(texts, tokenizer.tokenize, tokenizer.vocabulary).ids.to_list()


def test_a_mask_is_one_token_at_any_position(tokenizer):
    mask, a, b = (tokenizer.vocabulary[entry] for entry in ("[MASK]", "a", "b"))
    texts = ["a [MASK] b", "a[MASK]b", "[MASK]", "[MASK][MASK]", "", "a b", "b[MASK]"]
    expected = [[a, mask, b], [a, mask, b], [mask], [mask, mask], [], [a, b], [b, mask]]
    assert ids(texts, tokenizer) == expected
    assert ids([], tokenizer) == []


def test_text_that_resembles_a_mask_is_tokenized_as_usual(tokenizer):
    texts = ["[mask]", "[ MASK ]", "[MASK", "[CLS] [SEP]"]
    plain = tokenizer.tokenize(tf.constant(texts)).ids.to_list()
    assert ids(texts, tokenizer) == plain
    assert all(tokenizer.vocabulary["[MASK]"] not in row for row in plain)


def test_offsets_count_characters_of_the_text_as_sent(tokenizer):
    texts = ["The cafe\u0301[MASK], 中", "\U0001f600 [MASK] unaffable [MASK]", "[MASK]"]
    tokens = tokenize_masked(
        tf.constant(texts), tokenizer.tokenize_with_offsets, tokenizer.vocabulary
    )
    covered = [
        [text[start:end] for start, end in zip(starts, ends, strict=True)]
        for text, starts, ends in zip(
            texts, tokens.starts.to_list(), tokens.ends.to_list(), strict=True
        )
    ]
    assert covered == [
        ["The", "cafe\u0301", "[MASK]", ",", "中"],
        ["\U0001f600", "[MASK]", "un", "aff", "able", "[MASK]"],
        ["[MASK]"],
    ]


def test_bytes_that_are_no_text_are_counted_as_in_python(tokenizer):
    text = b"\xff\xe2\x82 [MASK] a"
    tokens = tokenize_masked(
        tf.constant([text]), tokenizer.tokenize_with_offsets, tokenizer.vocabulary
    )
    start = text.decode("utf-8", "replace").index("[MASK]")
    position = tokens.ids.to_list()[0].index(tokenizer.vocabulary["[MASK]"])
    assert tokens.starts.to_list()[0][position:] == [start, start + 7]
