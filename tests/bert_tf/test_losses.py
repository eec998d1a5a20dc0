"""Losses by hand, against float64 NumPy, and at logits where a naive formula overflows."""

import functools
import inspect
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model.layout import MASKED_SCORE
from bert_tf.train import losses
from bert_tf.train.losses import (
    WeightedMean,
    half_softmax_cross_entropy,
    multi_label_cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
)
from tests import reference

EXTREMES = [-1e30, -1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4, 1e30]
GAMMAS = [0.0, 0.5, 1.0, 2.0, 5.0]


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def with_gradient(loss, logits):
    logits = tf.constant(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values = loss(logits)
    return values.numpy(), tape.gradient(values, logits).numpy()


def test_focal_losses_by_hand():
    """Use p = 1/4 and gamma = 2: the loss is (3/4)^2 log 4."""
    expected = 0.5625 * math.log(4)
    logits_BC = np.log([[0.25, 0.75, 1e-30], [0.7, 0.05, 0.25]])
    np.testing.assert_allclose(
        softmax_cross_entropy(np.array([0, 2]), logits_BC, gamma=2.0), [expected] * 2, 1e-5
    )
    logit = math.log(3)
    np.testing.assert_allclose(
        sigmoid_cross_entropy(np.array([0, 1]), np.array([[logit], [-logit]]), gamma=2.0),
        [expected] * 2,
        1e-5,
    )
    # The second label of the first text and the first label of the second have probability 1.
    np.testing.assert_allclose(
        multi_label_cross_entropy(
            np.array([[0, 1], [0, 1]]), np.array([[logit, 50.0], [-50.0, -logit]]), gamma=2.0
        ),
        [expected / 2] * 2,
        1e-5,
    )


@pytest.mark.parametrize("gamma", GAMMAS)
def test_focal_losses_equal_the_formula(gamma):
    rng = np.random.default_rng(0)
    logits_BLC, labels_BL = rng.normal(0, 3, (4, 6, 5)), rng.integers(0, 5, (4, 6))
    probs_BLC = reference.softmax(logits_BLC)
    p = np.take_along_axis(probs_BLC, labels_BL[..., None], -1)[..., 0]
    actual = softmax_cross_entropy(labels_BL, logits_BLC, gamma)
    np.testing.assert_allclose(actual, -((1 - p) ** gamma) * np.log(p), rtol=1e-4, atol=1e-6)

    labels_BC, logits_BC = rng.integers(0, 2, (20, 3)), rng.normal(0, 3, (20, 3))
    p = np.where(labels_BC == 1, sigmoid(logits_BC), sigmoid(-logits_BC))
    expected_BC = -((1 - p) ** gamma) * np.log(p)
    np.testing.assert_allclose(
        multi_label_cross_entropy(labels_BC, logits_BC, gamma), expected_BC.mean(1), rtol=1e-4
    )
    np.testing.assert_allclose(
        sigmoid_cross_entropy(labels_BC[:, 0], logits_BC[:, :1], gamma),
        expected_BC[:, 0],
        rtol=1e-4,
    )


@pytest.mark.parametrize("gamma", GAMMAS)
def test_focal_losses_and_their_gradients_stay_finite_as_p_goes_to_0_and_1(gamma):
    """Check p = 1, where (1 - p)^gamma has an infinite slope for gamma < 1, and p = 0 (log p)."""
    logits = np.array(EXTREMES)
    for label in (0, 1):
        labels = np.full(len(logits), label)
        values, slopes = with_gradient(
            lambda z, labels=labels: sigmoid_cross_entropy(labels, z, gamma), logits[:, None]
        )
        pairs = np.stack([np.zeros_like(logits), logits], axis=1)
        of_two, slopes_of_two = with_gradient(
            lambda z, labels=labels: softmax_cross_entropy(labels, z, gamma), pairs
        )
        for array in (values, slopes, of_two, slopes_of_two):
            assert np.isfinite(array).all()
        # For two classes, softmax is the sigmoid of the difference.
        np.testing.assert_allclose(of_two, values, rtol=1e-5)
        np.testing.assert_allclose(slopes_of_two[:, 1:], slopes, rtol=1e-4, atol=1e-6)
        # Certain and wrong: the loss is the distance, its slope 1. Certain and right: both are 0.
        wrong, right = (0, -1) if label else (-1, 0)
        assert values[wrong] == pytest.approx(1e30) and values[right] == 0
        np.testing.assert_allclose(slopes[[wrong, right], 0], [1 - 2 * label, 0])


def test_the_gradient_of_a_focal_loss_equals_a_finite_difference():
    rng = np.random.default_rng(1)
    labels_B, logits_BC = rng.integers(0, 4, 6), rng.normal(0, 2, (6, 4))

    def exact(logits_BC):
        p = reference.softmax(logits_BC)[np.arange(6), labels_B]
        return -((1 - p) ** 1.5) * np.log(p)

    _, slopes = with_gradient(lambda z: softmax_cross_entropy(labels_B, z, gamma=1.5), logits_BC)
    for column in range(4):
        step = 1e-5 * np.eye(4)[column]
        expected = (exact(logits_BC + step) - exact(logits_BC - step)) / 2e-5
        np.testing.assert_allclose(slopes[:, column], expected, rtol=1e-3, atol=1e-5)


def test_cross_entropies_of_labels_tokens_and_spans_equal_numpy():
    np.testing.assert_allclose(
        multi_label_cross_entropy(
            np.array([[1, 0], [1, 1]]), np.log([[3.0, 1 / 3], [1.0, 1.0]]).astype(np.float32)
        ),
        [-math.log(0.75), math.log(2)],
        rtol=1e-6,
    )
    logits_BLC = np.log([[[0.25, 0.75], [0.5, 0.5]]])
    np.testing.assert_allclose(
        softmax_cross_entropy(np.array([[0, 1]]), logits_BLC), [[math.log(4), math.log(2)]], 1e-6
    )
    # A span of three tokens from the second to the third; the last token is masked out.
    start_BL, end_BL = np.log([[0.5, 0.25, 0.25]]), np.log([[0.75, 0.125, 0.125]])
    start_BL, end_BL = (np.append(logits, [[-1e9]], axis=1) for logits in (start_BL, end_BL))
    both = half_softmax_cross_entropy(np.array([1]), start_BL) + half_softmax_cross_entropy(
        np.array([2]), end_BL
    )
    np.testing.assert_allclose(both, [(math.log(4) + math.log(8)) / 2], rtol=1e-6)


def test_squared_error_is_one_value_per_text():
    actual = squared_error(np.array([1.0, -2.0, 0.5]), np.array([[3.0], [-2.5], [0.5]], np.float32))
    np.testing.assert_array_equal(actual, [4.0, 0.25, 0.0])
    assert squared_error(np.array([1, 2]), np.zeros((2, 1))).dtype == tf.float32


def test_every_loss_survives_a_keras_config_and_keeps_its_gamma():
    """Serialize by name and options alone, so that a saved, compiled model can be loaded."""
    labels_B, logits_BC = np.array([0, 1, 2]), np.random.default_rng(0).normal(size=(3, 3))
    weights_B = np.array([1.0, 0.0, 2.0])
    given = {
        softmax_cross_entropy: labels_B,
        half_softmax_cross_entropy: labels_B,
        multi_label_cross_entropy: np.eye(3),
        squared_error: labels_B,
        sigmoid_cross_entropy: labels_B > 0,
    }
    for function, labels in given.items():
        has_gamma = "gamma" in inspect.signature(function).parameters
        for options in ({}, {"gamma": 1.5}) if has_gamma else ({},):
            bound = functools.partial(function, **options)
            loss = WeightedMean(bound if options else function)
            config = keras.saving.serialize_keras_object(loss)
            name = function.__name__
            assert config["config"] == {"loss": name, "name": name, **options}
            again = keras.saving.deserialize_keras_object(config)
            values_B = bound(labels, logits_BC).numpy()
            for one in (loss, again):
                assert float(one(labels, logits_BC, sample_weight=weights_B)) == pytest.approx(
                    (values_B * weights_B).sum() / 3, rel=1e-5
                ), name


def test_labels_and_weights_of_one_column_are_vectors():
    """Keras passes both shapes; broadcast with losses `(B,)`, columns would give `(B, B)`."""
    column = [[1.0], [3.0]]
    loss = WeightedMean("squared_error")
    assert float(loss(column, column)) == 0
    for weights in ([1.0, 0.0], [[1.0], [0.0]]):
        assert float(loss([1.0, 3.0], [[3.0], [9.0]], weights)) == 4
    rng = np.random.default_rng(0)
    logits_BLC, ids_BL = rng.normal(size=(3, 4, 5)), rng.integers(0, 2, (3, 4))
    logits_B1, ids_B = logits_BLC[:, 0, :1], ids_BL[:, 0]
    focal_softmax, focal_sigmoid, focal_multi_label = (
        functools.partial(function, gamma=1.5)
        for function in (softmax_cross_entropy, sigmoid_cross_entropy, multi_label_cross_entropy)
    )
    of_classes = [softmax_cross_entropy, half_softmax_cross_entropy, focal_softmax]
    for function in (*of_classes, losses.vocab_cross_entropy, losses.is_correct):
        actual_BL = function(ids_BL[..., None], logits_BLC)
        np.testing.assert_array_equal(actual_BL, function(ids_BL, logits_BLC))
    for function in (squared_error, sigmoid_cross_entropy, focal_sigmoid, losses.is_correct):
        actual_B = function(ids_B[:, None], logits_B1)
        np.testing.assert_array_equal(actual_B, function(ids_B, logits_B1))
    # A column of multi-hot labels is one label.
    for function, of_one_label in (
        (multi_label_cross_entropy, sigmoid_cross_entropy),
        (focal_multi_label, focal_sigmoid),
    ):
        actual_B = function(ids_B[:, None], logits_B1)
        np.testing.assert_allclose(actual_B, of_one_label(ids_B, logits_B1), rtol=1e-6)


def test_weights_of_examples_hold_for_all_their_elements():
    logits_BLC, ids_BL = np.random.default_rng(0).normal(size=(3, 3, 5)), np.zeros((3, 3), np.int32)
    loss, weights_B = WeightedMean(softmax_cross_entropy), np.array([1.0, 0.0, 3.0])
    expected = loss(ids_BL, logits_BLC, np.repeat(weights_B[:, None], 3, axis=1))
    for weights in (weights_B, weights_B[:, None]):
        np.testing.assert_allclose(loss(ids_BL, logits_BLC, weights), expected, rtol=1e-6)


def test_divergences_by_hand():
    """Use T = 2 and a teacher of probability 3/4 at T, a student of 1/2: four times the KL."""
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    logit = 2 * math.log(3)
    by_softmax = losses.softmax_divergence(
        np.array([[logit, 0.0], [1.0, 2.0]]), np.array([[5.0, 5.0], [1.5, 2.5]]), temperature=2.0
    )
    np.testing.assert_allclose(by_softmax, [4 * divergence, 0.0], rtol=1e-5, atol=1e-6)
    by_half = losses.half_softmax_divergence(np.array([[logit, 0.0]]), np.zeros((1, 2)), 2.0)
    np.testing.assert_allclose(by_half, [2 * divergence], rtol=1e-5)
    # One logit for two labels is the same distribution; of two labels the second one agrees.
    for teacher, student, expected in (
        ([[logit]], [[0.0]], 4 * divergence),
        ([[-logit, 1.0]], [[0.0, 1.0]], 2 * divergence),
    ):
        by_sigmoid = losses.sigmoid_divergence(np.array(teacher), np.array(student), 2.0)
        np.testing.assert_allclose(by_sigmoid, [expected], rtol=1e-5)
    values = losses.squared_difference(np.array([[3.0]]), np.array([[1.0]]), temperature=2.0)
    np.testing.assert_array_equal(values, [4.0])


def test_softmax_divergence_ignores_what_the_student_masks():
    """Compare with the distribution without the padding, which the teacher's array fills with 0."""
    teacher, student = np.array([[1.0, 3.0]]), np.array([[2.0, 0.5]])
    expected = losses.softmax_divergence(teacher, student, 2.0)
    padded = losses.softmax_divergence(
        np.pad(teacher, [(0, 0), (0, 2)]),
        np.pad(student, [(0, 0), (0, 2)], constant_values=MASKED_SCORE),
        2.0,
    )
    np.testing.assert_allclose(padded, expected, rtol=1e-6)


@pytest.mark.parametrize("loss", [losses.softmax_divergence, losses.sigmoid_divergence])
def test_gradients_of_divergences_equal_finite_differences(loss):
    rng = np.random.default_rng(0)
    teacher, student = rng.normal(0, 2, (2, 3, 4))

    def in_float64(logits):
        t, s = teacher / 1.5, logits / 1.5
        if loss is losses.softmax_divergence:
            p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (t, s))
            return 2.25 * (p * np.log(p / q)).sum(-1)
        p, q = sigmoid(t), sigmoid(s)
        return 2.25 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(-1)

    values, gradients = with_gradient(lambda logits: loss(teacher, logits, 1.5), student)
    np.testing.assert_allclose(values, in_float64(student), rtol=1e-5)
    step = 1e-5
    for column in range(4):
        change = step * np.eye(4)[column]
        expected = (in_float64(student + change) - in_float64(student - change)) / (2 * step)
        np.testing.assert_allclose(gradients[:, column], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [losses.softmax_divergence, losses.sigmoid_divergence])
def test_divergences_are_finite_at_extremes(loss):
    teacher, student = (np.array(values) for values in ([[1e4, -1e4]], [[-1e4, 1e4]]))
    values, gradients = with_gradient(lambda logits: loss(teacher, logits, 2.0), student)
    assert np.isfinite(values).all() and np.isfinite(gradients).all()
    assert (values > 1e3).all()


@pytest.mark.parametrize(
    "name",
    ["sigmoid_cross_entropy", "softmax_cross_entropy", "multi_label_cross_entropy"],
)
def test_a_focal_loss_saved_by_its_own_name_is_read(name):
    loss = WeightedMean.from_config({"loss": f"focal_{name}", "name": "loss", "gamma": 1.5})
    assert loss.function is getattr(losses, name) and loss.options == {"gamma": 1.5}
