"""Configuration files of TensorFlow Serving, with a comment for each setting."""

from collections.abc import Sequence

from google.protobuf import text_encoding

from export.clients.signatures import Signature
from export.package import documents

MAX_BATCH_SIZE = {"cpu": 32, "gpu": 128}
BATCHING = "batching_params.pbtxt"  # TensorFlow Serving expects this name in a version.


def batching_parameters(signatures: Sequence[Signature], device: str = "cpu") -> str | None:
    """Return the content of batching_params.pbtxt, a BatchingParameters in text format.

    `None` if an input has lists per row, such as choices: TensorFlow Serving fails all requests of
    a batch unless their lists have the same length.
    """
    if any(tensor.rank == 2 for signature in signatures for tensor in signature.inputs.values()):
        return None
    return documents.render(BATCHING, max_batch_size=MAX_BATCH_SIZE[device], device=device)


def models_config(name: str) -> str:
    """Return the content of models.config, a ModelServerConfig in text format, for any name."""
    return documents.render(
        "models.config",
        name=name,
        escaped_name=text_encoding.CEscape(name.encode(), as_utf8=False),
    )
