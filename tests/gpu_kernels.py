"""Which kernels of a GPU the operations of a graph have, without a GPU.

The CUDA build of TensorFlow registers its kernels on any machine.
"""

import functools

import tensorflow as tf
from tensorflow.python.framework import dtypes, kernels

XLA, GPU, HOST = "XLA_GPU_JIT", "GPU", "CPU"
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Parts of a graph that no device runs.
STRUCTURE = ("Placeholder", "NoOp", "_Arg", "_Retval", "Const")


def operations(graph, is_compiled=False):
    """Yield the operations of a graph and of all functions that it calls.

    Yields:
        The operation, and whether XLA compiles it.
    """
    for operation in graph.get_operations():
        yield operation, is_compiled
        for name in _functions(operation):
            function = graph._get_function(name)
            attributes = function.cached_definition.attr
            compiles = "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b
            yield from operations(function.graph, is_compiled or compiles)


def _functions(operation):
    for value in operation.node_def.attr.values():
        yield from (of.name for of in (value.func, *value.list.func) if of.name)


def kernel(operation, device):
    """Return the kernel of an operation for its dtypes on a device, or `None`."""
    for name in (device, *["DEFAULT"] * (device == GPU)):
        for registered in _kernels(operation.type):
            if registered.device_type == name and all(
                _allows(operation, constraint) for constraint in registered.constraint
            ):
                return registered
    return None


@functools.cache
def _kernels(type):
    return tuple(kernels.get_registered_kernels_for_op(type).kernel)


def _allows(operation, constraint):
    types = operation.get_attr(constraint.name)
    allowed = [dtypes.as_dtype(number) for number in constraint.allowed_values.list.type]
    return all(of in allowed for of in (types if isinstance(types, list) else [types]))


def missing(graph):
    """Return the operations without a kernel of a GPU, or of XLA if it compiles them.

    Returns:
        Sorted descriptions such as "RaggedGather(int32)", with "XLA: " in front of those of XLA.
    """
    found = set()
    for operation, is_compiled in operations(graph):
        if operation.type in (*STRUCTURE, *CALLS):
            continue
        if kernel(operation, XLA if is_compiled else GPU) is None:
            types = sorted({tensor.dtype.name for tensor in operation.inputs})
            found.add(f"{'XLA: ' * is_compiled}{operation.type}({', '.join(types)})")
    return sorted(found)


def copies(graph):
    """Return the tensors that operations outside of XLA copy between host and GPU.

    Operations run on the GPU if they have a kernel; what XLA compiles reads and writes its memory.

    Returns:
        Two sorted lists of "PRODUCER -> CONSUMER (dtype)": to the host, which waits for the GPU,
        and to the GPU.
    """
    to_host, to_gpu = [], []
    for operation, is_compiled in operations(graph):
        if is_compiled:
            continue
        for tensor, reads_host in zip(operation.inputs, _on_host(operation, "input"), strict=True):
            if tensor.dtype.base_dtype in (tf.resource, tf.variant):
                continue
            producer = tensor.op
            is_on_host = _on_host(producer, "output")[tensor.value_index]
            if is_on_host != reads_host:
                found = to_host if reads_host else to_gpu
                found.append(f"{producer.type} -> {operation.type} ({tensor.dtype.name})")
    return sorted(to_host), sorted(to_gpu)


def _on_host(operation, side):
    """Return whether each input or output of an operation is in the memory of the host."""
    tensors = operation.inputs if side == "input" else operation.outputs
    if operation.type in CALLS and _is_compiled_call(operation):
        return [False] * len(tensors)
    if operation.type in ("Placeholder", *CALLS, "While", "StatelessWhile"):
        # Integers of 32 bits are arguments and results on the host.
        return [tensor.dtype == tf.int32 for tensor in tensors]
    registered = kernel(operation, GPU)
    if registered is None:
        return [True] * len(tensors)
    result, definition = [], operation.op_def
    for argument in definition.input_arg if side == "input" else definition.output_arg:
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        result += [argument.name in registered.host_memory_arg] * count
    return result


def _is_compiled_call(operation):
    function = operation.graph._get_function(operation.get_attr("f").name)
    attributes = function.cached_definition.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b
