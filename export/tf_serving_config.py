"""Configuration files of TensorFlow Serving, with a comment for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from google.protobuf import text_encoding

if TYPE_CHECKING:
    from export.signature_defs import SignatureInfo

MAX_BATCH_SIZE = 32
BATCHING = "batching_params.pbtxt"  # TensorFlow Serving expects this name in a version.

_BATCHING = """\
# With this file TensorFlow Serving joins simultaneous requests into one batch: more requests per
# second at a slightly higher latency. Without it, each request is a batch of its own.
#
#   tensorflow_model_server ... --enable_batching --enable_per_model_batching_parameters
#
# reads this file from each version that has one. Models without it are not batched. The number of
# threads is the number of processor cores; --batching_parameters_file sets another.
#
# TensorFlow Serving compares the shapes of requests only when it joins them. A request of another
# rank than in SIGNATURES.md fails together with those that it is joined with (FAILED_PRECONDITION),
# which can be sent again. If clients are not trusted, do not enable batching. A request with zero
# rows waits until another one arrives.

# Maximum number of rows per batch. A request with more rows is rejected (INVALID_ARGUMENT) without
# affecting others; send several smaller ones. Do not set enable_large_batch_splitting: outputs are
# padded to the longest row, so TensorFlow Serving could not concatenate parts of different width.
max_batch_size {{ value: {max_batch_size} }}

# Time that a request waits for others, in microseconds. With 0 a batch consists of the requests
# that are already waiting. With many small clients, try 1000 to 10000.
batch_timeout_micros {{ value: 0 }}

# Maximum number of waiting batches. Further requests are rejected at once (UNAVAILABLE), so that
# clients can retry elsewhere instead of waiting longer and longer.
max_enqueued_batches {{ value: 100 }}

# allowed_batch_sizes is not set: all sizes are equally efficient, and padding rows would cost time.
# pad_variable_length_inputs is not set: texts of different lengths need no padding.
"""

_MODELS = """\
# Serves {shown} from the models directory of TensorFlow Serving's Docker image:
#
#   docker run -p 8500:8500 -p 8501:8501 -v MODELS:/models tensorflow/serving \\
#       --model_config_file=/models/THIS_FILE
#
# MODELS is the parent of the model's directory of versions, and THIS_FILE a copy of this file in
# MODELS. The newest version is served, and later ones as soon as they appear. For several models,
# put the "config" block of each into one file.
model_config_list {{
  config {{
    # Name for clients: /v1/models/NAME
    name: "{name}"
    # Directory of versions, whose names are numbers.
    base_path: "/models/{name}"
    model_platform: "tensorflow"
  }}
}}
"""


def batching_parameters(signatures: Sequence[SignatureInfo]) -> str | None:
    """Return the content of batching_params.pbtxt.

    Args:
        signatures: Signatures of the SavedModel.

    Returns:
        A BatchingParameters message in protobuf's text format. `None` if an input has lists per
        row, such as choices: TensorFlow Serving fails all requests of a batch unless their lists
        have the same length.
    """
    if any(len(tensor.shape) > 1 for signature in signatures for tensor in signature.inputs):
        return None
    return _BATCHING.format(max_batch_size=MAX_BATCH_SIZE)


def models_config(name: str) -> str:
    """Return the content of models.config, a ModelServerConfig in protobuf's text format.

    Args:
        name: Name of the model. Any string is valid.
    """
    return _MODELS.format(
        shown=printable(name), name=text_encoding.CEscape(name.encode(), as_utf8=False)
    )


def printable(name: str) -> str:
    """Return a name with "?" for every character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in name)
