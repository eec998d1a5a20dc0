"""Signatures of published models, and example requests. TensorFlow is not imported.

Shape suffixes: B rows of a request, C choices.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

# Inputs of signatures have this order, so that a question comes before its context.
EXAMPLES: dict[str, list[Any]] = {
    "text": ["My invoice is wrong.", "The screen stays black."],
    "text_a": ["The shop opens at nine.", "The bill is too high."],
    "text_b": ["It is closed at eight.", "I like the colour."],
    "question": ["When does the shop open?", "Who wrote the letter?"],
    "context": ["The shop opens at nine and closes at six.", "The letter was written by Anna."],
    "prompt": ["It was raining, so", "The lamp was off, so"],
    "query": ["my invoice is wrong", "opening hours"],
    "texts": [["The bill is too high.", "I like the colour."], ["We open at nine.", "It rained."]],
    "choices": [["he took his umbrella.", "he lay in the sun."], ["it was dark.", "it was hot."]],
}
MASKED = ["The capital of France is [MASK].", "He took his [MASK], since it was raining."]
Shape = tuple[int | None, ...]  # `None` is an unknown size.


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Name, TensorFlow's dtype and shape of a tensor. An unknown rank has the shape `None`."""

    name: str
    dtype: str
    shape: Shape | None

    @property
    def rank(self) -> int | None:
        """Number of dimensions."""
        return None if self.shape is None else len(self.shape)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Name of a signature, and its inputs and outputs by name.

    The inputs of published models are strings of shape (B,) or (B, C).
    """

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def example(self) -> dict[str, list]:
        """Return an example request of two rows, as input names with their values."""
        if "token" in self.outputs:
            return {"text": MASKED}
        if self.inputs.keys() == {"text", "prompt"}:
            return {"text": EXAMPLES["text"], "prompt": ["query: ", "query: "]}
        plain = EXAMPLES["text"]
        return {
            name: EXAMPLES.get(name) or ([[text] for text in plain] if tensor.rank == 2 else plain)
            for name, tensor in self.inputs.items()
        }


def is_public_signature(signature_name: str) -> bool:
    """Whether clients can call a signature; SavedModels store their initialization as one too."""
    return not signature_name.startswith("__saved_model_")


def to_shape(sizes: Iterable[int], unknown_rank: bool) -> Shape | None:
    """Return the shape that a TensorShapeProto describes; a negative size is an unknown one."""
    return None if unknown_rank else tuple(None if size < 0 else size for size in sizes)
