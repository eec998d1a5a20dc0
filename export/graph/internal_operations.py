"""Internal operations of TensorFlow for x86-64, which have no Python function.

TensorFlow rewrites standard operations into these, but only where it can prove what they need, and
not all of them in bfloat16. In the graph itself they do not depend on that.

Shape suffixes: T flattened tokens, H hidden size.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# The label under which kernels are registered that TensorFlow uses in place of its own.
ONEDNN_KERNEL = "MklNameChangeOp"


def softmax(scores: tf.Tensor) -> tf.Tensor:
    """Return the softmax over the last axis, computed in float32, in the dtype of the scores."""
    return operation("_MklSoftmax", [scores], scores.dtype, T=scores.dtype, _kernel=ONEDNN_KERNEL)


def layer_norm(x_TH: tf.Tensor, gamma_H: tf.Tensor, beta_H: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Return LayerNorm(x), float32 `(T, H)` like its input."""
    tensors = [x_TH, tf.convert_to_tensor(gamma_H), tf.convert_to_tensor(beta_H)]
    return operation("_MklLayerNorm", tensors, tf.float32, T=tf.float32, epsilon=epsilon)


def checked_for_bfloat16(values: tf.Tensor) -> tf.Tensor:
    """Return the values, or fail when the graph runs on a processor without bfloat16.

    oneDNN has it with AVX-512. Without, a product in bfloat16 would end the process: TensorFlow
    does not catch its exception, but that of softmax.
    """
    with tf.name_scope("bfloat16_needs_AVX512_or_an_export_with_portable"):
        check = softmax(tf.zeros([1, 1], tf.bfloat16))
    # Always 1, but TensorFlow does not know that. It would remove a control dependency.
    return values * tf.cast(check[0, 0] > 0, values.dtype)


@functools.cache
def has_bfloat16() -> bool:
    """Whether this processor can run internal operations in bfloat16."""
    function = tf.function(lambda: checked_for_bfloat16(tf.constant(1)), autograph=False)
    try:
        function()
    except tf.errors.OpError:
        return False
    return True


def operation(
    name: str, tensors: Sequence[tf.Tensor], dtype: tf.DType, **attributes: Any
) -> tf.Tensor:
    """Add an operation with one output to the graph.

    Args:
        name: Name of the operation.
        tensors: Its inputs.
        dtype: dtype of its output.
        **attributes: Bools, ints, floats, strings, dtypes, or lists of strings or dtypes.
    """
    graph = tf.compat.v1.get_default_graph()
    values = {key: _attribute(value) for key, value in attributes.items()}
    return graph.create_op(name, tensors, [dtype], name="internal", attrs=values).outputs[0]


def _attribute(value):
    """Return the AttrValue of a value."""
    attribute = tf.compat.v1.AttrValue
    if isinstance(value, list):
        strings = [text.encode() for text in value if isinstance(text, str)]
        dtypes = [dtype.as_datatype_enum for dtype in value if isinstance(dtype, tf.DType)]
        return attribute(list=attribute.ListValue(s=strings, type=dtypes))
    if isinstance(value, tf.DType):
        return attribute(type=value.as_datatype_enum)
    if isinstance(value, str):
        return attribute(s=value.encode())
    if isinstance(value, float):
        return attribute(f=value)
    return attribute(b=value) if isinstance(value, bool) else attribute(i=value)
