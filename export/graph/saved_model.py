"""Export of a trained pipeline as a SavedModel, by tracing the layers that were trained.

All of the graph is on the CPU, or the model on a GPU and the rest on the CPU. A node without a
device is placed by the server, which takes a GPU for all operations that have a kernel for it: a
tokenizer, whose strings stay on the CPU, would be copied back and forth. So each node names its
device. Servers do not load a graph that names a device that they do not have.

Shape suffixes: B texts, H hidden size, W sequences, R rows, L tokens per row, T flattened tokens.
"""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model.pywrap_saved_model import fingerprinting

from bert_tf.model.encoder import Encoder
from bert_tf.storage import files, format_versions
from bert_tf.text import unicode_tables
from export.graph.served_encoder import ServedEncoder, has_packed_products

if TYPE_CHECKING:
    from tasks.graph.pipeline import Pipeline
    from tasks.model.task_model import TaskModel

CPU, GPU = "/device:CPU:0", "/device:GPU:0"
# Rows and their lengths are padded to one of few sizes, so that memory and kernels are reused.
ROWS = tuple(sorted(size for power in range(12) for size in (2**power, 3 * 2**power)))
LENGTHS = (16, 32, 64, 128, 256, 384, 512)
_OF_VARIABLES = ("VarHandleOp", "AssignVariableOp", "ReadVariableOp", "DisableCopyOnRead")

TokenFunction = Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]


def write_saved_model(
    model: TaskModel,
    directory: os.PathLike | str,
    precision: str = "float32",
    portable: bool = False,
    device: str = "cpu",
) -> Pipeline:
    """Write a trained model as a SavedModel that maps strings to predictions.

    Signatures:

    - serving_default: the task's inputs, strings `(B,)` or `(B, C)` in UTF-8. Returns the task's
      prediction.
    - tokenize: the same inputs. Returns token ids, mask, segments and character offsets.
    - embed: "text" `(B,)`. Returns "pooled" and "mean", float32 `(B, H)`.
    - The others that the pipeline serves, such as next_sentence.

    Copies of vocab.txt, config.json, task.json and tokenizer.json are stored in assets.extra for
    inspection, with export.json, which names device and precision. The graph reads no file.

    The weights are stored in variables/. A graph for CPUs is that of `ServedEncoder` if this
    TensorFlow has packed products, otherwise that of the trained encoder.

    Arguments as for `export.publish`. Outputs are always float32.

    Returns:
        The pipeline that was written.
    """
    # A tf.Module holds variables and functions, but no state of Keras.
    module = tf.Module(name="servable")
    pipeline = served_pipeline(model, precision, portable, device)
    # TensorFlow would trace the tf.functions once more for saving, which takes seconds.
    module.functions = {
        name: function.get_concrete_function() for name, function in pipeline.signatures.items()
    }
    module.weights = [_variables(function) for function in module.functions.values()]
    tf.saved_model.save(module, str(directory), signatures=module.functions)
    _pin_saved_model(directory, device)
    extra = pathlib.Path(directory) / "assets.extra"
    extra.mkdir()
    model.vocabulary.save(extra / "vocab.txt")
    for name, values in (
        ("config.json", model.config.to_dict()),
        ("task.json", format_versions.with_version(model.task.to_dict())),
        (
            "export.json",
            format_versions.with_version({"device": device, "precision": precision}),
        ),
        (
            "tokenizer.json",
            {"tables_sha256": unicode_tables.sha256(), "unicode": unicode_tables.unicode_version()},
        ),
    ):
        files.atomic_write_json(extra / name, values)
    return pipeline


def portable_encoder(encoder: Encoder, precision: str) -> Encoder:
    """Return the trained encoder in a precision, for graphs of standard operations.

    Args:
        encoder: The trained encoder.
        precision: "float32"; or "bfloat16" or "float16", in which the weights of products are
            stored too.
    """
    if encoder.dtype_policy.name == precision:
        return encoder
    portable = Encoder(encoder.config, dtype=precision)
    portable.build()
    for variable, trained in zip(portable.weights, encoder.weights, strict=True):
        variable.assign(tf.cast(trained, variable.dtype))
    return portable


def served_pipeline(
    model: TaskModel, precision: str, portable: bool = False, device: str = "cpu"
) -> Pipeline:
    """Return the pipeline with the served encoder in its model, which shares all other layers.

    Arguments as for `export.publish`.
    """
    pipeline = model.serving.pipeline
    is_packed = device == "cpu" and not portable and has_packed_products(precision)
    with tf.device(CPU if device == "cpu" else None):
        encoder = (ServedEncoder if is_packed else portable_encoder)(model.encoder, precision)
    # copy.copy of a Keras model writes and reads all of it, and asks for a complete get_config.
    network = object.__new__(type(pipeline.model))
    vars(network).update(vars(pipeline.model), encoder=encoder)
    short_tokens = encoder.short_tokens if is_packed else 0
    served = type(pipeline)(pipeline.task, pipeline.tokenizer, network, short_tokens)
    served.token_functions = {
        name: on_cpu(function) if device == "cpu" else on_gpu(function, model.task.max_seq_length)
        for name, function in served.token_functions.items()
    }
    return served


def _variables(function):
    """Return the variables of a function in the order of their capture.

    `function.variables` has another order in each process, and files would differ with it.
    """
    variables = {id(variable.handle): variable for variable in function.variables}
    return [variables[id(of)] for of in function.graph.external_captures if id(of) in variables]


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


def _pin_saved_model(directory: os.PathLike | str, device: str) -> None:
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
