"""Warm-up records: requests that TF Serving answers to itself before a version takes others.

The first requests of a signature are slow: its graph is optimized, kernels are built for each
shape. One record that fails keeps a server from loading the version at all, so the gate asks all of
them. Legend: B rows of a record.
"""

import itertools
import math
import pathlib

import tensorflow as tf

RELATIVE_PATH = "assets.extra/tf_serving_warmup_requests"  # The one at which TF Serving looks.
BATCH_SIZES = (1, 4, 16)
LENGTHS = (
    8,
    64,
    512,
    256,
)  # Words of a row, the most wanted first; fewer if the model takes fewer.
NUM_CHOICES = 2
BUDGET = 7e11  # Multiply-adds of all records: a replay of some 10 seconds on two cores.


def write(directory, signatures, trained, log=lambda line: None):
    """Writes records of every signature: few and many rows, short and long, as the budget allows.

    Needs tensorflow-serving-api, the extra "serving"; says so where it is missing. They carry no
    model's name, to which the server does not look, so that a directory may be renamed.
    """
    try:
        from tensorflow_serving.apis import prediction_log_pb2
    except ImportError:
        log(
            "no warm-up records written: they need tensorflow-serving-api; "
            "pip install 'bert_tf[serving]'"
        )
        return
    with tf.io.TFRecordWriter(str(pathlib.Path(directory) / RELATIVE_PATH)) as records:
        for signature, inputs in requests(signatures, trained):
            prediction_log = prediction_log_pb2.PredictionLog()
            request = prediction_log.predict_log.request
            request.model_spec.signature_name = signature
            for name, values in inputs.items():
                request.inputs[name].CopyFrom(tf.make_tensor_proto(values, tf.string))
            records.write(prediction_log.SerializeToString(deterministic=True))


def read(directory):
    """[(signature, {input: bytes, or lists of bytes})] of the records; none, if none were written.

    They are read as they will be served.
    """
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


def requests(signatures, trained):
    """[(signature, {input: strings})]: its example, then growing batches of growing texts.

    What goes over a signature's share of the budget is left out; the example never is.
    """
    config = trained.run.config
    weights_per_token = config.num_hidden_layers * (
        4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    )
    max_words = max(trained.task.max_seq_length - 3, 1)  # Beside [CLS] and two [SEP].
    lengths = list(dict.fromkeys(min(length, max_words) for length in LENGTHS))
    words = _words(trained.run.vocabulary)
    found = []
    for signature in signatures:
        tokens_left = BUDGET / weights_per_token / len(signatures)
        found.append((signature.name, signature.example()))
        ranks = [len(tensor.shape) for tensor in signature.inputs]
        for size, length in itertools.product(BATCH_SIZES, lengths):
            tokens = size * (length + 3) * (NUM_CHOICES if 2 in ranks else 1)
            if tokens > tokens_left:
                continue
            tokens_left -= tokens
            text = " ".join(itertools.islice(words, math.ceil(length / len(ranks))))
            values = {1: [text] * size, 2: [[text] * NUM_CHOICES] * size}
            inputs = {
                tensor.name: values[rank]
                for tensor, rank in zip(signature.inputs, ranks, strict=True)
            }
            found.append((signature.name, inputs))
    return found


def _words(vocabulary):
    """Whole words of a vocabulary, again and again: a token each."""
    plain = [entry for entry in vocabulary.entries if entry.isalpha() and entry == entry.lower()]
    return itertools.cycle(plain[:1000] or ["a"])
