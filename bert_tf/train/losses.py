"""Losses, one value an element. Sums, weights and the one division belong to the train step.

A focal loss (Lin et al. 2017) scales each element's cross-entropy by (1 - p)^gamma, p the label's
probability: what is right already counts less. With gamma 0 it is the cross-entropy; a task binds
gamma by functools.partial.

Legend: B texts, C classes, L tokens.
"""

import functools

import keras
import tensorflow as tf

from bert_tf.model import fused_ops


def softmax_cross_entropy(labels_B, logits_BC):
    """-log softmax(logits)[label]; labels are class ids. Of tokens too: [B, L] and [B, L, C]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(labels_B, tf.int32), tf.cast(logits_BC, tf.float32)
    )


def vocab_cross_entropy(labels_BP, logits_BPV):
    """softmax_cross_entropy over the entries of a vocabulary, as one kernel.

    Nothing looks at the labels: what is no entry gives a loss that means nothing.
    """
    logits_NV = tf.reshape(tf.cast(logits_BPV, tf.float32), [-1, logits_BPV.shape[-1]])
    labels_N = tf.reshape(tf.cast(labels_BP, tf.int32), [-1])
    return tf.reshape(fused_ops.cross_entropy(labels_N, logits_NV), tf.shape(labels_BP))


def focal_softmax_cross_entropy(labels_B, logits_BC, gamma):
    """The focal form of softmax_cross_entropy, of the same shapes."""
    logits_BC = tf.cast(logits_BC, tf.float32)
    is_label_BC = tf.one_hot(tf.cast(labels_B, tf.int32), logits_BC.shape[-1]) > 0
    of_label_B = tf.reduce_sum(tf.where(is_label_BC, logits_BC, 0.0), axis=-1)
    of_others_B = tf.reduce_logsumexp(tf.where(is_label_BC, -float("inf"), logits_BC), axis=-1)
    return _focal(of_label_B - of_others_B, gamma)


def half_softmax_cross_entropy(positions_B, logits_BL):
    """Half of softmax_cross_entropy: a span's start and end, summed, are their mean as released."""
    return 0.5 * softmax_cross_entropy(positions_B, logits_BL)


def is_correct(labels_B, logits_BC):
    """1 where the highest score is the label's, else 0."""
    best_B = tf.argmax(logits_BC, axis=-1, output_type=tf.int32)
    return tf.cast(best_B == tf.cast(labels_B, tf.int32), tf.float32)


def sigmoid_cross_entropy(labels_B, logits_B1):
    """Binary cross-entropy of one logit, which stands for label 1."""
    return tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels_B, tf.float32), tf.cast(logits_B1, tf.float32)[:, 0]
    )


def focal_sigmoid_cross_entropy(labels_B, logits_B1, gamma):
    """The focal form of sigmoid_cross_entropy; labels are 0 or 1."""
    return _focal(_margins(labels_B, logits_B1[:, 0]), gamma)


def multi_label_cross_entropy(labels_BC, logits_BC):
    """The mean over labels of each one's binary cross-entropy [B]; 1 where a label is given."""
    losses_BC = tf.nn.sigmoid_cross_entropy_with_logits(
        tf.cast(labels_BC, tf.float32), tf.cast(logits_BC, tf.float32)
    )
    return tf.reduce_mean(losses_BC, axis=-1)


def focal_multi_label_cross_entropy(labels_BC, logits_BC, gamma):
    """The focal form of multi_label_cross_entropy; labels are 0 or 1."""
    return tf.reduce_mean(_focal(_margins(labels_BC, logits_BC), gamma), axis=-1)


def squared_error(values_B, outputs_B1):
    """(value - output)^2."""
    return tf.square(tf.cast(values_B, tf.float32) - tf.cast(outputs_B1, tf.float32)[:, 0])


def identity_loss(labels_B, errors_B):
    """Of a model that says itself how far off it is, as an autoencoder does."""
    return tf.cast(errors_B, tf.float32)


# Models that earlier versions saved have a WeightedMean of these names.
entry_cross_entropy = vocab_cross_entropy
given_error = identity_loss


def _margins(labels, logits):
    """The log-odds of the label that is given: the logit for 1, its negative for 0."""
    return (2.0 * tf.cast(labels, tf.float32) - 1.0) * tf.cast(logits, tf.float32)


def _focal(margins, gamma):
    """-(1 - p)^gamma log p, with p = sigmoid(margin).

    By the logarithms of p and of 1 - p: a power of 1 - p = 0 has no finite slope below gamma 1.
    """
    return tf.exp(-gamma * tf.nn.softplus(margins)) * tf.nn.softplus(-margins)


@keras.saving.register_keras_serializable("bert_tf")
class WeightedMean(keras.losses.Loss):
    """A loss for Keras `compile`: sum(weight * loss) / sum(weight), as the train step divides.

    `loss` is one of this module's functions, its name, or a functools.partial of it; `options` are
    what is bound, as gamma=2.0.
    """

    def __init__(self, loss, name=None, **options):
        if isinstance(loss, functools.partial):
            loss, options = loss.func, {**loss.keywords, **options}
        self.function, self.options = loss if callable(loss) else globals()[loss], options
        super().__init__(name=name or self.function.__name__, reduction="mean_with_sample_weight")

    def call(self, y_true, y_pred):
        return self.function(y_true, y_pred, **self.options)

    def get_config(self):
        return {"loss": self.function.__name__, "name": self.name, **self.options}
