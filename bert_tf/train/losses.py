"""Losses, one value an element. Sums, weights and the one division belong to the train step.

Legend: B texts, C classes.
"""

import keras
import tensorflow as tf


def softmax_cross_entropy(labels_B, logits_BC):
    """-log softmax(logits)[label]; labels are class ids."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(labels_B, tf.int32), tf.cast(logits_BC, tf.float32)
    )


def is_correct(labels_B, logits_BC):
    """1 where the highest score is the label's, else 0."""
    best_B = tf.argmax(logits_BC, axis=-1, output_type=tf.int32)
    return tf.cast(best_B == tf.cast(labels_B, tf.int32), tf.float32)


def sigmoid_cross_entropy(labels_B, logits_B1):
    """Binary cross-entropy of one logit, which stands for label 1."""
    return tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels_B, tf.float32), tf.cast(logits_B1, tf.float32)[:, 0]
    )


@keras.saving.register_keras_serializable("bert_tf")
class WeightedMean(keras.losses.Loss):
    """A loss for Keras `compile`: sum(weight * loss) / sum(weight), as the train step divides."""

    def __init__(self, loss, name=None):
        self.function = loss if callable(loss) else globals()[loss]
        super().__init__(name=name or self.function.__name__, reduction="mean_with_sample_weight")

    def call(self, y_true, y_pred):
        return self.function(y_true, y_pred)

    def get_config(self):
        return {"loss": self.function.__name__, "name": self.name}
