"""Backends of benchmarks/serving.py that need no PyTorch: SavedModels and a LiteRT file.

The plan is one of serving_process.py.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from serving_process import THREADS, plan_of_this_process, work


def load_saved_model(model, precision):
    """Return a function from strings to probabilities."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    served = tf.saved_model.load(model).signatures["serving_default"]
    return lambda texts: served(text=tf.constant(texts))["probabilities"].numpy()


def load_litert(model, precision):
    """Return a function from strings to probabilities."""
    import tensorflow as tf

    from export.litert.client import load_pipeline

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    served = load_pipeline(model).signatures["serving_default"]
    return lambda texts: served(tf.constant(texts))["probabilities"].numpy()


# With the modules whose import is timed. TF Text registers the operations that tokenizers need.
SAVED_MODEL = ("tensorflow", "tensorflow_text"), load_saved_model
BACKENDS = {
    "ours": SAVED_MODEL,
    "litert": (SAVED_MODEL[0], load_litert),
    "keras-nlp": SAVED_MODEL,
}


if __name__ == "__main__":
    plan = plan_of_this_process()
    work(plan, *BACKENDS[plan["backend"]])
