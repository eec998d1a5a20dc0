"""Custom gradients that are freed with the graph they were traced in.

TensorFlow keeps the gradient function of each `tf.custom_gradient` in a graph in a registry of the
process, forever. The function refers to tensors, these to their graph, and that to the weights.
Here the operation keeps its function, and the registry refers to it weakly.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops import custom_gradient as of_tensorflow

_ENTRIES = gradient_registry._registry


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function as `tf.custom_gradient` does.

    Args:
        function: Maps tensors to (result, gradient function), see `tf.custom_gradient`.
    """
    differentiable = tf.custom_gradient(function)

    @functools.wraps(function)
    def decorated(*tensors, **options):
        result = differentiable(*tensors, **options)
        if not tf.executing_eagerly():
            # All tensors of a result are outputs of one operation, which has the gradient.
            _own_gradient(tf.nest.flatten(result, expand_composites=True)[0].op)
        return result

    return decorated


# The code of TensorFlow, whose backward pass has a custom gradient too, with ours in its place.
recompute_grad = types.FunctionType(
    of_tensorflow.recompute_grad.__code__,
    {**vars(of_tensorflow), "custom_gradient": custom_gradient},
)


def own_gradients() -> None:
    """Free all custom gradients of the current graph with it; call this at the end of a step.

    TensorFlow's own code has some, such as `ReplicaContext.all_reduce`, which optimizers call.
    """
    if not tf.executing_eagerly():
        for operation in tf.compat.v1.get_default_graph().get_operations():
            if operation.type == "IdentityN":
                _own_gradient(operation)


def _own_gradient(operation):
    """Let an operation, and the registry only weakly, refer to the operation's custom gradient.

    The cycle of a graph and its operations is garbage as a whole. The entry of the registry stays
    until then, because saving a model looks for it.
    """
    try:
        name = operation.get_attr("_gradient_op_type").decode()
    except ValueError:  # No custom gradient.
        return
    if operation._gradient_function is None and name in _ENTRIES:
        gradient = operation._gradient_function = _ENTRIES[name]["type"]
        reference = weakref.ref(gradient)
        _ENTRIES[name]["type"] = lambda *arguments: reference()(*arguments)
        weakref.finalize(gradient, _ENTRIES.pop, name, None).atexit = False
