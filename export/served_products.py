"""Matrix products of the served graph, in float32, bfloat16 and int8.

oneDNN computes products fastest from a packed copy of the weights. TensorFlow packs weights once
only if they are constants of the graph, and a server copies constants about twenty times while it
loads them. `_MklNativeFusedMatMul`, into which TensorFlow rewrites products on x86-64, packs
variables as well if it is told that they do not change, and so does `_QuantizedMatMul`. Both are
internal operations of TensorFlow for x86-64 (tests run them in TensorFlow 2.12, 2.20 and 2.21; the
one for int8 is not in 2.12). Portable graphs have standard operations instead.

Shape suffixes: T rows, H inputs, F outputs of a product.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

PACKED_PRODUCT = "_MklNativeFusedMatMul"
INT8_PRODUCT = "_QuantizedMatMul"


def has_packed_products(operation: str = PACKED_PRODUCT) -> bool:
    """Whether this TensorFlow has a packed product, for a CPU, and there is no GPU."""
    if tf.config.list_logical_devices("GPU"):
        return False
    registered = kernels.get_registered_kernels_for_op(operation).kernel
    return any(kernel.device_type == "CPU" for kernel in registered)


class Dense:
    """Kernel `(H, F)` and bias `(F,)` of dense layers side by side, in the dtype of the products.

    Biases are constants of the graph, since each variable costs several operations in each loop and
    condition that it enters.

    Args:
        layers: Keras layers with the same input.
        dtype: dtype of the kernel; tf.qint8 for integers -127 to 127, scaled per column.
        rows: Number of rows of zeros below the kernel.
        columns: Number of columns of zeros to the right of kernel and bias.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.Dense],
        dtype: tf.DType,
        rows: int = 0,
        columns: int = 0,
    ) -> None:
        kernel, bias = (
            np.concatenate([np.asarray(values) for values in of_layers], axis=-1)
            for of_layers in zip(*((layer.kernel, layer.bias) for layer in layers), strict=True)
        )
        kernel = np.pad(kernel, [(0, rows), (0, columns)])
        self.bias = np.pad(bias, (0, columns))
        if dtype == tf.qint8:
            self.largest = np.maximum(np.abs(kernel).max(axis=0), np.finfo(np.float32).tiny)
            integers = np.round(kernel / self.largest * 127).astype(np.int8)
            self.kernel = tf.Variable(tf.bitcast(integers, dtype), trainable=False)
        else:
            self.kernel = tf.Variable(tf.cast(kernel, dtype), trainable=False)


def product(
    x_TH: tf.Tensor,
    dense: Dense,
    is_packed: bool,
    activation: str | None = None,
    residual: tf.Tensor | None = None,
) -> tf.Tensor:
    """Multiply with a kernel, add the bias and a residual, and apply an activation.

    Args:
        x_TH: `(T, H)`, in the dtype of the result.
        dense: The weights.
        is_packed: Whether the product is packed; those of 8-bit integers always are.
        activation: "GeluExact", "GeluApproximate" or "Tanh".
        residual: `(T, F)`.

    Returns:
        `(T, F)`.
    """
    bias = tf.constant(dense.bias, x_TH.dtype)
    if dense.kernel.dtype == tf.qint8:
        return _int8_product(x_TH, dense, bias, activation, residual)
    if is_packed:
        return _packed_product(x_TH, dense.kernel, bias, activation, residual)
    # TensorFlow fuses these operations.
    output_TF = tf.nn.bias_add(tf.matmul(x_TH, dense.kernel), bias)
    if residual is not None:
        return output_TF + residual
    if activation == "Tanh":
        return tf.tanh(output_TF)
    if activation:
        return tf.nn.gelu(output_TF, approximate=activation == "GeluApproximate")
    return output_TF


def _packed_product(x_TH, kernel, bias, activation, residual):
    addends = [bias] if residual is None else [bias, residual]
    return _operation(
        PACKED_PRODUCT,
        [x_TH, tf.convert_to_tensor(kernel), *addends],
        x_TH.dtype,
        T=x_TH.dtype,
        num_args=len(addends),
        fused_ops=_fused(activation, residual),
        is_filter_const=True,
        _kernel="MklNameChangeOp",  # The label under which the kernel is registered.
    )


def _int8_product(x_TH, dense, bias, activation, residual):
    """Return `_Branch.product` with x rounded to integers, 127 of which are its largest number."""
    largest = tf.reduce_max(tf.abs(x_TH))
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
    ranges = [low, high, tf.constant(-dense.largest), tf.constant(dense.largest)]
    return _operation(
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


def _operation(name, tensors, dtype, **attributes):
    """Add an internal operation, which has no Python function, to the graph."""
    graph = tf.compat.v1.get_default_graph()
    values = {key: _attribute(value) for key, value in attributes.items()}
    return graph.create_op(name, tensors, [dtype], name="product", attrs=values).outputs[0]


def _attribute(value):
    """Return the AttrValue of a bool, int, string, dtype, or list of strings or dtypes."""
    attribute = tf.compat.v1.AttrValue
    if isinstance(value, list):
        strings = [text.encode() for text in value if isinstance(text, str)]
        dtypes = [dtype.as_datatype_enum for dtype in value if isinstance(dtype, tf.DType)]
        return attribute(list=attribute.ListValue(s=strings, type=dtypes))
    if isinstance(value, tf.DType):
        return attribute(type=value.as_datatype_enum)
    if isinstance(value, str):
        return attribute(s=value.encode())
    return attribute(b=value) if isinstance(value, bool) else attribute(i=value)
