"""Compiled fused operations against their plain formulas, and the dropout mask."""

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model import fused_kernels, fused_ops

SEED = tf.constant([7, 5], tf.int64)
RATE = 0.1
# Tolerances for values and gradients of a few units; bfloat16 has 8 bits.
TOLERANCES = {tf.float32: 2e-5, tf.bfloat16: 2e-2}
# Narrow matrices use the plain formula.
WIDTHS = pytest.mark.parametrize("width", [3, fused_kernels.MIN_WIDTH + 1])
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)


def plain_dropout(x, rate, dropout_id):
    keep = fused_kernels.dropout_mask(
        tf.shape(x), rate, SEED + tf.constant([0, dropout_id], tf.int64)
    )
    return tf.where(keep, x / (1 - rate), 0.0)


def plain_norm(x, gamma, beta, epsilon):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + epsilon) * gamma + beta


def normal(shape, dtype=tf.float32, seed=0):
    return tf.cast(np.random.default_rng(seed).normal(size=shape) * 1.5, dtype)


def merge(context):
    """Merge heads `(B, N, L, D)` into `(B * L, N * D)`."""
    return tf.reshape(
        tf.transpose(context, [0, 2, 1, 3]), [-1, context.shape[1] * context.shape[3]]
    )


def split_like(context):
    """Return the function that splits the output of `merge` into heads again."""
    batch, heads, length, head_size = context.shape
    grid = [batch, length, heads, head_size]
    return lambda merged: tf.transpose(tf.reshape(merged, grid), [0, 2, 1, 3])


def values_and_gradients(function, arguments, upstream):
    """Return the result and the gradient of each argument as float64 arrays."""
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        result = function(*arguments)
    gradients = tape.gradient(result, arguments, output_gradients=tf.cast(upstream, result.dtype))
    return [tf.cast(value, tf.float64).numpy() for value in (result, *gradients)]


def assert_like_plain(kernel, plain, arguments, shape, dtype):
    """Compare in a graph of unknown shapes; both compute in float32, the kernel takes `dtype`."""
    upstream = normal(shape, dtype, seed=9)
    specs = [tf.TensorSpec(unknown(value.shape), value.dtype) for value in arguments]
    in_graph = tf.function(
        lambda *arguments: values_and_gradients_in_graph(kernel, arguments, upstream),
        input_signature=specs,
    )
    wide = [tf.cast(value, tf.float32) for value in arguments]
    expected = values_and_gradients(plain, wide, upstream)
    for actual, reference in zip(in_graph(*arguments), expected, strict=True):
        assert actual.dtype in (dtype, tf.float32)
        actual = tf.cast(actual, tf.float64).numpy()
        scale = max(1.0, np.abs(reference).max())
        np.testing.assert_allclose(actual, reference, rtol=0, atol=TOLERANCES[dtype] * scale)


def unknown(shape):
    """Make the number of rows, and the length L of [B, N, L, D], unknown to the graph."""
    return [None, shape[1], None, shape[3]] if shape.rank == 4 else [None, *shape[1:]]


def values_and_gradients_in_graph(function, arguments, upstream):
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        result = function(*arguments)
    return [result, *tape.gradient(result, arguments, output_gradients=upstream)]


@DTYPES
@WIDTHS
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu(dtype, approximate, width):
    x = tf.concat([normal([5, width], dtype), tf.fill([1, width], tf.cast(20, dtype))], axis=0)
    x = tf.concat([x, -x[-1:], tf.zeros_like(x[:1])], axis=0)
    assert_like_plain(
        lambda x: fused_ops.gelu(x, approximate),
        lambda x: tf.nn.gelu(x, approximate=approximate),
        [x],
        [8, width],
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (37, 3), (37, fused_kernels.MIN_WIDTH + 1)])
def test_dropout_add_norm(dtype, rate, rows, width):
    shape = [rows, width]
    gamma, beta = normal(shape[1:], seed=2), normal(shape[1:], seed=3)
    arguments = [normal(shape, dtype), normal(shape, dtype, seed=1), gamma, beta]

    def plain(x, residual, gamma, beta):
        x = plain_dropout(x, rate, 3) if rate else x
        summed = x + residual
        if dtype == tf.bfloat16:  # The backward pass keeps it in that dtype.
            summed = summed + tf.stop_gradient(tf.cast(tf.cast(summed, dtype), tf.float32) - summed)
        return plain_norm(summed, gamma, beta, 0.01)

    assert_like_plain(
        lambda *arguments: fused_ops.dropout_add_norm(*arguments, 0.01, rate, SEED, 3)[0],
        plain,
        arguments,
        shape,
        dtype,
    )


@DTYPES
@WIDTHS
def test_norm_of_rows_far_from_zero(dtype, width):
    """Use values for which a variance computed as E[x^2] - E[x]^2 is lost in float32."""
    x = tf.cast(30 + normal([11, width]), dtype)
    arguments = [x, normal([width], seed=2), normal([width], seed=3)]
    assert_like_plain(
        lambda *arguments: fused_ops.norm(*arguments, 1e-12),
        lambda *arguments: plain_norm(*arguments, 1e-12),
        arguments,
        [11, width],
        dtype,
    )


@DTYPES
@WIDTHS
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_linear(dtype, approximate, width):
    """Compare with the plain formula; a bias gradient over 300 rows would be lost in bfloat16."""
    arguments = [
        normal([300, width], dtype),
        normal([width, 2], dtype, seed=1) / width,
        normal([2], dtype, seed=2),
    ]
    assert_like_plain(
        lambda *arguments: fused_ops.gelu_linear(*arguments, approximate),
        lambda x, kernel, bias: tf.nn.gelu(x, approximate=approximate) @ kernel + bias,
        arguments,
        [300, 2],
        dtype,
    )


@DTYPES
@WIDTHS
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_products_with_a_recomputed_norm(dtype, rate, width):
    """Use all outputs, with different weights; a small gamma would be lost in a division."""
    shape = [300, width]
    gamma, beta = normal([width], seed=2) * [1e-4, *[1] * (width - 1)], normal([width], seed=3)
    kernels = [normal([width, 2], dtype, seed=seed) / width for seed in (4, 5)]
    biases = [normal([2], dtype, seed=seed) for seed in (6, 7)]
    inputs = [normal(shape, dtype), normal(shape, dtype, seed=1), gamma, beta]

    def plain(x, residual, gamma, beta, *weights):
        summed = (plain_dropout(x, rate, 3) if rate else x) + residual
        if dtype == tf.bfloat16:
            summed = summed + tf.stop_gradient(tf.cast(tf.cast(summed, dtype), tf.float32) - summed)
        normed = plain_norm(summed, gamma, beta, 0.01)
        products = (normed @ weights[0] + weights[2], normed @ weights[1] + weights[3])
        return tf.concat([normed, *products], axis=1)

    def fused(x, residual, gamma, beta, *weights):
        normed, recompute = fused_ops.dropout_add_norm(
            x, residual, gamma, beta, 0.01, rate, SEED, 3
        )
        products = fused_ops.linears(normed, weights[:2], weights[2:], recompute)
        return tf.concat([normed, *products], axis=1)

    assert_like_plain(fused, plain, [*inputs, *kernels, *biases], [300, width + 4], dtype)


def test_a_recomputed_input_is_not_kept():
    """Let the input be recomputed as another value: only the kernel's gradient is of that value."""
    x, kernel, bias = normal([7, 3]), normal([3, 2], seed=1), tf.zeros(2)
    _, *kept = values_and_gradients(
        lambda x, kernel, bias: fused_ops.linears(x, [kernel], [bias])[0],
        [x, kernel, bias],
        normal([7, 2], seed=2),
    )
    _, *recomputed = values_and_gradients(
        lambda x, kernel, bias: fused_ops.linears(x, [kernel], [bias], lambda: 2 * x)[0],
        [x, kernel, bias],
        normal([7, 2], seed=2),
    )
    for gradient, other, factor in zip(kept, recomputed, (1, 2, 1), strict=True):
        np.testing.assert_array_equal(factor * gradient, other)


@DTYPES
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("head_size", [4, 64])
def test_attention_linear(dtype, rate, head_size):
    """Mask 4 of 9 tokens of one text in a batch of two, with a product of 12 outputs."""
    shape, hidden = [2, 3, 9, head_size], 3 * head_size
    queries, keys, values = (normal(shape, dtype, seed=number) for number in range(3))
    kernel, bias = normal([hidden, 12], dtype, seed=3) / hidden, normal([12], dtype, seed=4)
    key_bias = tf.where(tf.sequence_mask([9, 5]), 0.0, -1e9)[:, tf.newaxis, tf.newaxis]

    def plain(queries, keys, values, kernel, bias):
        scores = tf.matmul(queries, keys, transpose_b=True)
        probs = tf.nn.softmax(scores * head_size**-0.5 + key_bias)
        context = (plain_dropout(probs, rate, 2) if rate else probs) @ values
        return merge(context) @ kernel + bias

    def fused(*arguments):
        options = (key_bias, merge, split_like(queries), rate, SEED, 2)
        return fused_ops.attention_linear(*arguments, *options)

    assert_like_plain(fused, plain, [queries, keys, values, kernel, bias], [18, 12], dtype)
    of_masked = tf.concat([values[:, :, :5], values[:, :, 5:] + 1000], axis=2)
    np.testing.assert_array_equal(
        fused(queries, keys, values, kernel, bias)[9:],
        fused(queries, keys, of_masked, kernel, bias)[9:],
    )


@DTYPES
@WIDTHS
def test_dropout(dtype, width):
    x = normal([6, width], dtype)
    assert_like_plain(
        lambda x: fused_ops.dropout(x, RATE, SEED, 1),
        lambda x: plain_dropout(x, RATE, 1),
        [x],
        [6, width],
        dtype,
    )
    assert fused_ops.dropout(x, RATE, None, 1) is x
    assert fused_ops.dropout(x, 0.0, SEED, 1) is x


@WIDTHS
def test_cross_entropy(width):
    logits = normal([5, width]) * 8
    labels = tf.constant([0, width - 1, 2, 2, 1])
    assert_like_plain(
        lambda logits: fused_ops.cross_entropy(labels, logits),
        lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
        [logits],
        [5],
        tf.float32,
    )


def mask(seed, shape=(400, 500), rate=RATE):
    return fused_kernels.dropout_mask(tf.constant(shape), rate, tf.constant(seed, tf.int64)).numpy()


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_dropout_rate_holds_everywhere(rate):
    kept = mask([3, 4], rate=rate)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / np.sqrt(kept.size)
    assert np.abs(kept.mean(axis=0) - (1 - rate)).max() < 6 * deviation / np.sqrt(400)
    assert np.abs(kept.mean(axis=1) - (1 - rate)).max() < 6 * deviation / np.sqrt(500)


def test_each_entry_is_dropped_equally_often_over_many_steps():
    """Check that the counts vary neither more nor less than by chance."""
    shape, steps = [32, 384], 252
    keeps = tf.function(lambda seed: fused_kernels.dropout_mask(tf.constant(shape), RATE, seed))
    counts = np.zeros(shape)
    for step in range(steps):
        counts += ~keeps(tf.constant([1, step * STEP + 1], tf.int64)).numpy()
    z = (counts - steps * RATE) / np.sqrt(steps * RATE * (1 - RATE))
    for deviations in (z, z.mean(axis=0) * np.sqrt(shape[0]), z.mean(axis=1) * np.sqrt(shape[1])):
        # The mean of n squared standard normal values has a variance of 2 / n.
        assert abs(np.square(deviations).mean() - 1) < 5 * np.sqrt(2 / deviations.size)
    assert abs(z.mean()) < 5 / np.sqrt(z.size)


def test_triples_of_neighbors_are_independent():
    """Test all eight patterns of three adjacent entries by Pearson's chi-squared test."""
    kept = mask([3, 4], shape=(600, 768), rate=0.5).astype(int)
    for triples in (kept.reshape(-1, 3), kept.reshape(-1, 3, 768).swapaxes(1, 2).reshape(-1, 3)):
        counts = np.bincount(triples @ [4, 2, 1], minlength=8)
        expected = len(triples) / 8
        # With 7 degrees of freedom, a value beyond 40 has a probability of one in a million.
        assert (np.square(counts - expected) / expected).sum() < 40


def correlation(one, other):
    """Return the correlation of two masks of equal rate, in standard deviations of chance."""
    one, other = one.ravel() - (1 - RATE), other.ravel() - (1 - RATE)
    return (one * other).mean() / (RATE * (1 - RATE)) * np.sqrt(one.size)


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 8, 64, 500, 512, 4096])
def test_neighbors_are_independent(lag):
    kept = mask([3, 4]).ravel()
    assert abs(correlation(kept[lag:], kept[:-lag])) < 5


# The train step counts its seeds like this; see its _dropout_seed.
STEP, REPLICA, BATCH = 2**32, 2**16, 2**32


@pytest.mark.parametrize(
    "other",
    {
        "place": [11, 5 * STEP + 1],
        "layer": [11, 5 * STEP + 3],
        "replica": [11, 5 * STEP + REPLICA],
        "step": [11, 6 * STEP],
        "far step": [11, (5 + 2**20) * STEP],
        "batch": [11 + BATCH, 5 * STEP],
        "seed": [12, 5 * STEP],
        "negative seed": [-11, 5 * STEP],
    }.items(),
    ids=lambda item: item[0],
)
def test_no_two_dropouts_share_a_mask(other):
    """Compare the masks unshifted and shifted by any number of entries."""
    one, two = (mask(seed).ravel() - (1 - RATE) for seed in ([11, 5 * STEP], other[1]))
    spectrum = np.fft.rfft(one) * np.conj(np.fft.rfft(two))
    at_all_shifts = np.fft.irfft(spectrum, one.size) / (RATE * (1 - RATE)) / np.sqrt(one.size)
    # This bounds the maximum of 200,000 draws from a normal distribution.
    assert np.abs(at_all_shifts).max() < 6.5


def test_a_step_is_reproducible():
    np.testing.assert_array_equal(mask([11, 5]), mask([11, 5]))
    assert (mask([11, 5]) != mask([11, 6])).any()


@pytest.mark.medium
def test_results_are_equal_in_an_xla_compiled_function():
    x, residual = normal([9, 128]), normal([9, 128], seed=1)
    gamma, beta = tf.ones(128), tf.zeros(128)

    def step(x):
        square = normal([128, 128], seed=8) / 16
        y, recompute = fused_ops.dropout_add_norm(x, residual, gamma, beta, 1e-6, RATE, SEED, 1)
        (more,) = fused_ops.linears(y, [square], [beta], recompute)
        y, _ = fused_ops.dropout_add_norm(y, more, gamma, beta, 1e-6, RATE, SEED, 4)
        y = fused_ops.gelu(fused_ops.dropout(y, RATE, SEED, 2), False)
        y = fused_ops.gelu_linear(y, normal([128, 128], seed=5) / 16, beta, False)
        queries = tf.tile(tf.reshape(y, [9, 2, 8, 8]), [1, 1, 1, 8])
        keys, values = (normal([9, 2, 8, 64], seed=number) for number in (7, 6))
        key_bias = tf.zeros([9, 1, 1, 8])
        return fused_ops.attention_linear(
            queries, keys, values, square, beta, key_bias, merge, split_like(keys), RATE, SEED, 3
        )

    def gradients(x):
        return values_and_gradients_in_graph(step, [x], normal([72, 128], seed=4))

    complete = tf.function(gradients, jit_compile=True)(x)
    for one, other in zip(complete, tf.function(gradients)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_mask_that_its_index_cannot_count_is_an_error():
    @tf.function
    def dropped(x):
        return fused_ops.dropout(x, RATE, SEED, 0)

    with pytest.raises(ValueError, match=r"dropout of 2147483648 values .*: expected fewer than"):
        dropped.get_concrete_function(tf.TensorSpec([2**20, 2**11]))
    with pytest.raises(tf.errors.InvalidArgumentError):  # The size is known when it runs.
        fused_kernels.dropout_mask(tf.constant([2**20, 2**11]), RATE, SEED)
