"""SavedModel backends of benchmarks/serving.py, with TensorFlow and TF Text only."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from serving_process import THREADS, plan_of_this_process, work


def load(model, precision):
    """Return a function from strings to probabilities."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  Registers the operations that tokenizers need.

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    served = tf.saved_model.load(model).signatures["serving_default"]
    return lambda texts: served(text=tf.constant(texts))["probabilities"].numpy()


if __name__ == "__main__":
    work(plan_of_this_process(), load)
