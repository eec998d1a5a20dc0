"""Signatures of a SavedModel, read from its file, and example requests.

Shape suffixes: B rows of a request, C choices.
"""

import dataclasses
import os
import pathlib
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

from bert_tf.errors import UserError

EXAMPLES: dict[str, list[Any]] = {
    "text": ["My invoice is wrong.", "The screen stays black."],
    "text_a": ["The shop opens at nine.", "The bill is too high."],
    "text_b": ["It is closed at eight.", "I like the colour."],
    "question": ["When does the shop open?", "Who wrote the letter?"],
    "context": ["The shop opens at nine and closes at six.", "The letter was written by Anna."],
    "prompt": ["It was raining, so", "The lamp was off, so"],
    "choices": [["he took his umbrella.", "he lay in the sun."], ["it was dark.", "it was hot."]],
}
MASKED = ["The capital of France is [MASK].", "He took his [MASK], since it was raining."]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Name, dtype and shape of an input or output. `None` in a shape is an unknown size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class SignatureInfo:
    """One signature of a SavedModel. Its inputs are strings of shape (B,) or (B, C)."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def example(self) -> dict[str, list]:
        """Return an example request of two rows, as input names with their values."""
        if "token" in {output.name for output in self.outputs}:
            return {"text": MASKED}
        plain = EXAMPLES["text"]
        return {
            tensor.name: EXAMPLES.get(tensor.name)
            or ([[text] for text in plain] if len(tensor.shape) == 2 else plain)
            for tensor in self.inputs
        }


def read_signatures(directory: os.PathLike | str) -> tuple[SignatureInfo, ...]:
    """Read the signatures of a SavedModel.

    Args:
        directory: The SavedModel. Its graph is not loaded.

    Returns:
        The signatures, serving_default first and the others by name.

    Raises:
        UserError: If saved_model.pb is damaged.
    """
    model = saved_model_pb2.SavedModel()
    try:
        model.ParseFromString((pathlib.Path(directory) / "saved_model.pb").read_bytes())
    except DecodeError:
        raise UserError("not published: saved_model.pb is damaged; export the run again") from None
    definitions = model.meta_graphs[0].signature_def
    return tuple(
        SignatureInfo(name, _tensors(definitions[name].inputs), _tensors(definitions[name].outputs))
        for name in sorted(definitions, key=lambda name: (name != "serving_default", name))
        if not name.startswith("__")  # TensorFlow's initialization is stored among them.
    )


def _tensors(infos):
    # Inputs in the order of EXAMPLES, so that a question comes before its context.
    order = {name: number for number, name in enumerate(EXAMPLES)}
    return tuple(
        Tensor(
            name,
            tf.as_dtype(infos[name].dtype).name,
            tuple(None if dim.size < 0 else dim.size for dim in infos[name].tensor_shape.dim),
        )
        for name in sorted(infos, key=lambda name: (order.get(name, len(order)), name))
    )
