"""Layer normalization in inference, in the form that is fastest (Ba et al. 2016).

Shape suffixes: T flattened tokens, H hidden size.
"""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Below this number of elements (85 tokens of BERT-base) the LayerNorm formula is faster than
# oneDNN's kernel, which has a fixed cost per call.
FEW_NUMBERS = 2**16


def norm_of_inference(
    x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input, by the form that is fastest."""
    arguments = (x_TH, gamma_H, beta_H, epsilon)
    # The fused kernel is for CPUs only. TensorFlow would place it on a GPU, where it fails, and XLA
    # computes the variance as E[x^2] - E[x]^2, which cancels if the mean is far from 0.
    if _may_be_on_gpu(x_TH) or _is_for_xla():
        return norm_by_moments(*arguments)
    normed_TH = tf.cond(
        tf.size(x_TH) < FEW_NUMBERS,
        lambda: norm_by_moments(*arguments),
        lambda: _norm_as_one_kernel(*arguments),
    )
    # tf.cond loses the static shape; the reshape tells TensorFlow that it is unchanged.
    return tf.reshape(normed_TH, tf.shape(x_TH))


def norm_by_moments(
    x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input, by its formula: mean and variance."""
    centered_TH = x_TH - tf.reduce_mean(x_TH, -1, keepdims=True)
    variance_T1 = tf.reduce_mean(tf.square(centered_TH), -1, keepdims=True)
    return centered_TH * tf.math.rsqrt(variance_T1 + epsilon) * gamma_H + beta_H


def _norm_as_one_kernel(x_TH, gamma_H, beta_H, epsilon):
    """Normalize by batch normalization, with each token as a channel of one image.

    TensorFlow with oneDNN fuses this form of LayerNorm into one kernel. It is several times as fast
    for many tokens and slower for few, because a call costs about 0.3 ms.
    """
    rows = tf.shape(x_TH)[0]
    normed_1TH1, *_ = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x_TH, [1, rows, x_TH.shape[-1], 1]),
        scale=tf.ones([rows]),
        offset=tf.zeros([rows]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=epsilon,
        data_format="NCHW",
        is_training=True,
    )
    return tf.reshape(normed_1TH1, tf.shape(x_TH)) * gamma_H + beta_H


def _may_be_on_gpu(x_TH):
    """Return True if a tensor is computed on a GPU: that of its graph, else that of the process."""
    if x_TH.device:
        return "GPU" in x_TH.device
    return bool(tf.config.get_visible_devices("GPU"))


def is_compiled() -> bool:
    """Return True if XLA compiles the current graph as a whole (jit_compile or a TPU)."""
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _is_for_xla():
    """Return True if XLA compiles the current graph, or parts of it (set_jit)."""
    return bool(tf.config.optimizer.get_jit()) or is_compiled()
