"""A model that runs in chunks of a batch, with the outputs of the complete batch."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.encoder_inputs import Packed
from tasks.graph import chunking


def packed_of(lengths):
    """Return sequences with the tokens 1, 2, 3, ..., and the same segment_ids."""
    total = sum(lengths)
    ids = tf.RaggedTensor.from_row_lengths(tf.range(1, total + 1), lengths)
    return Packed(ids, tf.ones_like(ids))


def sums(inputs):
    """Return sum and length per text and a number per token, in place of a model."""
    splits = inputs["row_splits"]
    ids = tf.cast(inputs["input_ids"][: splits[-1]], tf.float32)
    ragged = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
    return {"sum": tf.reduce_sum(ragged, axis=1), "tokens": ragged.to_tensor()[..., tf.newaxis]}


RAGGED = tf.RaggedTensorSpec([None, None], tf.int32)


@functools.cache
def traced(names, tokens_per_chunk):
    """Return a function of ids that runs `sums`; `chunking` has the number of tokens already."""

    def function(inputs):
        return {name: sums(inputs)[name] for name in names}

    return tf.function(
        lambda ids: chunking.run_in_chunks(function, Packed(ids, tf.ones_like(ids)), {"[PAD]": 0}),
        input_signature=[RAGGED],
        autograph=False,
    )


def run(lengths, names):
    function = traced(tuple(names), chunking.TOKENS_PER_CHUNK)
    outputs = function(packed_of(lengths).input_ids)
    return {name: values.numpy() for name, values in outputs.items()}


@tf.function(input_signature=[RAGGED], autograph=False)
def run_with_branch(ids):
    def function(inputs):
        sum_B = sums(inputs)["sum"]
        return {"sum": -sum_B if inputs["row_splits"].shape == [2] else sum_B}

    packed = Packed(ids, tf.ones_like(ids))
    return chunking.run_in_chunks(function, packed, {"[PAD]": 0}, short_tokens=3)


@pytest.mark.parametrize("lengths", [[3], [4], [1, 1], []])
def test_a_single_short_sequence_has_a_branch_of_its_own(lengths):
    actual = run_with_branch(packed_of(lengths).input_ids)["sum"]
    expected = run(lengths, ["sum"])["sum"] * (-1 if lengths == [3] else 1)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("lengths", "rows"), [([3], 3), ([5, 6], 11), ([5, 7], 16)])
def test_a_chunk_of_few_tokens_has_no_padding(lengths, rows, monkeypatch):
    """Expect a bucket size of 16 for more than EXACT_TOKENS."""
    monkeypatch.setattr(chunking, "EXACT_TOKENS", 11)

    def function(inputs):
        count = tf.size(inputs["input_ids"])
        return {"rows": tf.fill([tf.size(inputs["row_splits"]) - 1], count)}

    traced = tf.function(
        lambda: chunking.run_in_chunks(function, packed_of(lengths), {"[PAD]": 0}), autograph=False
    )
    assert traced()["rows"].numpy().tolist() == [rows] * len(lengths)


@pytest.mark.parametrize("lengths", [[], [8], [3, 8, 1, 1, 8], [2] * 33])
def test_chunks_have_the_outputs_of_the_complete_batch(lengths, monkeypatch):
    expected = run(lengths, ["sum"])["sum"]
    tokens = run(lengths, ["tokens"])["tokens"]
    monkeypatch.setattr(chunking, "TOKENS_PER_CHUNK", 8)
    np.testing.assert_array_equal(run(lengths, ["sum"])["sum"], expected)
    actual = run(lengths, ["tokens"])["tokens"]
    assert actual.shape == tokens.shape == (len(lengths), max(lengths, default=0), 1)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(actual[row, :length], tokens[row, :length])
        # After the end of a row there is padding of the batch or of the chunk.
        assert set(actual[row, length:].flat) <= {0.0, np.float32(MASKED_SCORE)}


def test_a_chunk_with_its_padding_is_within_the_limit(monkeypatch):
    monkeypatch.setattr(chunking, "TOKENS_PER_CHUNK", 16)
    seen = []

    def function(inputs):
        tf.py_function(lambda splits: seen.append(np.diff(splits)), [inputs["row_splits"]], [])
        return {"sum": sums(inputs)["sum"]}

    lengths = [1, 9, 1, 1, 8, 1, 8, 1]
    actual = chunking.run_in_chunks(function, packed_of(lengths), {"[PAD]": 0})["sum"]
    np.testing.assert_array_equal(actual, run(lengths, ["sum"])["sum"])
    # The longest first; rows shorter than MIN_TOKENS count as MIN_TOKENS.
    assert [lengths.tolist() for lengths in seen] == [[9], [1, 1], [1, 8], [1, 8], [1]]


SEEN = []


def letters(text):
    """Return count [b], letters and places [b, L] of strings [b], or [b, C], which are joined."""
    if text.shape.rank == 2:
        text = tf.strings.reduce_join(text, axis=1)
    tf.py_function(lambda text: SEEN.append(text.numpy().tolist()), [text], [])
    letters = tf.strings.bytes_split(text)
    return {
        "count": tf.cast(letters.row_lengths(), tf.int32),
        "letters": letters.to_tensor("", shape=[None, None]),
        "places": tf.ragged.range(tf.cast(letters.row_lengths(), tf.int32)).to_tensor(-7),
    }


@functools.cache
def traced_letters(rank, limits):
    """Return a function of strings that runs `letters`; `chunking` has the limits already."""
    return tf.function(
        lambda text: chunking.run_texts_in_chunks(letters, {"text": text}, {"places": -9}),
        input_signature=[tf.TensorSpec([None] * rank, tf.string)],
    )


def letters_of(text, rank=1):
    SEEN.clear()
    limits = (chunking.BYTES_PER_CHUNK, chunking.MIN_BYTES, chunking.MAX_VALUES)
    outputs = traced_letters(rank, limits)(tf.constant(text, tf.string))
    return {name: values.numpy() for name, values in outputs.items()}


@pytest.mark.parametrize(
    ("texts", "seen"),
    [
        ([], [[]]),
        (["", "abc"], [["", "abc"]]),
        (["ab", "abcdefgh", "", "abcdefghijklmnopqrstu"], None),
        (["a"] * 9, [["a"] * 4, ["a"] * 4, ["a"]]),
        (["a", "abcdefg", "b"], [["abcdefg", "a"], ["b"]]),
    ],
)
def test_texts_in_chunks_have_the_outputs_of_the_complete_batch(texts, seen, monkeypatch):
    monkeypatch.setattr(chunking, "BYTES_PER_CHUNK", 16)
    monkeypatch.setattr(chunking, "MIN_BYTES", 4)
    found = letters_of(texts)
    longest = max(map(len, texts), default=0)
    assert found["count"].tolist() == [len(text) for text in texts]
    assert found["letters"].shape == found["places"].shape == (len(texts), longest)
    for row, text in enumerate(texts):
        after = longest - len(text)
        assert found["letters"][row].tolist() == [*map(str.encode, text), *[b""] * after]
        # Padding is from the chunk, or from the batch if other chunks are wider.
        positions = found["places"][row].tolist()
        assert positions[: len(text)] == list(range(len(text)))
        assert set(positions[len(text) :]) <= {-7, -9}
    if seen:
        assert [[text.decode() for text in part] for part in SEEN] == seen


def test_a_row_of_choices_counts_with_all_of_them(monkeypatch):
    monkeypatch.setattr(chunking, "BYTES_PER_CHUNK", 16)
    monkeypatch.setattr(chunking, "MIN_BYTES", 4)
    found = letters_of([["a", "b"], ["c", "d"], ["efghijkl", ""]], rank=2)
    assert found["count"].tolist() == [2, 2, 8]
    assert SEEN == [[b"efghijkl"], [b"ab", b"cd"]]


@pytest.mark.parametrize("max_values", [8, 9])
def test_an_output_of_too_many_values_is_an_error(max_values, monkeypatch):
    monkeypatch.setattr(chunking, "MAX_VALUES", max_values)
    if max_values == 9:
        assert letters_of(["abc", "", "a"])["letters"].shape == (3, 3)
        return
    message = "an output of 3 rows of 3 values exceeds the limit of 8 values; send fewer"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        letters_of(["abc", "", "a"])


def test_packed_batches_have_few_shapes_and_keep_the_order():
    """Nine batches of 4 sequences; the last one is filled up."""

    def function(inputs):
        index_BS = inputs["token_indices"]
        ids = tf.reshape(inputs["input_ids"], [-1])
        ids_BS = tf.where(index_BS < 0, 0, tf.gather(ids, tf.maximum(index_BS, 0)))
        rows_B = tf.fill([index_BS.shape[0]], tf.shape(inputs["input_ids"])[0])
        return {"sum": tf.reduce_sum(ids_BS, axis=1), "rows": rows_B}

    lengths = [*range(1, 33), 64, 64, 64]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(chunking, "SEQUENCES_PER_BATCH", 4)
        packed = packed_of(lengths)
        run = tf.function(
            lambda: chunking.run_in_packed_batches(function, packed, {"[PAD]": 0}, 64),
            autograph=False,
        )
        outputs = run()
    expected = tf.reduce_sum(packed.input_ids, axis=1)
    np.testing.assert_array_equal(outputs["sum"], expected)
    assert outputs["rows"][::4].numpy().tolist() == [1] * 4 + [2] * 4 + [3]
