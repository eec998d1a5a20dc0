"""The flat layout against the padded one: values, gradients and the structure of batches."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW
from bert_tf.model.bucketing import BUCKET_SIZES, round_up_to_bucket
from bert_tf.model.layout import FlatLayout
from bert_tf.text.encoder_inputs import Packed, to_flat, to_padded
from bert_tf.train.distribution import distribute
from bert_tf.train.step import TrainStep
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.windows import one_window_each
from tasks.graph.evaluation import Evaluator
from tasks.types.classification.text_classifier import ClassificationTask
from tests import reference, small
from tests.bert_tf.test_encoder import make_encoder

LENGTHS = {
    "mixed": [5, 1, 16, 3, 3, 2, 9, 1, 4],
    "batch of one": [7],
    "one token each": [1, 1, 1],
    "all equal": [8, 8],
    "full": [512],
    "full batch": [512, 512, 512],
}


@pytest.fixture(scope="module")
def eager_and_graph(config):
    """Return an encoder of one layer and its graph, for inputs that are rejected before."""
    encoder = make_encoder(dataclasses.replace(config, num_hidden_layers=1), {})
    return encoder, tf.function(encoder)


@pytest.fixture(scope="module")
def deep_config(config):
    """Return a configuration with 512 positions."""
    return dataclasses.replace(config, max_position_embeddings=512)


def random_texts(lengths, config, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, config.vocab_size, sum(lengths)).astype(np.int32)
    segments = rng.integers(0, 2, sum(lengths)).astype(np.int32)
    return Packed(*(tf.RaggedTensor.from_row_lengths(part, lengths) for part in (ids, segments)))


def tokens(values_BL, lengths):
    """Select the tokens of a padded array [B, L, ...], in the order of the flat layout."""
    return np.concatenate(
        [row[:length] for row, length in zip(np.asarray(values_BL), lengths, strict=True)]
    )


def without_tail(inputs):
    count = int(inputs["row_splits"][-1])
    return {
        name: values if name == "row_splits" else values[:count] for name, values in inputs.items()
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("lengths", "wrap"),
    [
        *(pytest.param(LENGTHS[name], lambda f: f, id=f"eager-{name}") for name in LENGTHS),
        pytest.param(LENGTHS["mixed"], tf.function, id="graph-mixed"),
        *(
            pytest.param(LENGTHS[name], tf.function, id=f"graph-{name}", marks=pytest.mark.slow)
            for name in LENGTHS
            if name != "mixed"
        ),
    ],
)
def test_flat_equals_padded_in_every_output(deep_config, vocabulary, lengths, wrap):
    encoder = make_encoder(deep_config, small.random_weights(deep_config))
    texts, count = random_texts(lengths, deep_config), sum(lengths)
    encode = wrap(lambda inputs: encoder(inputs, output_hidden_states=True))
    expected = encode(to_padded(texts, vocabulary))
    for inputs in (to_flat(texts, vocabulary), without_tail(to_flat(texts, vocabulary))):
        actual = encode(inputs)
        assert actual["sequence"].shape == (len(inputs["input_ids"]), deep_config.hidden_size)
        reference.assert_equal(actual["pooled"], expected["pooled"].numpy(), 2)
        for mine, theirs in (
            (actual["sequence"], expected["sequence"]),
            *zip(actual["hidden_states"], expected["hidden_states"], strict=True),
        ):
            reference.assert_equal(mine[:count], tokens(theirs, lengths), 2)
        for mine, theirs in zip(actual["attentions"], expected["attentions"], strict=True):
            for row, length in enumerate(lengths):
                reference.assert_equal(
                    mine[row, :, :length, :length], theirs[row, :, :length, :length].numpy(), 2
                )
                np.testing.assert_array_equal(mine[row, :, :length, length:], 0)
        reference.assert_equal(
            encoder(inputs, pooled_only=True)["pooled"], expected["pooled"].numpy(), 2
        )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_flat_and_padded_gradients_are_equal(deep_config, vocabulary, lengths, training):
    config = dataclasses.replace(
        deep_config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder = make_encoder(config, small.random_weights(config))
    texts, count = random_texts(lengths, config), sum(lengths)
    rng = np.random.default_rng(1)
    weights_TH = tf.constant(rng.normal(size=(count, config.hidden_size)), tf.float32)

    def gradients(inputs, rows):
        with tf.GradientTape() as tape:
            outputs = encoder(inputs, training=training, seed=np.array([1, 2]))
            products = rows(outputs["sequence"]) * weights_TH
            pooled = outputs["pooled"] * weights_TH[0]
            loss = (tf.reduce_sum(products) + tf.reduce_sum(pooled)) / count
        return tape.gradient(loss, encoder.trainable_variables)

    is_token = tf.sequence_mask(lengths)
    expected = gradients(
        to_padded(texts, vocabulary), lambda values_BLH: tf.boolean_mask(values_BLH, is_token)
    )
    # Padding tokens have an id that no text has, so its embedding gets no gradient.
    inputs = to_flat(texts, vocabulary)
    actual = gradients(inputs, lambda values_TH: values_TH[:count])
    for variable, mine, theirs in zip(encoder.trainable_variables, actual, expected, strict=True):
        mine, theirs = (tf.convert_to_tensor(gradient).numpy() for gradient in (mine, theirs))
        reference.assert_equal(mine, theirs, 2)
        if variable.path.endswith("word_embeddings"):
            np.testing.assert_array_equal(mine[vocabulary["[PAD]"]], 0)


@pytest.mark.medium
@pytest.mark.parametrize("layout", [to_padded, to_flat])
def test_the_cls_token_alone_has_the_gradients_of_all_tokens(config, vocabulary, layout):
    config = dataclasses.replace(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    encoder = make_encoder(config, small.random_weights(config))
    inputs = layout(random_texts([5, 1, 9], config), vocabulary)

    @tf.function(autograph=False)
    def gradients(pooled_only):
        with tf.GradientTape() as tape:
            pooled_BH = encoder(inputs, training=True, pooled_only=pooled_only)["pooled"]
            loss = tf.reduce_sum(pooled_BH * tf.range(pooled_BH.shape[-1], dtype=tf.float32))
        return tape.gradient(loss, encoder.trainable_variables)

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        reference.assert_equal(
            tf.convert_to_tensor(mine).numpy(), tf.convert_to_tensor(theirs).numpy(), 2
        )


def test_padding_tokens_affect_nothing(config, vocabulary):
    encoder = make_encoder(config, small.random_weights(config))
    inputs = to_flat(random_texts([3, 7, 1], config), vocabulary)
    garbled = {
        **inputs,
        "input_ids": tf.where(tf.range(16) < 11, inputs["input_ids"], 9),
        "segment_ids": tf.where(tf.range(16) < 11, inputs["segment_ids"], 1),
    }
    assert not np.array_equal(inputs["input_ids"], garbled["input_ids"])
    for name, kept in (("sequence", slice(11)), ("pooled", slice(None))):
        np.testing.assert_array_equal(
            encoder(inputs)[name].numpy()[kept], encoder(garbled)[name].numpy()[kept]
        )


def test_a_batch_has_the_flat_layout(vocabulary):
    ids, segments = [[2, 7, 3], [2, 5, 6, 3, 8, 3]], [[0, 0, 0], [0, 0, 0, 0, 1, 1]]
    texts = Packed(tf.ragged.constant(ids, tf.int32), tf.ragged.constant(segments, tf.int32))
    assert {
        name: values.numpy().tolist() for name, values in to_flat(texts, vocabulary).items()
    } == {
        "input_ids": [2, 7, 3, 2, 5, 6, 3, 8, 3] + [0] * 7,
        "segment_ids": [0, 0, 0, 0, 0, 0, 0, 1, 1] + [0] * 7,
        "row_splits": [0, 3, 9],
    }


def test_the_number_of_buckets_is_small():
    some = [0, 1, 8, 9, 64, 65, 128, 129, 500, 513, 1000, 16384]
    assert [int(round_up_to_bucket(number)) for number in some] == (
        [0, 8, 8, 16, 64, 72, 128, 144, 512, 576, 1024, 16384]
    )
    sizes = BUCKET_SIZES[BUCKET_SIZES >= 64]
    assert (sizes[1:] <= sizes[:-1] * 1.125).all()
    for octave in (64, 512, 4096):
        assert ((sizes > octave) & (sizes <= 2 * octave)).sum() == 8


def test_flat_texts_of_more_tokens_than_positions_are_rejected(eager_and_graph, config, vocabulary):
    inputs = to_flat(random_texts([4, 17], config), vocabulary)
    for encode in eager_and_graph:
        with pytest.raises(tf.errors.InvalidArgumentError, match="longer than max_position"):
            encode(inputs)
    for lengths in ([16, 1], [1, 16]):  # The padding after the last sequence has no 17th position.
        eager_and_graph[0](to_flat(random_texts(lengths, config), vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize("num_labels", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_training_and_evaluation_are_equal_in_both_layouts(config, vocabulary, num_labels):
    """Run five steps of the training loop on batches of different lengths, with active clipping."""
    config = dataclasses.replace(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    lengths, labels = [5, 1, 16, 3, 3, 2, 9, 1, 12, 4], np.arange(10) % num_labels
    texts = random_texts(lengths, config)
    task = ClassificationTask(labels=tuple("abc"[:num_labels]), max_seq_length=16)
    logits, weights = {}, {}
    for layout in (to_padded, to_flat):
        keras.utils.set_random_seed(3)
        model = task.build_model(config)
        optimizer = AdamW(0.01, clip_norm=0.1)
        optimizer.build(model.trainable_variables)
        rows = Examples({"text": [""] * 10}, labels.tolist())
        examples = EncodedExamples(task, rows, one_window_each(texts), vocabulary, layout)
        step = TrainStep(model, task.losses, optimizer, tf.distribute.get_strategy(), 0)
        batches = examples.training_batches(global_batch_size=4, num_epochs=2, seed=1)
        iterator = iter(distribute(lambda local, batches=batches: batches, step.strategy))
        for _ in range(5):
            step(iterator)
        evaluator = Evaluator(task, model, step.strategy, replica_batch_size=4)
        logits[layout] = evaluator.outputs(examples)["label"]
        weights[layout] = {variable.path: variable.numpy() for variable in model.variables}
    np.testing.assert_allclose(logits[to_flat], logits[to_padded], atol=1e-4)
    for path, values in weights[to_padded].items():
        np.testing.assert_allclose(weights[to_flat][path], values, atol=1e-4, err_msg=path)


def test_flat_is_close_to_padded_in_bfloat16(config, vocabulary):
    encoder = make_encoder(config, small.random_weights(config), dtype="mixed_bfloat16")
    texts = random_texts([5, 1, 16, 3], config)
    expected, actual = (
        tf.cast(encoder(layout(texts, vocabulary))["pooled"], tf.float32)
        for layout in (to_padded, to_flat)
    )
    np.testing.assert_allclose(actual, expected, atol=0.03)


def test_the_gradient_of_the_gather_equals_tensorflow():
    """Compare with tf.gather, whose gradient TensorFlow accumulates, on the grid of attention."""
    splits, rng = np.array([0, 3, 4, 9]), np.random.default_rng(2)
    layout = FlatLayout({"input_ids": tf.zeros([12], tf.int32), "row_splits": tf.constant(splits)})
    x_TH = tf.constant(rng.normal(size=(12, 6)), tf.float32)
    upstream = tf.constant(rng.normal(size=(3, 2, 8, 3)), tf.float32)
    is_token = (np.arange(8) < np.diff(splits)[:, None])[:, None, :, None]
    rows_BL = np.minimum(splits[:-1, None] + np.arange(8), 11)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x_TH)
        mine = layout.split_heads(x_TH, 2)
        plain = tf.transpose(tf.reshape(tf.gather(x_TH, rows_BL), [3, 8, 2, 3]), [0, 2, 1, 3])
        losses = [tf.reduce_sum(grid * upstream * is_token) for grid in (mine, plain)]
    gradients = [tf.convert_to_tensor(tape.gradient(loss, x_TH)) for loss in losses]
    np.testing.assert_array_equal(mine * is_token, plain * is_token)
    np.testing.assert_allclose(*gradients, rtol=1e-6)
    np.testing.assert_array_equal(layout.merge_heads(mine)[:9], x_TH[:9])


def test_the_gradient_of_the_inverse_gather_equals_tensorflow():
    splits, rng = np.array([0, 3, 4, 9]), np.random.default_rng(3)
    layout = FlatLayout({"input_ids": tf.zeros([12], tf.int32), "row_splits": tf.constant(splits)})
    context = tf.constant(rng.normal(size=(3, 2, 8, 3)), tf.float32)
    hidden_TH = tf.constant(rng.normal(size=(12, 6)), tf.float32)
    upstream_TH = tf.constant(rng.normal(size=(9, 6)), tf.float32)
    is_token = np.arange(8) < np.diff(splits)[:, None]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([context, hidden_TH])
        rows_BLH = tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [3, 8, 6])
        plain = tf.reduce_sum(tf.boolean_mask(rows_BLH, is_token) * upstream_TH)
        mine = tf.reduce_sum(layout.merge_heads(context)[:9] * upstream_TH)
        plain_first = tf.reduce_sum(tf.gather(hidden_TH, [0, 3, 4]) * upstream_TH[:3])
        first = tf.reduce_sum(layout.cls_vectors(hidden_TH) * upstream_TH[:3])
    for actual, expected, x in ((mine, plain, context), (first, plain_first, hidden_TH)):
        gradients = [tf.convert_to_tensor(tape.gradient(loss, x)) for loss in (actual, expected)]
        np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("splits", [[0, 3, 3, 8], [0, 3, 9], [1, 3, 8], [0, 3, 2, 8]])
def test_wrong_row_splits_are_rejected(eager_and_graph, splits):
    ids = tf.ones([8], tf.int32)
    inputs = {"input_ids": ids, "segment_ids": 0 * ids, "row_splits": tf.constant(splits)}
    for encode in eager_and_graph:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="row_splits: expected to start at 0"
        ):
            encode(inputs)


def test_an_empty_batch_has_empty_outputs(config, vocabulary):
    encoder = make_encoder(config, small.random_weights(config))
    outputs = encoder(to_flat(random_texts([], config), vocabulary))
    assert outputs["pooled"].shape == (0, 12) and outputs["sequence"].shape == (0, 12)
