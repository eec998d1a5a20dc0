"""Files next to the graph in a published version, for those who run a server.

assets.extra/tf_serving_warmup_requests    warm-up records, see warmup.py
batching_params.pbtxt                      TensorFlow Serving's batching, if the model allows it
models.config                              TensorFlow Serving's list of models
SIGNATURES.md                              example requests with this model's responses
MODEL_CARD.md                              data, training, metrics and origin of the model
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from google.protobuf import text_encoding
from tensorflow.core.protobuf import fingerprint_pb2

from export.clients.signature_defs import read_signatures
from export.clients.signatures import Signature
from export.graph.served_encoder import FUSED_PRODUCT
from export.package import warmup
from export.package.documents import MetricChange, model_card, render, signature_page

if TYPE_CHECKING:
    import numpy as np

    from tasks.model.task_model import TaskModel


MAX_BATCH_SIZE = {"cpu": 32, "gpu": 128}
BATCHING = "batching_params.pbtxt"  # TensorFlow Serving expects this name in a version.


def prepare(
    directory: os.PathLike | str,
    model: TaskModel,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Signature, ...]:
    """Add the files that a server reads to a SavedModel, and return its signatures."""
    signatures = read_signatures(directory)
    settle_fingerprint(directory)
    warmup.write(directory, signatures, model, log)
    return signatures


def write_documents(
    directory: os.PathLike | str,
    name: str,
    model: TaskModel,
    precision: str,
    signatures: Sequence[Signature],
    predictions: Mapping[str, Mapping[str, np.ndarray]],
    change: MetricChange | None = None,
    device: str = "cpu",
) -> None:
    """Add the documentation and the server configurations to a SavedModel.

    `predictions` are the outputs for each signature's example request.
    """
    directory = pathlib.Path(directory)
    graph = (directory / "saved_model.pb").read_bytes()
    is_packed = FUSED_PRODUCT.encode() in graph
    card = model_card(name, model, precision, is_packed, change, device)
    specs = model.serving.pipeline.signature_specs()
    for file_name, text in (
        (BATCHING, batching_parameters(signatures, device)),
        ("models.config", models_config(name)),
        ("SIGNATURES.md", signature_page(name, signatures, specs, predictions)),
        ("MODEL_CARD.md", card),
    ):
        if text is not None:
            (directory / file_name).write_text(text, encoding="utf-8")


def batching_parameters(signatures: Sequence[Signature], device: str = "cpu") -> str | None:
    """Return the content of batching_params.pbtxt, a BatchingParameters in text format.

    `None` if an input has lists per row, such as choices: TensorFlow Serving fails all requests of
    a batch unless their lists have the same length.
    """
    if any(tensor.rank == 2 for signature in signatures for tensor in signature.inputs.values()):
        return None
    return render(BATCHING, max_batch_size=MAX_BATCH_SIZE[device], device=device)


def models_config(name: str) -> str:
    """Return the content of models.config, a ModelServerConfig in text format, for any name."""
    return render(
        "models.config",
        name=name,
        escaped_name=text_encoding.CEscape(name.encode(), as_utf8=False),
    )


def settle_fingerprint(directory: os.PathLike | str) -> None:
    """Replace the random identifier of a SavedModel by a hash of its content.

    TensorFlow draws the uuid in fingerprint.pb at random. Without it, two exports of a run are
    equal in every byte. The other fields are hashes of the graph, of the signatures and of the
    index of the weights, which contains their checksums.
    """
    path = pathlib.Path(directory) / "fingerprint.pb"
    if not path.exists():
        return  # TensorFlow has an option to write none.
    fingerprint = fingerprint_pb2.FingerprintDef.FromString(path.read_bytes())
    fingerprint.ClearField("uuid")
    content = fingerprint.SerializeToString(deterministic=True)
    fingerprint.uuid = str(int.from_bytes(hashlib.sha256(content).digest()[:16]))
    path.write_bytes(fingerprint.SerializeToString(deterministic=True))
