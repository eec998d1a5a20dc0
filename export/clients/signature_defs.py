"""Signatures from protocol buffers: of SavedModels and of TensorFlow Serving's gRPC API."""

import os
import pathlib
from collections.abc import Mapping

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from bert_tf.errors import UserError
from export.clients.signatures import EXAMPLES, Signature, Tensor, is_public_signature, to_shape


def read_signatures(directory: os.PathLike | str) -> tuple[Signature, ...]:
    """Return the signatures of a SavedModel, as `from_definitions`. Its graph is not loaded.

    Raises:
        UserError: If saved_model.pb is damaged.
    """
    model = saved_model_pb2.SavedModel()
    try:
        model.ParseFromString((pathlib.Path(directory) / "saved_model.pb").read_bytes())
    except DecodeError:
        raise UserError("not published: saved_model.pb is damaged; export the run again") from None
    return from_definitions(model.meta_graphs[0].signature_def)


def from_definitions(
    definitions: Mapping[str, meta_graph_pb2.SignatureDef],
) -> tuple[Signature, ...]:
    """Return the public signatures, serving_default first and the others by name."""
    return tuple(
        Signature(name, _tensors(definitions[name].inputs), _tensors(definitions[name].outputs))
        for name in sorted(definitions, key=lambda name: (name != "serving_default", name))
        if is_public_signature(name)
    )


def _tensors(infos):
    order = {name: number for number, name in enumerate(EXAMPLES)}
    return {
        name: Tensor(
            name,
            tf.as_dtype(infos[name].dtype).name,
            to_shape(
                [dim.size for dim in infos[name].tensor_shape.dim],
                infos[name].tensor_shape.unknown_rank,
            ),
        )
        for name in sorted(infos, key=lambda name: (order.get(name, len(order)), name))
    }
