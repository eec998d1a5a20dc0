"""Operations of training with gradients of their own, made of fused kernels and matrix products.

What the backward pass can compute again at little cost is not stored for it: dropout masks, the
outputs of GELU, attention scores and contexts, and outputs of LayerNorm that only products read.

Each dropout of a step has its own `dropout_id`, which is added to the second number of the seed, an
int64 pair.

Inference uses none of these operations: TensorFlow fuses its own by itself, and other runtimes have
to be able to run them.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from bert_tf.model import fused_attention
from bert_tf.model import fused_kernels as kernels
from bert_tf.model.custom_gradient import custom_gradient

# Computes a tensor again in the backward pass.
Recompute = Callable[[], tf.Tensor]


def is_compiled() -> bool:
    """Return True if XLA compiles the current graph as a whole (jit_compile or a TPU)."""
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


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
    _check_size(x)
    seed = _at(seed, dropout_id)

    @custom_gradient
    def dropped(x):
        return (
            _like(kernels.dropout(x.shape[-1], x, seed, rate=rate), x),
            lambda upstream: _like(kernels.dropout(x.shape[-1], upstream, seed, rate=rate), x),
        )

    return dropped(x)


def gelu(x: tf.Tensor, approximate: bool) -> tf.Tensor:
    """Apply `tf.nn.gelu`: x P(X <= x) for a standard normal X, or its tanh approximation."""

    @custom_gradient
    def activated(x):
        def gradient(upstream):
            grad_x = kernels.gelu_gradient(x.shape[-1], x, upstream, approximate=approximate)
            return _like(grad_x, x)

        return _like(kernels.gelu(x.shape[-1], x, approximate=approximate), x), gradient

    return activated(x)


def gelu_linear(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, approximate: bool) -> tf.Tensor:
    """Return gelu(x) @ kernel + bias, without keeping gelu(x) for the backward pass.

    The backward pass recomputes it in a kernel of its own.

    Args:
        x: `(T, F)`.
        kernel: `(F, H)`, of the dtype of `x`.
        bias: `(H,)`, of the same dtype.
        approximate: Selects the tanh approximation of GELU.

    Returns:
        `(T, H)`.
    """

    @custom_gradient
    def projected(x, kernel, bias):
        inner = _like(kernels.gelu(x.shape[-1], x, approximate=approximate), x)

        def gradient(upstream):
            inner_again = inner
            if not is_compiled():  # XLA keeps gelu(x), which memory of a GPU has room for.
                # After the forward pass, and before its gradient, so that both are never alive.
                with tf.control_dependencies([upstream]):
                    inner_again = _like(kernels.gelu(x.shape[-1], x, approximate=approximate), x)
            grad_kernel = tf.matmul(inner_again, upstream, transpose_a=True)
            with tf.control_dependencies([grad_kernel]):
                grad_inner = tf.matmul(upstream, kernel, transpose_b=True)
            again = _barrier(x)
            grad_x = kernels.gelu_gradient(x.shape[-1], again, grad_inner, approximate=approximate)
            return _barrier(_like(grad_x, x)), grad_kernel, _bias_gradient(upstream)

        return tf.nn.bias_add(tf.matmul(inner, kernel), bias), gradient

    return projected(x, kernel, bias)


def linears(
    x: tf.Tensor,
    weights: Sequence[tf.Tensor],
    biases: Sequence[tf.Tensor],
    recompute_x: Recompute | None = None,
) -> list[tf.Tensor]:
    """Return x @ weight + bias for each weight and bias.

    Args:
        x: `(T, H)`.
        weights: `(H, F)` each, of the dtype of `x`.
        biases: `(F,)` each, of the same dtype.
        recompute_x: Computes `x` again in the backward pass, which does not keep it then. Defaults
            to keeping it.

    Returns:
        `(T, F)` each.
    """
    if is_compiled() and len(weights) > 1:
        # One product of several times the width is faster on a GPU, and so are its gradients.
        weight, bias = tf.concat(weights, 1), tf.concat(biases, 0)
        (joined,) = linears(x, [weight], [bias], recompute_x)
        return tf.split(joined, [weight.shape[1] for weight in weights], 1)

    @custom_gradient
    def projected(x, *weights_and_biases):
        number = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:number], weights_and_biases[number:]

        def gradient(*upstream):
            again = x
            if recompute_x:
                # Without the dependency it would be computed in the forward pass, and kept.
                with tf.control_dependencies(upstream):
                    again = recompute_x()
            products = zip(upstream, weights, strict=True)
            return (
                tf.add_n([tf.matmul(of, weight, transpose_b=True) for of, weight in products]),
                *(tf.matmul(again, of, transpose_a=True) for of in upstream),
                *(_bias_gradient(of) for of in upstream),
            )

        pairs = zip(weights, biases, strict=True)
        return [tf.nn.bias_add(tf.matmul(x, weight), bias) for weight, bias in pairs], gradient

    return projected(x, *weights, *biases)


def dropout_add_norm(
    x: tf.Tensor,
    residual: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    epsilon: float,
    rate: float,
    seed: tf.Tensor,
    dropout_id: int,
) -> tuple[tf.Tensor, Recompute]:
    """Return y = LayerNorm(dropout(x) + residual), and a function that computes `y` again.

    Statistics are float32. `x` and `residual` are `(T, H)`, `gamma` and `beta` float32 `(H,)`; `y`
    is shaped like `x`, of its dtype. The function is for the backward pass of operations on `y`. It
    starts from the sum, which the backward pass of LayerNorm needs anyway.
    """
    _check_size(x)
    seed, width = _at(seed, dropout_id), x.shape[-1]

    @custom_gradient
    def normed(x, residual, gamma, beta):
        if is_compiled():
            summed = _barrier(kernels.dropout_add(width, x, residual, seed, rate=rate))
            output, mean, scale = kernels.norm(width, summed, gamma, beta, epsilon=epsilon)
        else:
            output, summed, mean, scale = kernels.dropout_add_norm(
                width, x, residual, gamma, beta, seed, epsilon=epsilon, rate=rate
            )

        def gradient(upstream, *_):
            if is_compiled():
                again = _barrier(summed)
                grad_sum, grad_gamma, grad_beta = kernels.norm_gradient(
                    width, again, mean, scale, gamma, upstream
                )
                grad_residual = _barrier(grad_sum)
                seed_again = _barrier(seed)  # Not the mask, which is larger.
                grad_x = _barrier(kernels.dropout(width, grad_residual, seed_again, rate=rate))
            else:
                grad_x, grad_residual, grad_gamma, grad_beta = kernels.dropout_add_norm_gradient(
                    width, summed, mean, scale, gamma, seed, upstream, rate=rate
                )
            return _like(grad_x, x), _like(grad_residual, x), _like(grad_gamma, gamma), grad_beta

        return (_like(output, x), summed, mean, scale), gradient

    output, summed, mean, scale = normed(x, residual, gamma, beta)

    def recompute():
        return _like(kernels.norm_again(x.shape[-1], summed, mean, scale, gamma, beta), x)

    return output, recompute


def norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Return LayerNorm(x) of `(T, H)`, with float32 statistics, in the dtype of `x`."""

    @custom_gradient
    def normed(x, gamma, beta):
        output, mean, scale = kernels.norm(x.shape[-1], x, gamma, beta, epsilon=epsilon)

        def gradient(upstream):
            grad_x, grad_gamma, grad_beta = kernels.norm_gradient(
                x.shape[-1], x, mean, scale, gamma, upstream
            )
            return _like(grad_x, x), _like(grad_gamma, gamma), grad_beta

        return _like(output, x), gradient

    return normed(x, gamma, beta)


def attention_linear(
    queries: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    kernel: tf.Tensor,
    bias: tf.Tensor,
    key_bias: tf.Tensor,
    merge: Callable[[tf.Tensor], tf.Tensor],
    merge_gradient: Callable[[tf.Tensor], tf.Tensor],
    rate: float,
    seed: tf.Tensor,
    dropout_id: int,
) -> tf.Tensor:
    """Return merge(probs @ values) @ kernel + bias.

    `probs` are dropout(softmax(queries @ keys^T / sqrt(D) + key_bias)), computed in float32.
    Neither a tensor of L x L nor the context is kept for the backward pass, which computes both
    again: these products are small next to those with weights. Without dropout, a compiled step on
    a GPU uses cuDNN's attention, which stores no tensor of L x L at all.

    Args:
        queries: `(B, N, L, D)`.
        keys: `(B, N, L, D)`, of the same dtype.
        values: `(B, N, L, D)`, of the same dtype.
        kernel: `(H, F)`, of the same dtype.
        bias: `(F,)`, of the same dtype.
        key_bias: float32, broadcastable to the scores `(B, N, L, L)`.
        merge: Maps the context `(B, N, L, D)` to `(T, H)`.
        merge_gradient: Maps the gradient of its output to that of its input.
        rate: Dropout rate.
        seed: int64 `(2,)`.
        dropout_id: Identifies this dropout among those of a step.

    Returns:
        `(T, F)`.
    """
    if rate == 0 and is_compiled() and queries.shape == keys.shape:
        queries_RLND, keys_RLND, values_RLND = (
            tf.transpose(of, [0, 2, 1, 3]) for of in (queries, keys, values)
        )
        if fused_attention.is_available(queries_RLND.shape, queries.dtype):
            rows, length = queries_RLND.shape[:2]
            # cuDNN adds a bias of the dtype of the queries, of which -1e9 may be minus infinity.
            bias_R1LL = tf.cast(tf.maximum(key_bias, queries.dtype.min / 2), queries.dtype)
            bias_R1LL = tf.broadcast_to(bias_R1LL, [rows, 1, length, length])
            context = fused_attention.attention(queries_RLND, keys_RLND, values_RLND, bias_R1LL)
            return linears(merge(tf.transpose(context, [0, 2, 1, 3])), [kernel], [bias])[0]
    seed = _at(seed, dropout_id)
    num_heads, head_size = queries.shape[1], queries.shape[3]
    width, options = num_heads * head_size, {"factor": head_size**-0.5, "rate": rate}

    @custom_gradient
    def projected(queries, keys, values, kernel, bias):
        scores = tf.matmul(queries, keys, transpose_b=True)
        _check_size(scores)
        dropped = _like(kernels.softmax_dropout(width, scores, key_bias, seed, **options), scores)
        context = merge(tf.matmul(dropped, values))

        def gradient(upstream):
            if is_compiled():
                scores_again = _barrier(scores)
            else:
                # Without the dependency TensorFlow would merge both products and keep the first.
                with tf.control_dependencies([upstream]):
                    scores_again = tf.matmul(queries, keys, transpose_b=True)
            grad_context = merge_gradient(tf.matmul(upstream, kernel, transpose_b=True))
            grad_dropped = tf.matmul(grad_context, values, transpose_b=True)
            dropped, grad_scores = (
                _like(of, scores)
                for of in kernels.softmax_dropout_gradient(
                    width, scores_again, key_bias, seed, grad_dropped, **options
                )
            )
            context_again = context if is_compiled() else merge(tf.matmul(dropped, values))
            return (
                tf.matmul(grad_scores, keys),
                tf.matmul(grad_scores, queries, transpose_a=True),
                tf.matmul(dropped, grad_context, transpose_a=True),
                tf.matmul(context_again, upstream, transpose_a=True),
                _bias_gradient(upstream),
            )

        return tf.nn.bias_add(tf.matmul(context, kernel), bias), gradient

    return projected(queries, keys, values, kernel, bias)


def densely_differentiated(table: tf.Tensor) -> tf.Tensor:
    """Return a table whose gradient is a tensor, also if only rows of it are looked up.

    TensorFlow's gradient of a lookup lists rows, some of them twice. Keras' optimizers square the
    entries of such a list before they sum them, which is not the square of the gradient.
    """

    @custom_gradient
    def identity(table):
        return tf.identity(table), tf.convert_to_tensor

    return identity(tf.convert_to_tensor(table))


def tied_embeddings(
    table: tf.Tensor, dtype: tf.DType | str
) -> tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
    """Return the lookup in a table and the product with it, which share one gradient.

    Both gradients are as large as the table. Here that of the product is computed when the backward
    pass has reached the lookup, whose gradient is then added in place. Until then the factors of
    the product are kept, which are smaller. TensorFlow would keep the product from the start of the
    backward pass, and at its end two more tensors of this size: the other gradient and the sum.

    Args:
        table: float32 `(V, H)`.
        dtype: Dtype of the product.

    Returns:
        Two functions. One maps int `(T,)` to the rows float32 `(T, H)`, the other maps `(N, H)` to
        its product with the transposed table `(N, V)`, both of `dtype`, and may be called once.
    """
    rows, width = table.shape

    @custom_gradient
    def tied(table):
        def gradient(of_lookup, hidden, of_product):
            is_sparse = isinstance(of_lookup, tf.IndexedSlices)
            with tf.control_dependencies([of_lookup.values if is_sparse else of_lookup]):
                grad_table = tf.matmul(of_product, hidden, transpose_a=True)
            grad_table = tf.cast(grad_table, table.dtype)
            if not is_sparse:  # Zeros: the loss does not depend on the lookup.
                return grad_table + of_lookup
            indices = of_lookup.indices[:, tf.newaxis]
            if is_compiled():
                return tf.tensor_scatter_nd_add(grad_table, indices, of_lookup.values)
            # Unlike tf.tensor_scatter_nd_add, this operation does not copy a tensor that nothing
            # else reads. XLA does not have it.
            return tf.raw_ops.ScatterNdNonAliasingAdd(
                input=grad_table, indices=indices, updates=of_lookup.values
            )

        # Instead of gradients, the product sends its factors back through two empty tensors. If the
        # loss does not depend on it, these get gradients without rows, whose product is zero.
        factors = tf.zeros([0, width], dtype), tf.zeros([0, rows], dtype)
        return (tf.identity(table), *factors), gradient

    @custom_gradient
    def product(hidden, *_):
        weights = tf.cast(table, dtype)

        def gradient(upstream):
            return tf.matmul(upstream, weights), hidden, upstream

        return tf.matmul(hidden, weights, transpose_b=True), gradient

    looked_up, *factors = tied(table)

    def project(hidden):
        if not factors:
            # TensorFlow would sum the factors of both calls, which is not the sum of the products.
            raise ValueError("project: called again; expected one call per tied_embeddings")
        return product(hidden, factors.pop(0), factors.pop(0))

    return functools.partial(tf.gather, looked_up), project


def cross_entropy(labels_N: tf.Tensor, logits_NV: tf.Tensor) -> tf.Tensor:
    """Return -log softmax(logits)[label], float32 `(N,)`, for many classes V.

    `labels_N` is int32 `(N,)`, `logits_NV` float32 `(N, V)`.
    """
    width = logits_NV.shape[-1]

    @custom_gradient
    def losses(logits_NV):
        losses_N, log_sum_N1 = kernels.cross_entropy(width, labels_N, logits_NV)

        def gradient(upstream_N):
            grad_logits = kernels.cross_entropy_gradient(
                width, labels_N, logits_NV, log_sum_N1, upstream_N
            )
            return _like(grad_logits, logits_NV)

        return _like(losses_N, labels_N), gradient

    return losses(logits_NV)


def _barrier(x):
    """Return x such that XLA treats its value as given.

    What follows from it is computed again where it is needed, instead of being kept. And x itself
    is stored as it was rounded: XLA would keep the float32 value, which takes twice the memory.
    """
    if not is_compiled():
        return x
    (x,) = gen_xla_ops.xla_optimization_barrier(input=[x])
    return x


def _bias_gradient(upstream):
    """Return the sum over rows; unlike BiasAddGrad, it accumulates bfloat16 in float32."""
    return tf.reduce_sum(upstream, 0)


def _check_size(x):
    """Raise ValueError if a dropout mask has more elements than its int32 index can count.

    If the size is unknown, `tf.range` in the mask raises.
    """
    if (size := x.shape.num_elements()) and size >= 2**31:
        raise ValueError(
            f"dropout of {size} values {x.shape}: expected fewer than 2**31; use a smaller batch"
        )


def _at(seed, dropout_id):
    return seed + tf.constant([0, dropout_id], tf.int64)


def _like(value, source):
    """Set the static shape of `source`; kernels know only the rank."""
    if is_compiled():
        # XLA would make a dynamic size of tf.ensure_shape.
        value.set_shape(source.shape)
        return value
    # TensorFlow's optimizations of the graph do not see a shape that is only set in Python. Without
    # this operation, the last bits of gradients differed between runs.
    return tf.ensure_shape(value, source.shape)
