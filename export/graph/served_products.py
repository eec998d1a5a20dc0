"""Matrix products of the served graph, in float32, bfloat16 and int8.

oneDNN computes products fastest from a packed copy of the weights. TensorFlow packs weights once
only if they are constants of the graph, and a server copies constants about twenty times while it
loads them. `_MklNativeFusedMatMul`, into which TensorFlow rewrites products on x86-64, packs
variables as well if it is told that they do not change, and so does `_QuantizedMatMul`. Both are
internal operations of TensorFlow for x86-64 (tests run them in TensorFlow 2.12, 2.20 and 2.21; the
one for int8 is not in 2.12). Portable graphs have standard operations instead.

Shape suffixes: T rows, H inputs, F outputs of a product.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

from export.graph.internal_operations import ONEDNN_KERNEL, has_bfloat16, operation

FUSED_PRODUCT = "_MklNativeFusedMatMul"
INT8_PRODUCT = "_QuantizedMatMul"
# Largest integer of a weight. Without VNNI oneDNN adds two products of inputs 0 to 255 and weights
# in 16 bits: up to 2 * 255 * 64 fit, those of larger weights are cut off without an error.
MAX_WEIGHT = 64


def has_packed_products(precision: str) -> bool:
    """Whether this TensorFlow has packed products, for this CPU, and there is no GPU.

    Args:
        precision: "float32", "bfloat16" or "int8".
    """
    if tf.config.list_logical_devices("GPU"):
        return False
    name = INT8_PRODUCT if precision == "int8" else FUSED_PRODUCT
    registered = kernels.get_registered_kernels_for_op(name).kernel
    has_kernel = any(kernel.device_type == "CPU" for kernel in registered)
    return has_kernel and (precision != "bfloat16" or has_bfloat16())


class Form(enum.Enum):
    """Form of a product in the graph."""

    STANDARD = enum.auto()  # Standard operations.
    PLAIN = enum.auto()  # One internal operation.
    PACKED = enum.auto()  # The same with packed weights.


class DenseWeights(NamedTuple):
    """Weights of dense layers side by side, to be passed to a tf.function.

    Biases are constants of the graph, since each variable costs several operations in each loop and
    condition that it enters.

    Attributes:
        kernel: Variable `(H, F)`, in the dtype of the products.
        bias: `(F,)`, in the dtype of the result.
        range: float32 `(F,)`, the weight per column that 127 stands for; `None` if not in int8.
    """

    kernel: tf.Variable
    bias: np.ndarray
    range: np.ndarray | None = None


def dense_weights(
    layers: Sequence[keras.layers.Dense], dtype: tf.DType, rows: int = 0, columns: int = 0
) -> DenseWeights:
    """Return the weights of Keras layers with the same input.

    Args:
        layers: The layers.
        dtype: dtype of the kernel; tf.qint8 for integers up to MAX_WEIGHT, scaled per column.
        rows: Number of rows of zeros below the kernel.
        columns: Number of columns of zeros to the right of kernel and bias.
    """
    kernel, bias = (
        np.concatenate([np.asarray(values) for values in of_layers], axis=-1)
        for of_layers in zip(*((layer.kernel, layer.bias) for layer in layers), strict=True)
    )
    kernel, bias = np.pad(kernel, [(0, rows), (0, columns)]), np.pad(bias, (0, columns))
    if dtype != tf.qint8:
        kernel = tf.Variable(tf.cast(kernel, dtype), trainable=False)
        return DenseWeights(kernel, bias.astype(dtype.as_numpy_dtype))
    largest = np.maximum(np.abs(kernel).max(axis=0), np.finfo(np.float32).tiny)
    range_F = largest * (127 / MAX_WEIGHT)
    integers = np.round(kernel / range_F * 127).astype(np.int8)
    return DenseWeights(tf.Variable(tf.bitcast(integers, dtype), trainable=False), bias, range_F)


def product(
    x_TH: tf.Tensor,
    dense: DenseWeights,
    form: Form,
    activation: str | None = None,
    residual: tf.Tensor | None = None,
) -> tf.Tensor:
    """Multiply with a kernel, add the bias and a residual, and apply an activation.

    Args:
        x_TH: `(T, H)`, in the dtype of the result.
        dense: The weights.
        form: Form of the product; those of 8-bit integers are always packed.
        activation: "GeluExact", "GeluApproximate" or "Tanh".
        residual: `(T, F)`.

    Returns:
        `(T, F)`.
    """
    bias = tf.convert_to_tensor(dense.bias)
    if dense.kernel.dtype == tf.qint8:
        return _int8_product(x_TH, dense, bias, activation, residual)
    if form is not Form.STANDARD:
        is_packed = form is Form.PACKED
        return _fused_product(x_TH, dense.kernel, bias, activation, residual, is_packed)
    # TensorFlow fuses these operations where it can prove their shapes.
    output_TF = tf.nn.bias_add(tf.matmul(x_TH, dense.kernel), bias)
    if residual is not None:
        return output_TF + residual
    if activation == "Tanh":
        return tf.tanh(output_TF)
    if activation:
        return tf.nn.gelu(output_TF, approximate=activation == "GeluApproximate")
    return output_TF


def _fused_product(x_TH, kernel, bias, activation, residual, is_packed):
    addends = [bias] if residual is None else [bias, residual]
    return operation(
        FUSED_PRODUCT,
        [x_TH, tf.convert_to_tensor(kernel), *addends],
        x_TH.dtype,
        T=x_TH.dtype,
        num_args=len(addends),
        fused_ops=_fused(activation, residual),
        is_filter_const=is_packed,
        _kernel=ONEDNN_KERNEL,
    )


def _int8_product(x_TH, dense, bias, activation, residual):
    """Return `_Branch.product` with x rounded to integers, 127 of which are its largest number."""
    # At least 0, since the maximum of no rows is -inf, which is no range.
    largest = tf.maximum(tf.reduce_max(tf.abs(x_TH)), 0.0)
    rounded_TH, low, high = tf.raw_ops.QuantizeV2(
        input=x_TH,
        min_range=-largest,
        max_range=largest,
        T=tf.qint8,
        mode="SCALED",
        round_mode="HALF_TO_EVEN",
        narrow_range=True,
    )
    tensors = [rounded_TH, tf.convert_to_tensor(dense.kernel), bias]
    if residual is not None:
        tensors.append(residual)
    ranges = [low, high, -tf.convert_to_tensor(dense.range), tf.convert_to_tensor(dense.range)]
    return operation(
        INT8_PRODUCT,
        [*tensors, *ranges],
        tf.float32,
        Tdevice_inputs=[tensor.dtype for tensor in tensors],
        Thost_inputs=[tensor.dtype for tensor in ranges],
        Tdevice_outputs=[tf.float32],
        Thost_outputs=[],
        T1=tf.qint8,
        T2=tf.qint8,
        Tbias=tf.float32,
        U=tf.float32,
        Tout=tf.float32,
        fused_ops=[*_fused(activation, residual), "Dequantize"],
        input_quant_mode="SCALED",
        output_quant_mode="SCALED",
        is_weight_const=True,
        is_bias_const=True,
    )


def _fused(activation, residual):
    added = [] if residual is None else ["Add"]
    return ["BiasAdd", *([activation] if activation else []), *added]
