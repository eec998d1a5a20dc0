"""Losses of embeddings, compared with numbers worked out by hand and with NumPy."""

import math

import numpy as np
import tensorflow as tf

from tasks.types.similarity import losses

ONES = tf.ones(2)


def pairs():
    """Two rows of anchor, positive and negative, whose cosines are 1, 0 or 0.6."""
    return tf.constant(
        [
            [[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]],
            [[0.0, 1.0], [3.0, 4.0], [1.0, 0.0]],
        ]
    )


def test_the_positives_and_negatives_of_all_rows_are_candidates():
    texts = tf.constant([[0, 1, 2], [3, 4, 5]])
    values = losses.in_batch_negatives(texts, pairs(), ONES, temperature=0.5).numpy()
    # Cosines of the first anchor to both positives, then both negatives: 1, 0.6, 0, 1.
    first = math.log(sum(math.exp(cosine / 0.5) for cosine in (1.0, 0.6, 0.0, 1.0))) - 1.0 / 0.5
    second = math.log(sum(math.exp(cosine / 0.5) for cosine in (0.0, 0.8, 1.0, 0.0))) - 0.8 / 0.5
    np.testing.assert_allclose(values, [first, second], rtol=1e-6)


def test_an_equal_or_missing_text_is_no_negative():
    # The second positive is the first one's text, and the second negative is missing.
    texts = tf.constant([[0, 1, 2], [3, 1, -1]])
    values = losses.in_batch_negatives(texts, pairs(), ONES, temperature=0.5).numpy()
    first = math.log(sum(math.exp(cosine / 0.5) for cosine in (1.0, 0.0))) - 1.0 / 0.5
    second = math.log(sum(math.exp(cosine / 0.5) for cosine in (0.8, 1.0))) - 0.8 / 0.5
    np.testing.assert_allclose(values, [first, second], rtol=1e-6)


def test_an_anchor_is_not_its_own_negative():
    texts = tf.constant([[0, 1, 2], [3, 0, 5]])  # The second positive is the first anchor's text.
    value = losses.in_batch_negatives(texts, pairs(), ONES, temperature=0.5)[0].numpy()
    expected = math.log(sum(math.exp(cosine / 0.5) for cosine in (1.0, 0.0, 1.0))) - 1.0 / 0.5
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_another_positive_of_the_anchor_is_no_negative():
    # Both rows have the first anchor. The third one has its second positive as well.
    vectors = tf.concat([pairs()[:, :2], [[[1.0, 1.0], [3.0, 4.0]]]], axis=0)
    texts = tf.constant([[0, 1], [0, 4], [5, 4]])
    values = losses.in_batch_negatives(texts, vectors, tf.ones(3), temperature=0.5).numpy()
    np.testing.assert_allclose(values[:2], [0.0, 0.0], atol=1e-6)
    # For the third anchor the first positive is one, with cosines of 0.71 and 0.99.
    expected = math.log(1 + math.exp((1 / math.sqrt(2) - 7 / math.sqrt(50)) / 0.5))
    np.testing.assert_allclose(values[2], expected, rtol=1e-5)


def test_another_anchor_of_the_positive_is_no_negative_of_it():
    texts = tf.constant([[0, 1], [3, 1]])
    values = losses.in_batch_negatives(texts, pairs()[:, :2], ONES, 0.5, symmetric=True).numpy()
    np.testing.assert_allclose(values, [0.0, 0.0], atol=1e-6)


def test_padding_gives_no_candidates():
    texts = tf.constant([[0, 1, 2], [3, 4, 5]])
    padded = losses.in_batch_negatives(texts, pairs(), tf.constant([1.0, 0.0]), 0.5)[0]
    alone = losses.in_batch_negatives(texts[:1], pairs()[:1], ONES[:1], 0.5)[0]
    np.testing.assert_allclose(padded, alone, rtol=1e-6)


def test_the_symmetric_loss_adds_the_anchors_of_the_positives():
    texts = tf.constant([[0, 1], [3, 4]])
    vectors = pairs()[:, :2]
    values = losses.in_batch_negatives(texts, vectors, ONES, 0.5, symmetric=True).numpy()
    forward = losses.in_batch_negatives(texts, vectors, ONES, 0.5).numpy()
    swapped = tf.reverse(vectors, [1]), tf.reverse(texts, [1])
    backward = losses.in_batch_negatives(swapped[1], swapped[0], ONES, 0.5).numpy()
    np.testing.assert_allclose(values, (forward + backward) / 2, rtol=1e-6)


def test_cosent_compares_all_pairs_of_different_scores():
    vectors = tf.concat([pairs()[:, :2], [[[1.0, 1.0], [1.0, -1.0]]]], axis=0)  # Cosines 1, 0.8, 0.
    scores = tf.constant([0.2, 0.9, 0.9])
    values = losses.ranked_cosines(scores, vectors, tf.ones(3), temperature=0.5).numpy()
    expected = math.log(1 + math.exp((1.0 - 0.8) / 0.5) + math.exp((1.0 - 0.0) / 0.5))
    np.testing.assert_allclose(values, [expected] * 3, rtol=1e-5)
    twice = losses.ranked_cosines(scores, vectors, tf.constant([1.0, 1.0, 2.0]), 0.5).numpy()
    again = tf.concat([vectors, vectors[2:]], axis=0), tf.constant([0.2, 0.9, 0.9, 0.9])
    expected = losses.ranked_cosines(again[1], again[0], tf.ones(4), 0.5).numpy()
    np.testing.assert_allclose(twice[0], expected[0], rtol=1e-5)
    padded = losses.ranked_cosines(scores, vectors, tf.constant([1.0, 1.0, 0.0]), 0.5).numpy()
    np.testing.assert_allclose(padded[0], math.log(1 + math.exp(0.2 / 0.5)), rtol=1e-5)


def test_cosine_error_and_triplet_margin():
    vectors = pairs()
    error = losses.cosine_error(tf.constant([0.5, 0.5]), vectors[:, :2]).numpy()
    np.testing.assert_allclose(error, [0.25, 0.09], rtol=1e-5)
    texts = tf.constant([[0, 1, 2], [3, 4, -1]])
    values = losses.triplet_margin(texts, vectors, margin=3.0).numpy()
    np.testing.assert_allclose(values, [1.0 - math.sqrt(10.0) + 3.0, 0.0], rtol=1e-6)


def test_gradients_are_finite_where_a_distance_is_zero():
    vectors = tf.Variable(tf.ones((1, 3, 2)))
    with tf.GradientTape() as tape:
        loss = losses.triplet_margin(tf.constant([[0, 1, 2]]), vectors, margin=1.0)
    assert np.isfinite(tape.gradient(loss, vectors)).all()


def test_matryoshka_is_the_mean_over_prefixes():
    vectors = tf.random.stateless_normal((2, 2, 4), (1, 2))

    def loss(sizes):
        return losses.embedding_loss(tf.zeros(2), vectors, ONES, "cosine", 1.0, False, 1.0, sizes)

    expected = (losses.cosine_error(tf.zeros(2), vectors[..., :2]) + loss(())) / 2
    np.testing.assert_allclose(loss((2, 4)), expected, rtol=1e-6)


def test_distances_of_prefixes_are_those_of_vectors_of_length_1():
    # (1, 0), (0.6, 0.8) and (0, 1); (0.8, 0, 0.6), (0.6, 0.8, 0) and (0, 1, 0).
    vectors = tf.constant([[[4.0, 0.0, 3.0], [3.0, 4.0, 0.0], [0.0, 2.0, 0.0]]])
    texts = tf.constant([[0, 1, 2]])
    loss = losses.embedding_loss(texts, vectors, ONES[:1], "triplet", 1.0, False, 1.0, (2, 3))
    of_prefixes = 0.8**0.5 - 2**0.5 + 1.0
    of_all = 1.04**0.5 - 2**0.5 + 1.0
    np.testing.assert_allclose(loss, [(of_prefixes + of_all) / 2], rtol=1e-5)


def test_the_positives_of_a_text_alone_are_the_others_of_its_class():
    # Cosines: 0.6 of the two texts of a class, 0 and 0.8 to the one of another class.
    vectors = tf.constant([[[1.0, 0.0]], [[3.0, 4.0]], [[0.0, 2.0]]])
    classes, ones = tf.constant([[0], [0], [1]]), tf.ones(3)
    first = math.log(1 + math.exp((0.0 - 0.6) / 0.5))
    second = math.log(1 + math.exp((0.8 - 0.6) / 0.5))
    # The last one is alone: it changes no mean.
    expected = [first, second, (first + second) / 2]
    for symmetric in (False, True):
        values = losses.in_batch_negatives(classes, vectors, ones, 0.5, symmetric).numpy()
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    values = losses.in_batch_negatives(classes[:, 0], vectors, ones, 0.5)  # As Keras passes them.
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    padded = losses.in_batch_negatives(classes, vectors, tf.constant([1.0, 1.0, 0.0]), 0.5)
    np.testing.assert_allclose(padded[:2], [0.0, 0.0], atol=1e-6)
    # With three of a class, the loss is the mean over both positives, each against the negatives.
    vectors = tf.concat([vectors, [[[1.0, 0.0]]]], axis=0)
    values = losses.in_batch_negatives(tf.constant([[0], [0], [1], [0]]), vectors, tf.ones(4), 0.5)
    expected = (first + math.log(1 + math.exp((0.0 - 1.0) / 0.5))) / 2
    np.testing.assert_allclose(values[0], expected, rtol=1e-5)


def test_a_graph_takes_any_number_of_texts_per_row():
    @tf.function(
        input_signature=[
            tf.TensorSpec((None, None), tf.int32),
            tf.TensorSpec((None, None, 2)),
            tf.TensorSpec((None,)),
        ]
    )
    def graph(texts, vectors, weights):
        return losses.embedding_loss(texts, vectors, weights, "contrastive", 0.5, True, 1.0)

    texts = tf.constant([[0, 1, 2], [3, 4, 5]])
    for count in (1, 2, 3):
        rows = texts[:, :count], pairs()[:, :count], ONES
        expected = losses.embedding_loss(*rows, "contrastive", 0.5, True, 1.0)
        np.testing.assert_allclose(graph(*rows), expected, rtol=1e-6)
