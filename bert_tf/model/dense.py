"""Dense layers with BERT's initializer and activation, and tied embeddings, on flattened tokens.

Shape suffixes: T flattened tokens, H input size, F output size, V vocabulary size, N masked
positions; `activation_linear` has the feed-forward size F as input.

`seed` is the dropout seed, or `None` for inference.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from bert_tf.config import BertConfig
from bert_tf.model import fused_ops


def initializer(config: BertConfig) -> keras.initializers.Initializer:
    """Return a new truncated normal initializer with the configured standard deviation.

    Create one per weight: a shared instance would repeat its draw.
    """
    return keras.initializers.TruncatedNormal(stddev=config.initializer_range)


@contextlib.contextmanager
def initial_weights_seed(seed: int) -> Iterator[None]:
    """Make the weights that are created in the context a function of a seed.

    Keras draws the seeds of initializers from Python's `random`, whose state is restored: the
    numbers that the caller draws stay random.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def dense(
    config: BertConfig,
    units: int,
    name: str,
    dtype: str | keras.DTypePolicy,
    activation: str | None = None,
) -> keras.layers.Dense:
    """Return a Keras `Dense` layer with BERT's kernel initializer."""
    return keras.layers.Dense(
        units, activation=activation, kernel_initializer=initializer(config), dtype=dtype, name=name
    )


def linear(
    x_TH: tf.Tensor,
    layer: keras.layers.Dense,
    seed: tf.Tensor | None,
    recompute_x: fused_ops.Recompute | None = None,
) -> tf.Tensor:
    """Apply a dense layer without its activation.

    Args:
        x_TH: `(T, H)`, in the compute dtype.
        layer: Built dense layer with kernel `(H, F)`.
        seed: Dropout seed; anything but `None` marks training and selects the fused operation.
        recompute_x: Computes `x_TH` again in the backward pass of training, which does not keep it
            then. Defaults to keeping it.

    Returns:
        `(T, F)`, in the compute dtype.
    """
    return linears(x_TH, [layer], seed, recompute_x)[0]


def linears(
    x_TH: tf.Tensor,
    layers: Sequence[keras.layers.Dense],
    seed: tf.Tensor | None,
    recompute_x: fused_ops.Recompute | None = None,
) -> list[tf.Tensor]:
    """Return the results of `linear` for several layers with the same input."""
    kernels = [tf.convert_to_tensor(layer.kernel) for layer in layers]
    biases = [tf.convert_to_tensor(layer.bias) for layer in layers]
    if seed is not None:
        return fused_ops.linears(x_TH, kernels, biases, recompute_x)
    # TensorFlow fuses each product with its bias.
    weights = zip(kernels, biases, strict=True)
    return [tf.nn.bias_add(tf.matmul(x_TH, kernel), bias) for kernel, bias in weights]


def tied_embeddings(
    table_VH: tf.Tensor, dtype: tf.DType | str, seed: tf.Tensor | None
) -> tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
    """Return the lookup and the output projection of one table of embeddings.

    Args:
        table_VH: float32 `(V, H)`, token embeddings.
        dtype: Dtype of the projection.
        seed: Dropout seed; anything but `None` marks training and selects the fused operation.

    Returns:
        Two functions: one maps int `(T,)` to float32 `(T, H)`, the other `(N, H)` to `(N, V)`, both
        of `dtype`.
    """
    if seed is not None:
        return fused_ops.tied_embeddings(table_VH, dtype)
    weights_VH = tf.cast(table_VH, dtype)
    return (
        functools.partial(tf.gather, table_VH),
        lambda hidden_NH: tf.matmul(hidden_NH, weights_VH, transpose_b=True),
    )


def activation(x_TF: tf.Tensor, config: BertConfig, seed: tf.Tensor | None) -> tf.Tensor:
    """Apply the configured GELU (Hendrycks & Gimpel 2016), elementwise.

    Args:
        x_TF: `(T, F)`.
        config: Its `hidden_act` selects "gelu" (erf) or "gelu_new" (tanh approximation).
        seed: Dropout seed; anything but `None` marks training and selects the fused operation.

    Returns:
        Tensor shaped like `x_TF`, of the same dtype.
    """
    approximate = config.hidden_act == "gelu_new"
    if seed is None:
        return tf.nn.gelu(x_TF, approximate=approximate)
    return fused_ops.gelu(x_TF, approximate)


def activation_linear(
    x_TF: tf.Tensor, layer: keras.layers.Dense, config: BertConfig, seed: tf.Tensor | None
) -> tf.Tensor:
    """Apply `activation`, then `linear`: the second half of the feed-forward network.

    In training the activation's output is not stored for the backward pass.

    Args:
        x_TF: `(T, F)`, in the compute dtype.
        layer: Built dense layer with kernel `(F, H)`.
        config: As in `activation`.
        seed: Dropout seed; anything but `None` marks training and selects the fused operation.

    Returns:
        `(T, H)`, in the compute dtype.
    """
    if seed is None:
        return linear(activation(x_TF, config, seed), layer, seed)
    kernel, bias = tf.convert_to_tensor(layer.kernel), tf.convert_to_tensor(layer.bias)
    return fused_ops.gelu_linear(x_TF, kernel, bias, config.hidden_act == "gelu_new")
