"""What stands beside the graph in a published version, for those who run a server.

assets.extra/tf_serving_warmup_requests    see warmup.py
batching_params.pbtxt, models.config       to start TF Serving with; the former where it may batch
SIGNATURES.md                              requests, and this model's answers to them
MODEL_CARD.md                              what it is, and where it is from
"""

import hashlib
import pathlib

from tensorflow.core.protobuf import fingerprint_pb2

from export import warmup
from export.model_card import model_card
from export.signature_defs import read_signatures
from export.signature_page import signature_page
from export.tf_serving_config import BATCHING, batching_parameters, models_config


def prepare(directory, trained, log=lambda line: None):
    """Adds to a SavedModel what a server reads of it; returns its signatures."""
    signatures = read_signatures(directory)
    settle_fingerprint(directory)
    warmup.write(directory, signatures, trained, log)
    return signatures


def write_documents(directory, name, trained, precision, signatures, predictions):
    """Adds the files for people; `predictions` {signature: {output: array}} are to the examples."""
    directory = pathlib.Path(directory)
    for file_name, text in (
        (BATCHING, batching_parameters(signatures)),
        ("models.config", models_config(name)),
        ("SIGNATURES.md", signature_page(name, signatures, trained.task.kind, predictions)),
        ("MODEL_CARD.md", model_card(name, trained, precision)),
    ):
        if text is not None:
            (directory / file_name).write_text(text, encoding="utf-8")


def settle_fingerprint(directory):
    """Gives a SavedModel an identifier that follows from what is in it.

    TensorFlow draws it at random, the only thing in which two exports of one run differ. The other
    fields are hashes of the graph, the signatures and the weights' index with their checksums.
    """
    path = pathlib.Path(directory) / "fingerprint.pb"
    if not path.exists():
        return  # TensorFlow can be told to write none.
    fingerprint = fingerprint_pb2.FingerprintDef.FromString(path.read_bytes())
    fingerprint.ClearField("uuid")
    content = fingerprint.SerializeToString(deterministic=True)
    fingerprint.uuid = str(int.from_bytes(hashlib.sha256(content).digest()[:16]))
    path.write_bytes(fingerprint.SerializeToString(deterministic=True))
