"""A model over parts of a batch gives what it gives of the whole."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.packing import Packed
from tasks import parts


def packed_of(lengths):
    """Sequences with the tokens 1, 2, 3, ..., the same ids in segment_ids."""
    total = sum(lengths)
    ids = tf.RaggedTensor.from_row_lengths(tf.range(1, total + 1), lengths)
    return Packed(ids, tf.ones_like(ids))


def sums(inputs):
    """A text's sum and length, and a number a token: what a model does without weights."""
    splits = inputs["row_splits"]
    ids = tf.cast(inputs["input_ids"][: splits[-1]], tf.float32)
    ragged = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
    return {"sum": tf.reduce_sum(ragged, axis=1), "tokens": ragged.to_tensor()[..., tf.newaxis]}


def run(lengths, of_tokens, names):
    def function(inputs):
        return {name: sums(inputs)[name] for name in names}

    traced = tf.function(
        lambda: parts.in_parts(function, packed_of(lengths), {"[PAD]": 0}, of_tokens),
        autograph=False,
    )
    return {name: values.numpy() for name, values in traced().items()}


@pytest.mark.parametrize("lengths", [[], [8], [3, 8, 1, 1, 8], [2] * 33])
def test_parts_give_what_the_whole_gives(lengths, monkeypatch):
    wanted = run(lengths, False, ["sum"])["sum"]
    tokens = run(lengths, True, ["tokens"])["tokens"]
    monkeypatch.setattr(parts, "TOKENS_AT_A_TIME", 8)
    np.testing.assert_array_equal(run(lengths, False, ["sum"])["sum"], wanted)
    got = run(lengths, True, ["tokens"])["tokens"]
    assert got.shape == tokens.shape == (len(lengths), max(lengths, default=0), 1)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(got[row, :length], tokens[row, :length])
        # Behind a row's end stands nothing, or what fills a part up.
        assert set(got[row, length:].flat) <= {0.0, np.float32(MASKED_SCORE)}


def test_a_part_holds_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr(parts, "TOKENS_AT_A_TIME", 8)
    seen = []

    def function(inputs):
        tf.py_function(lambda splits: seen.append(int(splits[-1])), [inputs["row_splits"]], [])
        return {"sum": sums(inputs)["sum"]}

    parts.in_parts(function, packed_of([5, 5, 5, 1, 1, 1]), {"[PAD]": 0})
    # One may begin in the part before the one that it ends in.
    assert len(seen) == 3 and sum(seen) == 18 and max(seen) <= 2 * 8
