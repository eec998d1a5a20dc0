"""Devices of the served graph: all of it on the CPU, or the model on a GPU and the rest on the CPU.

A node without a device is placed by the server, which takes a GPU for all operations that have a
kernel for it: a tokenizer, whose strings stay on the CPU, would be copied back and forth. So each
node names its device. Servers do not load a graph that names a device that they do not have.

Shape suffixes: W sequences, R rows, L tokens per row, T flattened tokens.
"""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model.pywrap_saved_model import fingerprinting

CPU, GPU = "/device:CPU:0", "/device:GPU:0"
# Rows and their lengths are padded to one of few sizes, so that memory and kernels are reused.
ROWS = tuple(sorted(size for power in range(12) for size in (2**power, 3 * 2**power)))
LENGTHS = (16, 32, 64, 128, 256, 384, 512)
_OF_VARIABLES = ("VarHandleOp", "AssignVariableOp", "ReadVariableOp", "DisableCopyOnRead")

TokenFunction = Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]


def on_cpu(function: TokenFunction) -> TokenFunction:
    """Return a function of `Pipeline.token_functions` that computes on the CPU."""

    def run(inputs):
        with tf.device(CPU):
            return function(inputs)

    return run


def on_gpu(function: TokenFunction, max_seq_length: int) -> TokenFunction:
    """Return a function of `Pipeline.token_functions` that computes on the GPU.

    Its flat inputs become padded ones, in a single tensor, which is the only copy to the GPU. It is
    float32, since TensorFlow copies integers back to the CPU in order to reshape or split them.

    Args:
        function: The function.
        max_seq_length: Maximum number of tokens of a sequence.
    """
    lengths = [*(length for length in LENGTHS if length < max_seq_length), max_seq_length]

    def run(inputs):
        splits_W = tf.cast(inputs["row_splits"], tf.int64)
        num_sequences = tf.size(splits_W, tf.int64) - 1
        longest = tf.reduce_max(tf.concat([[1], splits_W[1:] - splits_W[:-1]], axis=0))
        shape = [_at_least(num_sequences, ROWS), _at_least(longest, lengths)]

        def padded(name, padding):
            values_T = tf.cast(inputs[name][: splits_W[-1]], tf.float32)
            rows = tf.RaggedTensor.from_row_splits(values_T, splits_W, validate=False)
            return rows.to_tensor(padding, shape=shape)

        tokens_2RL = tf.stack([padded("input_ids", 0.0), padded("segment_ids", -1.0)])
        with tf.device(GPU):
            ids_RL, segment_RL = tf.unstack(tokens_2RL)
            outputs = function(
                {
                    "input_ids": ids_RL,
                    "input_mask": segment_RL >= 0,
                    "segment_ids": tf.maximum(segment_RL, 0.0),
                }
            )
        return {
            name: values[:num_sequences, :longest]
            if values.shape.rank > 1 and values.shape[1] is None
            else values[:num_sequences]
            for name, values in outputs.items()
        }

    return run


def _at_least(number, sizes):
    """Return the smallest of ascending sizes that is not below a number, int64."""
    sizes = tf.constant(sizes, tf.int64)
    return sizes[tf.searchsorted(sizes, [number])[0]]


def pin(nodes: Iterable[node_def_pb2.NodeDef], device: str) -> None:
    """Name a device for each node that has none.

    Args:
        nodes: The nodes.
        device: "cpu", or "gpu" for variables on the GPU. Other nodes are for the CPU.
    """
    for node in nodes:
        if not node.device:
            node.device = GPU if device == "gpu" and node.op in _OF_VARIABLES else CPU


def pin_saved_model(directory: os.PathLike | str, device: str) -> None:
    """Name a device for each node of a SavedModel; arguments as for `pin`."""
    path = pathlib.Path(directory) / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    (meta_graph,) = model.meta_graphs
    graph = meta_graph.graph_def
    pin(itertools.chain(graph.node, *(of.node_def for of in graph.library.function)), device)
    path.write_bytes(model.SerializeToString(deterministic=True))
    of_file = path.with_name("fingerprint.pb")
    if of_file.exists():
        of_file.write_bytes(fingerprinting.CreateFingerprintDef(os.fspath(directory)))
