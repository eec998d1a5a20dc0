"""Graphs as a server with a GPU rewrites them: its rewrites, kernels and copies.

The pip package of TensorFlow registers its GPU kernels in processes without a GPU too. A kernel has
some inputs and outputs in the memory of the host; an edge between the two memories is a copy.
"""

import collections
import functools
from typing import NamedTuple

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.training.saver import export_meta_graph

from export.graph.saved_model import pin

needs_cuda_build = pytest.mark.skipif(
    not tf.sysconfig.get_build_info()["is_cuda_build"],
    reason="this TensorFlow is no CUDA build: it has no GPU kernels",
)


@functools.cache
def _registered(operation):
    return kernels.get_registered_kernels_for_op(operation).kernel


def _types(node, attribute):
    """Return the types of an attribute; a default value is that of the operation."""
    if attribute in node.attr:
        value = node.attr[attribute]
    else:
        attributes = op_def_registry.get(node.op).attr
        (value,) = (of.default_value for of in attributes if of.name == attribute)
    return list(value.list.type) or [value.type]


def gpu_kernel(node):
    """Return the KernelDef that a GPU runs for a node, or `None`."""

    def fits(kernel):
        return all(
            set(_types(node, of.name)) <= set(of.allowed_values.list.type)
            for of in kernel.constraint
        )

    for device in ("GPU", "DEFAULT"):  # DEFAULT: of devices without a kernel of their own.
        kernels_of_device = [of for of in _registered(node.op) if of.device_type == device]
        if fitting := list(filter(fits, kernels_of_device)):
            return max(fitting, key=lambda kernel: kernel.priority)
    return None


def described(node):
    """Return the operation of a node with its types."""
    types = [
        f"{name}={types_pb2.DataType.Name(value.type).removeprefix('DT_').lower()}"
        for name, value in sorted(node.attr.items())
        if value.type
    ]
    return " ".join([node.op, *types])


def optimized(function):
    """Return the graph of a concrete function of the GPU graph as Grappler rewrites it."""
    graph = function.graph
    definition = graph.as_graph_def(add_shapes=True)
    pin(definition.node, "gpu")
    meta_graph = export_meta_graph(graph_def=definition, graph=graph)
    fetches = [tensor.name for tensor in tf.nest.flatten(function.structured_outputs)]
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    return tf_optimizer.OptimizeGraph(config_pb2.ConfigProto(), meta_graph)


class Copies(NamedTuple):
    """Copies between the memories of host and GPU.

    Attributes:
        to_gpu: Operations of the CPU whose result is copied to the GPU.
        num_to_host: Number of results that are copied to the CPU.
        in_between: Operations of the GPU, one of which has a kernel that computes on the CPU.
    """

    to_gpu: set
    num_to_host: int
    in_between: set


def copies(graph):
    """Return the `Copies` of a GraphDef all of whose nodes have a device."""
    by_name = {node.name: node for node in graph.node}
    to_gpu, to_host, in_between = set(), set(), set()
    for node in graph.node:
        for position, tensor in enumerate(node.input):
            if tensor.startswith("^"):
                continue
            name, _, number = tensor.partition(":")
            source = by_name[name]
            is_gpu, is_read_on_gpu = "GPU" in source.device, "GPU" in node.device
            if source.op == "Placeholder" and source.attr["dtype"].type == types_pb2.DT_RESOURCE:
                continue
            made_in_gpu = is_gpu and not _is_on_host(source, "output_arg", int(number or 0))
            read_in_gpu = is_read_on_gpu and not _is_on_host(node, "input_arg", position)
            if made_in_gpu == read_in_gpu:
                continue
            if is_gpu and is_read_on_gpu:
                in_between.add(f"{source.op} to {node.op}")
            elif read_in_gpu:
                to_gpu.add(source.op)
            else:
                to_host.add(tensor)
    return Copies(to_gpu, len(to_host), in_between)


def _is_on_host(node, kind, number):
    """Return whether an input or output of a GPU's kernel is in the memory of the host."""
    names = []
    for argument in getattr(op_def_registry.get(node.op), kind):
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        names += [argument.name] * count
    kernel = gpu_kernel(node)
    return kernel is not None and names[number] in kernel.host_memory_arg


def without_kernel(graph):
    """Count the operations of a GraphDef that are for a GPU, but have no kernel for it."""
    nodes = [node for node in graph.node if "GPU" in node.device]
    assert nodes
    return collections.Counter(described(node) for node in nodes if gpu_kernel(node) is None)


def internal_operations(graph):
    """Return the internal operations of a GraphDef for CPUs that are placed on a GPU."""
    return {node.op for node in graph.node if "GPU" in node.device and "Mkl" in node.op}
