"""Configuration files of TensorFlow Serving, with a comment for each setting."""

from collections.abc import Sequence

from google.protobuf import text_encoding

from export.clients.signatures import Signature
from export.package import documents

MAX_BATCH_SIZE = 32
BATCHING = "batching_params.pbtxt"  # TensorFlow Serving expects this name in a version.


def batching_parameters(signatures: Sequence[Signature]) -> str | None:
    """Return the content of batching_params.pbtxt.

    Args:
        signatures: Signatures of the SavedModel.

    Returns:
        A BatchingParameters message in protobuf's text format. `None` if an input has lists per
        row, such as choices: TensorFlow Serving fails all requests of a batch unless their lists
        have the same length.
    """
    if any(tensor.rank == 2 for signature in signatures for tensor in signature.inputs.values()):
        return None
    return documents.render(BATCHING, max_batch_size=MAX_BATCH_SIZE)


def models_config(name: str) -> str:
    """Return the content of models.config, a ModelServerConfig in protobuf's text format.

    Args:
        name: Name of the model. Any string is valid.
    """
    return documents.render(
        "models.config",
        name=name,
        escaped_name=text_encoding.CEscape(name.encode(), as_utf8=False),
    )
