"""Process of planner.py that sends requests to a SavedModel, with few imports."""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from bert_tf.system.command import import_tensorflow

import_tensorflow()  # As in the commands.

import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations of the tokenizer.


def send(directory, texts, batch):
    """Return the median time of the requests, after sending all of them once."""
    serve = tf.saved_model.load(directory).signatures["serving_default"]
    requests = [texts[first : first + batch] for first in range(0, len(texts), batch)]
    seconds = []
    for request in 2 * requests:
        began = time.perf_counter()
        serve(text=tf.constant(request))
        seconds.append(time.perf_counter() - began)
    return {"median_ms": 1000 * statistics.median(seconds[len(requests) :])}
