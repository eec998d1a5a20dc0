"""Fused elementwise operations of training, each compiled into one kernel by XLA.

TensorFlow runs a chain such as dropout + add + LayerNorm operation by operation, reading and
writing all of it in memory each time, and its gradient likewise. On a CPU that takes longer than
the matrix products in between. The matrix products stay outside, because XLA's are slow there. In a
step that is compiled as one (on a TPU, under Keras `fit`) the kernels are inlined.

XLA compiles a kernel per shape, which takes some tenths of a second. Bucketing keeps the number of
shapes small (bert_tf.bucketing), and models narrower than any published one run uncompiled.

Dropout masks are a hash of (seed, dropout_id, index). The backward pass recomputes them, so they
are never stored. `seed` is an int64 pair, and each dropout of a step has its own `dropout_id`.

Inference does not use this module: TensorFlow fuses its operations by itself, and other runtimes
have to be able to run them.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.random_bits import GAMMA, mix, xor_shift

_SQRT_HALF, _DENSITY_AT_0 = 0.7071067811865476, 0.3989422804014327  # 1/sqrt(2), 1/sqrt(2 pi).
_SQRT_2_OVER_PI, _CUBIC = 0.7978845608028654, 0.044715  # sqrt(2/pi); tanh form.

MIN_WIDTH = 128  # The hidden size of the smallest published model.


def fused_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function(*tensors, **options)` into a tf.function, compiled by XLA if wide.

    The wrapper takes the width as an additional first argument and compiles from `MIN_WIDTH` on.
    Options are Python constants. It is traced once per set of dtypes, ranks and options, whatever
    the shapes.
    """

    @functools.cache
    def traced(is_compiled, specs, options):
        signature = [tf.TensorSpec([None] * rank, dtype) for dtype, rank in specs]
        bound = functools.partial(function, **dict(options))
        return tf.function(
            bound, input_signature=signature, jit_compile=is_compiled, autograph=False
        )

    @functools.wraps(function)
    def call(width, *tensors, **options):
        specs = tuple((tensor.dtype, tensor.shape.rank) for tensor in tensors)
        function = traced(width >= MIN_WIDTH, specs, tuple(sorted(options.items())))
        return function(*tensors)

    return call


def dropout(x: tf.Tensor, rate: float, seed: tf.Tensor | None, dropout_id: int) -> tf.Tensor:
    """Apply dropout (Srivastava et al. 2014) with a recomputable mask.

    Args:
        x: `(..., H)`, float.
        rate: Probability of an element to be zeroed; the others are divided by 1 - rate.
        seed: int64 `(2,)`, or `None` for no dropout (inference).
        dropout_id: Identifies this dropout among those of a step.
    """
    if seed is None or rate == 0:
        return x
    seed = _at(seed, dropout_id)

    @tf.custom_gradient
    def dropped(x):
        return (
            _like(_dropout(x.shape[-1], x, seed, rate=rate), x),
            lambda upstream: _like(_dropout(x.shape[-1], upstream, seed, rate=rate), x),
        )

    return dropped(x)


def gelu(x: tf.Tensor, approximate: bool) -> tf.Tensor:
    """Apply `tf.nn.gelu`: x P(X <= x) for a standard normal X, or its tanh approximation."""

    @tf.custom_gradient
    def activated(x):
        def gradient(upstream):
            _, grad_x = _gelu_gradient(x.shape[-1], x, upstream, approximate=approximate)
            return _like(grad_x, x)

        return _like(_gelu(x.shape[-1], x, approximate=approximate), x), gradient

    return activated(x)


def gelu_linear(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, approximate: bool) -> tf.Tensor:
    """Return gelu(x) @ kernel + bias, without keeping gelu(x) for the backward pass.

    The kernel of GELU's gradient recomputes it, which adds 1 to 2% to a bfloat16 step.

    Args:
        x: `(T, F)`.
        kernel: `(F, H)`, of the dtype of `x`.
        bias: `(H,)`, of the same dtype.
        approximate: Selects the tanh approximation of GELU.

    Returns:
        `(T, H)`.
    """

    @tf.custom_gradient
    def projected(x, kernel, bias):
        inner = _like(_gelu(x.shape[-1], x, approximate=approximate), x)

        def gradient(upstream):
            grad_inner = tf.matmul(upstream, kernel, transpose_b=True)
            inner, grad_x = _gelu_gradient(x.shape[-1], x, grad_inner, approximate=approximate)
            grad_kernel = tf.matmul(_like(inner, x), upstream, transpose_a=True)
            # Unlike BiasAddGrad, reduce_sum accumulates bfloat16 in float32.
            return _like(grad_x, x), grad_kernel, tf.reduce_sum(upstream, 0)

        return tf.nn.bias_add(tf.matmul(inner, kernel), bias), gradient

    return projected(x, kernel, bias)


def dropout_add_norm(
    x: tf.Tensor,
    residual: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    epsilon: float,
    rate: float,
    seed: tf.Tensor,
    dropout_id: int,
) -> tf.Tensor:
    """Return LayerNorm(dropout(x) + residual).

    Statistics are float32. `x` and `residual` are `(T, H)`, `gamma` and `beta` float32 `(H,)`; the
    result is shaped like `x`, of its dtype.
    """
    seed = _at(seed, dropout_id)

    @tf.custom_gradient
    def normed(x, residual, gamma, beta):
        output, summed, mean, scale = _dropout_add_norm(
            x.shape[-1], x, residual, gamma, beta, seed, epsilon=epsilon, rate=rate
        )

        def gradient(upstream):
            grad_x, grad_residual, grad_gamma, grad_beta = _dropout_add_norm_gradient(
                x.shape[-1], summed, mean, scale, gamma, seed, upstream, rate=rate
            )
            return _like(grad_x, x), _like(grad_residual, x), _like(grad_gamma, gamma), grad_beta

        return _like(output, x), gradient

    return normed(x, residual, gamma, beta)


def norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Return LayerNorm(x) of `(T, H)`, with float32 statistics, in the dtype of `x`."""

    @tf.custom_gradient
    def normed(x, gamma, beta):
        output, mean, scale = _norm(x.shape[-1], x, gamma, beta, epsilon=epsilon)

        def gradient(upstream):
            grad_x, grad_gamma, grad_beta = _norm_gradient(
                x.shape[-1], x, mean, scale, gamma, upstream
            )
            return _like(grad_x, x), _like(grad_gamma, gamma), grad_beta

        return _like(output, x), gradient

    return normed(x, gamma, beta)


def attention_context(
    queries: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    bias: tf.Tensor,
    rate: float,
    seed: tf.Tensor,
    dropout_id: int,
) -> tf.Tensor:
    """Return dropout(softmax(queries @ keys^T / sqrt(D) + bias)) @ values.

    Softmax and dropout are computed in float32. No tensor of L x L is kept for the backward pass,
    which computes the scores again: that product is small next to those with weights.

    Args:
        queries: `(B, N, L, D)`.
        keys: `(B, N, L, D)`, of the same dtype.
        values: `(B, N, L, D)`, of the same dtype.
        bias: float32, broadcastable to the scores `(B, N, L, L)`.
        rate: Dropout rate.
        seed: int64 `(2,)`.
        dropout_id: Identifies this dropout among those of a step.

    Returns:
        `(B, N, L, D)`.
    """
    seed = _at(seed, dropout_id)
    num_heads, head_size = queries.shape[1], queries.shape[3]
    width, options = num_heads * head_size, {"factor": head_size**-0.5, "rate": rate}

    @tf.custom_gradient
    def attended(queries, keys, values):
        scores = tf.matmul(queries, keys, transpose_b=True)
        dropped = _like(_softmax_dropout(width, scores, bias, seed, **options), scores)

        def gradient(upstream):
            # Without the dependency TensorFlow would merge both products and keep the first.
            with tf.control_dependencies([upstream]):
                scores = tf.matmul(queries, keys, transpose_b=True)
            grad_dropped = tf.matmul(upstream, values, transpose_b=True)
            dropped, grad_scores = (
                _like(of, scores)
                for of in _softmax_dropout_gradient(
                    width, scores, bias, seed, grad_dropped, **options
                )
            )
            return (
                tf.matmul(grad_scores, keys),
                tf.matmul(grad_scores, queries, transpose_a=True),
                tf.matmul(dropped, upstream, transpose_a=True),
            )

        return tf.matmul(dropped, values), gradient

    return attended(queries, keys, values)


def cross_entropy(labels_N: tf.Tensor, logits_NV: tf.Tensor) -> tf.Tensor:
    """Return -log softmax(logits)[label], float32 `(N,)`, for many classes V.

    `labels_N` is int32 `(N,)`, `logits_NV` float32 `(N, V)`.
    """
    width = logits_NV.shape[-1]

    @tf.custom_gradient
    def losses(logits_NV):
        losses_N, log_sum_N1 = _cross_entropy(width, labels_N, logits_NV)

        def gradient(upstream_N):
            grad_logits = _cross_entropy_gradient(
                width, labels_N, logits_NV, log_sum_N1, upstream_N
            )
            return _like(grad_logits, logits_NV)

        return _like(losses_N, labels_N), gradient

    return losses(logits_NV)


def dropout_mask(shape: tf.Tensor, rate: float, seed: tf.Tensor) -> tf.Tensor:
    """Return the mask of a dropout: True, with probability 1 - rate, for elements that are kept.

    The mask is a hash of (seed, index). The index is mixed with two keys: with only one, the masks
    of two seeds would be the same sequence at different offsets.

    Args:
        shape: int32 `(rank,)`.
        rate: Dropout rate.
        seed: int64 `(2,)`.
    """
    seed = tf.bitcast(seed, tf.uint64)
    key = mix(seed[0] + mix(seed[1] + GAMMA) + GAMMA)
    high = tf.cast(tf.bitwise.right_shift(key, np.uint64(32)), tf.uint32)
    x = tf.bitcast(tf.range(tf.reduce_prod(shape)), tf.uint32)
    x = (x ^ tf.cast(key, tf.uint32)) * np.uint32(0x9E3779B1)
    x = (xor_shift(x, 16) + high) * np.uint32(0x85EBCA6B)
    x = xor_shift(x, 13) * np.uint32(0xC2B2AE35)
    return tf.reshape(xor_shift(x, 16) >= np.uint32(int(rate * 2**32)), shape)


def _at(seed, dropout_id):
    return seed + tf.constant([0, dropout_id], tf.int64)


def _like(value, source):
    """Set the static shape of `source`; kernels know only the rank."""
    return tf.ensure_shape(value, source.shape)


def _scaled(x, rate, seed):
    """Return x in float32 with dropout applied."""
    x = tf.cast(x, tf.float32)
    return x if rate == 0 else tf.where(dropout_mask(tf.shape(x), rate, seed), x / (1 - rate), 0.0)


@fused_op
def _dropout(x, seed, *, rate):
    return tf.cast(_scaled(x, rate, seed), x.dtype)


@fused_op
def _gelu(x, *, approximate):
    wide = tf.cast(x, tf.float32)
    if approximate:
        inner = _SQRT_2_OVER_PI * (wide + _CUBIC * wide * wide * wide)
        return tf.cast(0.5 * wide * (1 + tf.tanh(inner)), x.dtype)
    return tf.cast(0.5 * wide * (1 + tf.math.erf(wide * _SQRT_HALF)), x.dtype)


@fused_op
def _gelu_gradient(x, upstream, *, approximate):
    """Return gelu(x) as well, which costs little here."""
    dtype, x, wide = x.dtype, tf.cast(x, tf.float32), tf.cast(upstream, tf.float32)
    if approximate:
        tanh = tf.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
        cdf = 0.5 * (1 + tanh)
        inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
        slope = cdf + 0.5 * x * (1 - tanh * tanh) * inner
    else:
        cdf = 0.5 * (1 + tf.math.erf(x * _SQRT_HALF))
        slope = cdf + x * tf.exp(-0.5 * x * x) * _DENSITY_AT_0
    return tf.cast(x * cdf, dtype), tf.cast(wide * slope, upstream.dtype)


@fused_op
def _norm(x, gamma, beta, *, epsilon):
    return _normed(x, gamma, beta, epsilon, x.dtype)


@fused_op
def _norm_gradient(x, mean, scale, gamma, upstream):
    grad_x, grad_gamma, grad_beta = _normed_gradient(x, mean, scale, gamma, upstream)
    return tf.cast(grad_x, x.dtype), grad_gamma, grad_beta


@fused_op
def _dropout_add_norm(x, residual, gamma, beta, seed, *, epsilon, rate):
    # The sum is rounded first, so that the backward pass reads the same values.
    summed = tf.cast(_scaled(x, rate, seed) + tf.cast(residual, tf.float32), x.dtype)
    output, mean, scale = _normed(summed, gamma, beta, epsilon, x.dtype)
    return output, summed, mean, scale


@fused_op
def _dropout_add_norm_gradient(summed, mean, scale, gamma, seed, upstream, *, rate):
    grad_sum, grad_gamma, grad_beta = _normed_gradient(summed, mean, scale, gamma, upstream)
    grad_x = _scaled(grad_sum, rate, seed)
    return tf.cast(grad_x, summed.dtype), tf.cast(grad_sum, summed.dtype), grad_gamma, grad_beta


def _normed(x, gamma, beta, epsilon, dtype):
    """Return LayerNorm `(T, H)` in `dtype`, and mean and 1 / stddev, float32 `(T, 1)`."""
    x = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x, -1, keepdims=True)
    centered = x - mean
    scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), -1, keepdims=True) + epsilon)
    return tf.cast(centered * scale * gamma + beta, dtype), mean, scale


def _normed_gradient(x, mean, scale, gamma, upstream):
    """Return the float32 gradients of x `(T, H)`, gamma `(H,)` and beta `(H,)`."""
    normed = (tf.cast(x, tf.float32) - mean) * scale
    upstream = tf.cast(upstream, tf.float32)
    grad_normed = upstream * gamma
    along = tf.reduce_mean(grad_normed * normed, -1, keepdims=True)
    grad_x = scale * (grad_normed - tf.reduce_mean(grad_normed, -1, keepdims=True) - normed * along)
    return grad_x, tf.reduce_sum(upstream * normed, 0), tf.reduce_sum(upstream, 0)


def _softmax(scores, bias, factor):
    scores = tf.cast(scores, tf.float32) * factor + bias
    exp = tf.exp(scores - tf.reduce_max(scores, -1, keepdims=True))
    return exp / tf.reduce_sum(exp, -1, keepdims=True)


@fused_op
def _softmax_dropout(scores, bias, seed, *, factor, rate):
    return tf.cast(_scaled(_softmax(scores, bias, factor), rate, seed), scores.dtype)


@fused_op
def _softmax_dropout_gradient(scores, bias, seed, upstream, *, factor, rate):
    """Return the output of the forward pass as well, which costs little here."""
    dtype, probs = scores.dtype, _softmax(scores, bias, factor)
    dropped = _scaled(probs, rate, seed)
    grad_probs = _scaled(upstream, rate, seed)
    along = tf.reduce_sum(grad_probs * probs, -1, keepdims=True)
    return tf.cast(dropped, dtype), tf.cast(factor * probs * (grad_probs - along), dtype)


@fused_op
def _cross_entropy(labels, logits):
    largest = tf.reduce_max(logits, -1, keepdims=True)
    log_sum = largest + tf.math.log(tf.reduce_sum(tf.exp(logits - largest), -1, keepdims=True))
    label_logits = tf.gather(logits, labels[:, tf.newaxis], batch_dims=1)
    return (log_sum - label_logits)[:, 0], log_sum


@fused_op
def _cross_entropy_gradient(labels, logits, log_sum, upstream):
    is_label = tf.range(tf.shape(logits)[1]) == labels[:, tf.newaxis]
    return (tf.exp(logits - log_sum) - tf.cast(is_label, tf.float32)) * upstream[:, tf.newaxis]
