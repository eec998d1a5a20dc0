"""Warm-up records, which TensorFlow Serving runs before a new version receives requests.

The first requests to a signature are slow, since its graph is optimized and kernels are built for
each shape. If a record fails, servers do not load the version. The parity check runs all of them.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from export.clients.signatures import Signature

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

# The path is fixed by TensorFlow Serving.
RELATIVE_PATH = "assets.extra/tf_serving_warmup_requests"
BATCH_SIZES = (1, 4, 16)
# Words per row, the most important first; limited by the model's maximum sequence length.
LENGTHS = (8, 64, 512, 256)
NUM_CHOICES = 2
# Multiply-adds of all records together, about 10 seconds on two cores.
BUDGET = 7e11


def write(
    directory: os.PathLike | str,
    signatures: Sequence[Signature],
    model: TaskModel,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Write warm-up records for every signature, with few and many, short and long rows.

    Without tensorflow-serving-api (extra "serving") nothing is written. Records contain no model
    name, which servers ignore, so that the directory may be renamed.
    """
    try:
        from tensorflow_serving.apis import prediction_log_pb2
    except ImportError:
        log(
            "no warm-up records written: tensorflow-serving-api is missing; "
            "run pip install 'bert_tf[serving]'"
        )
        return
    with tf.io.TFRecordWriter(str(pathlib.Path(directory) / RELATIVE_PATH)) as records:
        for signature, inputs in requests(signatures, model):
            prediction_log = prediction_log_pb2.PredictionLog()
            request = prediction_log.predict_log.request
            request.model_spec.signature_name = signature
            for name, values in inputs.items():
                request.inputs[name].CopyFrom(tf.make_tensor_proto(values, tf.string))
            records.write(prediction_log.SerializeToString(deterministic=True))


def read(directory: os.PathLike | str) -> list[tuple[str, dict[str, list]]]:
    """Return the warm-up records of a SavedModel: signature names with inputs as `bytes`."""
    path = pathlib.Path(directory) / RELATIVE_PATH
    if not path.exists():
        return []
    from tensorflow_serving.apis import prediction_log_pb2

    found = []
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
        inputs = {name: tf.make_ndarray(value).tolist() for name, value in request.inputs.items()}
        found.append((request.model_spec.signature_name, inputs))
    return found


def requests(
    signatures: Sequence[Signature], model: TaskModel
) -> list[tuple[str, dict[str, list]]]:
    """Return the requests of the warm-up records: signature names with their inputs.

    Each signature has an equal part of `BUDGET`. Its example request is always included; then
    come the batches of `BATCH_SIZES` and `LENGTHS` that fit into the budget.
    """
    config = model.config
    weights_per_token = config.num_hidden_layers * (
        4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    )
    max_words = max(model.task.max_seq_length - 3, 1)  # Without [CLS] and two [SEP].
    lengths = list(dict.fromkeys(min(length, max_words) for length in LENGTHS))
    words = _words(model.vocabulary)
    found = []
    for signature in signatures:
        tokens_left = BUDGET / weights_per_token / len(signatures)
        found.append((signature.name, signature.example()))
        has_lists = any(tensor.rank == 2 for tensor in signature.inputs.values())
        for size, length in itertools.product(BATCH_SIZES, lengths):
            tokens = size * (length + 3) * (NUM_CHOICES if has_lists else 1)
            if tokens > tokens_left:
                continue
            tokens_left -= tokens
            text = " ".join(itertools.islice(words, math.ceil(length / len(signature.inputs))))
            inputs = {
                name: [[text] * NUM_CHOICES if tensor.rank == 2 else text] * size
                for name, tensor in signature.inputs.items()
            }
            found.append((signature.name, inputs))
    return found


def _words(vocabulary):
    """Repeat words of a vocabulary endlessly; each is a single token."""
    plain = [entry for entry in vocabulary.entries if entry.isalpha() and entry == entry.lower()]
    return itertools.cycle(plain[:1000] or ["a"])
