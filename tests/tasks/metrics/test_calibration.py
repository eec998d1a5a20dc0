"""Calibration: by hand, against brute-force search, and at the edges."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.metrics.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    bound_of_temperature,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
)


def test_calibration_error_by_hand():
    # Two bins, up to 0.5 and above: 0.5 right; 0.6 wrong, 0.8 right.
    probabilities = np.array([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]])
    error = expected_calibration_error(probabilities, np.array([0, 1, 2]), bins=2)
    assert error == pytest.approx((1 * abs(1 - 0.5) + 2 * abs(0.5 - 0.7)) / 3)


def test_calibration_error_equals_a_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        probabilities = rng.dirichlet([0.5, 0.5, 0.5], rng.integers(1, 80))
        labels = rng.integers(0, 3, len(probabilities))
        confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
        expected = 0.0
        for k in range(15):
            inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
            if inside.any():
                expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
        assert expected_calibration_error(probabilities, labels) == pytest.approx(expected)


def test_calibration_error_at_the_edges():
    assert expected_calibration_error(np.zeros((0, 2)), np.array([], int)) == 0
    assert expected_calibration_error(np.array([[0.0, 1.0]]), np.array([1])) == 0
    assert expected_calibration_error(np.array([[0.0, 1.0]]), np.array([0])) == 1
    with pytest.raises(ValueError, match="shapes"):
        expected_calibration_error(np.ones((3, 1)), np.zeros((3, 1), int))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def drawn(kind, rng, temperature, examples=400):
    """Return logits, and labels drawn from their probabilities at that temperature."""
    if kind == "softmax":
        logits = rng.normal(0, 3, (examples, 4))
        probabilities = softmax(logits / temperature)
        return logits, np.array([rng.choice(4, p=row) for row in probabilities])
    logits = rng.normal(0, 3, (examples, 1 if kind == "one sigmoid" else 3))
    labels = rng.random(logits.shape) < sigmoid(logits / temperature)
    return logits, labels[:, 0].astype(np.int32) if kind == "one sigmoid" else labels


def plain_loss(logits, labels, kind, temperature):
    if kind == "softmax":
        probabilities = softmax(logits / temperature)
        return -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    signs = np.where(np.reshape(labels, logits.shape), 1, -1)
    return -np.log(sigmoid(signs * logits / temperature)).mean()


@pytest.mark.parametrize("kind", ["softmax", "one sigmoid", "multi-label"])
def test_the_temperature_minimizes_the_loss(kind):
    rng = np.random.default_rng(1)
    mode = kind if kind == "softmax" else "sigmoid"
    for true in (0.4, 1.0, 2.5, 6.0):
        logits, labels = drawn(kind, rng, true)
        found = fit_temperature(logits.astype(np.float32), labels, mode)
        # Thirds of the range around the minimum of a loss that has only one.
        low, high = MIN_TEMPERATURE, MAX_TEMPERATURE
        while high - low > 1e-6:
            first, second = low + (high - low) / 3, high - (high - low) / 3
            if plain_loss(logits, labels, kind, first) < plain_loss(logits, labels, kind, second):
                high = second
            else:
                low = first
        best = (low + high) / 2
        assert found == pytest.approx(best, rel=1e-4)
        assert found == pytest.approx(true, rel=0.3)
        for temperature in (1.0, found):
            assert negative_log_likelihood(logits, labels, mode, temperature) == pytest.approx(
                plain_loss(logits, labels, kind, temperature)
            )


def test_the_temperature_by_hand():
    # Three of four right at a logit of 2: sigmoid(2 / T) = 3 / 4, that is, 2 / T = log(3).
    logits, labels = np.full((4, 1), 2.0), np.array([1, 1, 1, 0])
    two = np.concatenate([np.zeros((4, 1)), logits], axis=1)
    for found in (
        fit_temperature(logits, labels, "sigmoid"),
        fit_temperature(two, labels, "softmax"),
    ):
        assert found == pytest.approx(2 / np.log(3), abs=5e-7)
    entropy = -(3 * np.log(3 / 4) + np.log(1 / 4)) / 4
    loss = negative_log_likelihood(logits, labels, "sigmoid", 2 / np.log(3))
    assert loss == pytest.approx(entropy, rel=1e-12)


def test_the_temperature_is_never_worse_than_1():
    rng = np.random.default_rng(2)
    for _ in range(100):
        logits = rng.normal(0, rng.choice([1e-6, 1, 1e3]), (rng.integers(1, 6), 2))
        for labels, kind in (
            (rng.integers(0, 2, len(logits)), "softmax"),
            (rng.random(logits.shape) < 0.5, "sigmoid"),
        ):
            found = fit_temperature(logits, labels, kind)
            assert MIN_TEMPERATURE <= found <= MAX_TEMPERATURE
            loss = negative_log_likelihood(logits, labels, kind, found)
            assert loss <= negative_log_likelihood(logits, labels, kind)


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("kind", ["softmax", "one sigmoid", "multi-label"])
def test_at_a_bound_of_the_search_the_temperature_stays_1(kind, size):
    """Use rows without errors, on which the loss decreases with T without limit."""
    rng = np.random.default_rng(3)
    columns, mode = {"softmax": (4, "softmax"), "one sigmoid": (1, "sigmoid")}.get(
        kind, (3, "sigmoid")
    )
    logits = rng.normal(0, size, (50, columns))
    right = logits.argmax(1) if mode == "softmax" else logits > 0
    wrong = logits.argmin(1) if mode == "softmax" else logits < 0
    for labels, bound in ((right, MIN_TEMPERATURE), (wrong, MAX_TEMPERATURE)):
        assert bound_of_temperature(logits, labels, mode) == bound
        assert fit_temperature(logits, labels, mode) == 1.0
    # With one error, the data have an optimal temperature.
    mixed = right.copy()
    mixed[0] = wrong[0]
    if size == 1.0:
        assert bound_of_temperature(logits, mixed, mode) is None
        assert fit_temperature(logits, mixed, mode) != 1.0


def test_the_temperature_at_the_edges():
    logits, labels = np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 1])
    # Every temperature is equally good.
    assert fit_temperature(np.zeros((3, 2)), np.array([0, 1, 1]), "softmax") == 1
    assert fit_temperature(np.zeros((0, 2)), np.array([], int), "softmax") == 1
    assert fit_temperature(np.zeros((0, 1)), np.array([], int), "sigmoid") == 1
    assert negative_log_likelihood(np.zeros((0, 2)), np.array([], int), "softmax") == 0
    with pytest.raises(ValueError, match="kind 'tanh': expected one of softmax, sigmoid"):
        fit_temperature(logits, labels, "tanh")
    with pytest.raises(UserError, match="logits: .* received 1 of 4 that are NaN"):
        fit_temperature(np.array([[2.0, np.nan], [0.0, 3.0]]), labels, "softmax")
