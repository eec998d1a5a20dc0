"""Losses per element. The train step weights, sums and divides them.

The argument `gamma` of a cross-entropy chooses its focal form (Lin et al. 2017), which scales the
loss of each element by (1 - p)^gamma, p being the probability of the label, so that well-classified
elements count less. Tasks bind it with `functools.partial`.

The divergences (Hinton et al. 2015) compare the outputs of a student with those of its teacher,
both divided by a temperature. The factor temperature^2 keeps the size of their gradient, about
that of a cross-entropy, for every temperature.

Shape suffixes: B sequences, C classes or texts of a query, L tokens, P predictions per sequence,
V vocabulary size.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeGuard

import keras
import tensorflow as tf

from bert_tf.model import fused_ops
from bert_tf.model.layout import MASKED_SCORE


@keras.saving.register_keras_serializable("bert_tf")
class BatchLoss:
    """Loss whose elements depend on all examples of the global batch, such as in-batch negatives.

    `TrainStep` computes the outputs of all parts of a batch before this loss, so that it is the
    same for any number of replicas and accumulation steps.

    Args:
        function: Maps (labels, output, weights), gathered over all replicas, to one loss per
            element; or its name, if it is registered with Keras. Elements of weight 0 are padding:
            the losses of others may not depend on them.
        **options: Arguments bound to the function.
    """

    def __init__(self, function: str | Callable[..., tf.Tensor], **options: Any) -> None:
        if isinstance(function, str):
            function = keras.saving.get_registered_object(function)
        assert callable(function)
        self.function: Callable[..., tf.Tensor] = function
        self.options, self.__name__ = options, function.__name__

    def __call__(
        self, labels: tf.Tensor, output: tf.Tensor, weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return the losses of this replica's elements, float32 `(B,)`."""
        weights = tf.ones(tf.shape(labels)[:1]) if weights is None else weights
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return self.function(labels, output, weights, **self.options)
        gathered = [
            tf.ensure_shape(replica.all_gather(values, axis=0), [None, *values.shape[1:]])
            for values in (labels, output, weights)
        ]
        sizes = replica.all_gather(tf.shape(labels)[:1], axis=0)
        first = tf.reduce_sum(sizes[: replica.replica_id_in_sync_group])
        return self.function(*gathered, **self.options)[first : first + tf.shape(labels)[0]]

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config; it stores the function's name."""
        return {"function": keras.saving.get_registered_name(self.function), **self.options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create the loss from its Keras config."""
        return cls(**config)


def softmax_cross_entropy(
    labels_B: tf.Tensor, logits_BC: tf.Tensor, gamma: float = 0.0
) -> tf.Tensor:
    """Return -log softmax(logits)[label].

    Args:
        labels_B: Integer class ids, `(B,)`, or `(B, L)` for tokens.
        logits_BC: Float `(B, C)`, or `(B, L, C)`.
        gamma: Exponent of the focal form.

    Returns:
        float32, shaped like the labels; a last axis of 1 is dropped.
    """
    labels_B = _without_axis(labels_B, logits_BC, tf.int32)
    logits_BC = tf.cast(logits_BC, tf.float32)
    if not gamma:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels_B, logits_BC)
    is_label_BC = tf.one_hot(labels_B, logits_BC.shape[-1]) > 0
    # The log-odds of the label against all other classes, log p - log (1 - p).
    of_label_B = tf.reduce_sum(tf.where(is_label_BC, logits_BC, 0.0), axis=-1)
    of_others_B = tf.reduce_logsumexp(tf.where(is_label_BC, -float("inf"), logits_BC), axis=-1)
    return _focal(of_label_B - of_others_B, gamma)


def vocab_cross_entropy(labels_BP: tf.Tensor, logits_BPV: tf.Tensor) -> tf.Tensor:
    """Return softmax cross-entropy over a vocabulary, as one fused kernel.

    The labels are not validated: an id outside of the vocabulary yields a meaningless loss.

    Args:
        labels_BP: Integer token ids, `(B, P)`.
        logits_BPV: Float `(B, P, V)`.

    Returns:
        float32 `(B, P)`.
    """
    labels_BP = _without_axis(labels_BP, logits_BPV, tf.int32)
    logits_NV = tf.reshape(tf.cast(logits_BPV, tf.float32), [-1, logits_BPV.shape[-1]])
    losses_N = fused_ops.cross_entropy(tf.reshape(labels_BP, [-1]), logits_NV)
    return tf.reshape(losses_N, tf.shape(labels_BP))


def half_softmax_cross_entropy(positions_B: tf.Tensor, logits_BL: tf.Tensor) -> tf.Tensor:
    """Return half of `softmax_cross_entropy`.

    The losses of a span's start and end then add up to their mean, as in the released run_squad.py.
    """
    return 0.5 * softmax_cross_entropy(positions_B, logits_BL)


def is_correct(labels_B: tf.Tensor, logits_BC: tf.Tensor) -> tf.Tensor:
    """Return 1.0 for correct labels, otherwise 0.0, float32 `(B,)`, or `(B, L)` for tokens.

    Args:
        labels_B: Integer class ids, `(B,)` or `(B, L)`; or multi-hot labels `(B, C)`, whose result
            is the fraction of correct decisions.
        logits_BC: One logit per class; or a single one, of the second of two classes.
    """
    labels_B = _without_axis(labels_B, logits_BC, tf.int32)
    if len(logits_BC.shape) == len(labels_B.shape):
        correct_BC = tf.equal(tf.cast(logits_BC > 0, tf.int32), labels_B)
        return tf.reduce_mean(tf.cast(correct_BC, tf.float32), axis=-1)
    if logits_BC.shape[-1] == 1:
        best_B = tf.cast(logits_BC[..., 0] > 0, tf.int32)
    else:
        best_B = tf.argmax(logits_BC, axis=-1, output_type=tf.int32)
    # The rank of == would be unknown if one of the two batch sizes is.
    return tf.cast(tf.equal(best_B, labels_B), tf.float32)


def sigmoid_cross_entropy(
    labels_B: tf.Tensor, logits_B1: tf.Tensor, gamma: float = 0.0
) -> tf.Tensor:
    """Return binary cross-entropy `(B,)` of labels 0 or 1, `(B,)`, and their logits `(B, 1)`."""
    return _binary_cross_entropy(_without_axis(labels_B, logits_B1), logits_B1[:, 0], gamma)


def multi_label_cross_entropy(
    labels_BC: tf.Tensor, logits_BC: tf.Tensor, gamma: float = 0.0
) -> tf.Tensor:
    """Return the mean binary cross-entropy over classes, `(B,)`.

    Labels are 0 or 1, `(B, C)`.
    """
    return tf.reduce_mean(_binary_cross_entropy(labels_BC, logits_BC, gamma), axis=-1)


def squared_error(values_B: tf.Tensor, outputs_B1: tf.Tensor) -> tf.Tensor:
    """Return (value - output)^2 `(B,)` of values `(B,)` and outputs `(B, 1)`."""
    outputs_B = tf.cast(outputs_B1, tf.float32)[:, 0]
    return tf.square(_without_axis(values_B, outputs_B1) - outputs_B)


def identity_loss(labels_B: tf.Tensor, errors_B: tf.Tensor) -> tf.Tensor:
    """Return the output itself, for models that compute their own error.

    An autoencoder's output is its reconstruction error. The labels are ignored.
    """
    return tf.cast(errors_B, tf.float32)


def softmax_divergence(
    teacher_BC: tf.Tensor, logits_BC: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(logits / T)).

    Args:
        teacher_BC: Logits of the teacher, `(B, C)`, or `(B, L, C)` for tokens. Where the student
            has MASKED_SCORE, as at padding, the teacher's value is ignored.
        logits_BC: Logits of the student, of the same shape.
        temperature: T > 0.

    Returns:
        float32 `(B,)`, or `(B, L)`.
    """
    logits_BC = tf.cast(logits_BC, tf.float32)
    teacher_BC = tf.where(logits_BC > MASKED_SCORE, tf.cast(teacher_BC, tf.float32), MASKED_SCORE)
    expected_BC = tf.nn.log_softmax(teacher_BC / temperature)
    difference_BC = expected_BC - tf.nn.log_softmax(logits_BC / temperature)
    return temperature**2 * tf.reduce_sum(tf.exp(expected_BC) * difference_BC, axis=-1)


def listwise_softmax_cross_entropy(relevance_BC: tf.Tensor, logits_BC: tf.Tensor) -> tf.Tensor:
    """Return the softmax cross-entropy over the texts of a query (Cao et al. 2007), `(B,)`.

    Args:
        relevance_BC: Relevance of each text, `(B, C)`, whose shares of the sum are the expected
            probabilities; those below 0 count as 0. Without a relevant text the loss is 0.
        logits_BC: Float `(B, C)`, MASKED_SCORE where a text is missing.
    """
    logits_BC = tf.cast(logits_BC, tf.float32)
    gains_BC = tf.nn.relu(_per_text(relevance_BC, logits_BC))
    gains_BC = tf.where(logits_BC > MASKED_SCORE, gains_BC, 0.0)
    expected_BC = tf.math.divide_no_nan(gains_BC, tf.reduce_sum(gains_BC, axis=1, keepdims=True))
    return -tf.reduce_sum(expected_BC * tf.nn.log_softmax(logits_BC), axis=1)


def listwise_binary_cross_entropy(relevance_BC: tf.Tensor, logits_BC: tf.Tensor) -> tf.Tensor:
    """Return the mean binary cross-entropy over the texts of a query, `(B,)`.

    Args:
        relevance_BC: Relevance of each text, `(B, C)`, clipped to probabilities from 0 to 1.
        logits_BC: Float `(B, C)`, MASKED_SCORE where a text is missing.
    """
    logits_BC = tf.cast(logits_BC, tf.float32)
    expected_BC = tf.clip_by_value(_per_text(relevance_BC, logits_BC), 0.0, 1.0)
    losses_BC = tf.nn.sigmoid_cross_entropy_with_logits(expected_BC, logits_BC)
    return _mean_of_texts(losses_BC, logits_BC)


def listwise_binary_divergence(
    teacher_BC: tf.Tensor, logits_BC: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return `sigmoid_divergence` as the mean over the texts of a query, `(B,)`."""
    losses_BC = sigmoid_divergence(
        teacher_BC[..., tf.newaxis], logits_BC[..., tf.newaxis], temperature
    )
    return _mean_of_texts(losses_BC, logits_BC)


def _per_text(relevance_BC, logits_BC):
    """Return the relevance as float32; queries without labels may have had more texts."""
    missing = tf.shape(logits_BC)[1] - tf.shape(relevance_BC)[1]
    return tf.pad(tf.cast(relevance_BC, tf.float32), [[0, 0], [0, missing]])


def _mean_of_texts(values_BC, logits_BC):
    """Return means `(B,)` over the texts that are not missing, 0 if all are."""
    # Compared like this, a logit that is NaN is not taken for a missing text, whose loss is 0.
    is_text_BC = tf.where(logits_BC <= MASKED_SCORE, 0.0, 1.0)
    # At missing texts a loss may be any number, also a large one.
    total_B = tf.reduce_sum(tf.where(is_text_BC > 0, values_BC, 0.0), axis=1)
    return tf.math.divide_no_nan(total_B, tf.reduce_sum(is_text_BC, axis=1))


def half_softmax_divergence(
    teacher_BL: tf.Tensor, logits_BL: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return half of `softmax_divergence`, as `half_softmax_cross_entropy` of a span's ends."""
    return 0.5 * softmax_divergence(teacher_BL, logits_BL, temperature)


def sigmoid_divergence(
    teacher_BC: tf.Tensor, logits_BC: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return T^2 KL of Bernoulli distributions, sigmoid(logit / T), as the mean over classes.

    Args:
        teacher_BC: Logits of the teacher, `(B, C)`; C is 1 for two labels.
        logits_BC: Logits of the student, of the same shape.
        temperature: T > 0.

    Returns:
        float32 `(B,)`.
    """
    teacher_BC = tf.cast(teacher_BC, tf.float32) / temperature
    logits_BC = tf.cast(logits_BC, tf.float32) / temperature
    # -softplus(-x) is the logarithm of sigmoid(x), and -softplus(x) that of 1 - sigmoid(x).
    of_positive_BC = tf.nn.softplus(-logits_BC) - tf.nn.softplus(-teacher_BC)
    of_negative_BC = tf.nn.softplus(logits_BC) - tf.nn.softplus(teacher_BC)
    losses_BC = tf.sigmoid(teacher_BC) * of_positive_BC + tf.sigmoid(-teacher_BC) * of_negative_BC
    return temperature**2 * tf.reduce_mean(losses_BC, axis=-1)


def squared_difference(
    teacher_B1: tf.Tensor, outputs_B1: tf.Tensor, temperature: float
) -> tf.Tensor:
    """Return (teacher - output)^2 `(B,)` of outputs `(B, 1)`; values have no temperature."""
    return squared_error(tf.cast(teacher_B1, tf.float32)[:, 0], outputs_B1)


def _without_axis(labels, output, dtype=tf.float32):
    """Return labels as the dtype, and those `(B, 1)` of an output `(B, C)` as `(B,)`.

    Keras leaves both shapes to the loss. Broadcast with losses `(B,)`, they would give `(B, B)`.
    """
    labels, output = tf.cast(labels, dtype), tf.convert_to_tensor(output)
    is_column = labels.shape.rank == output.shape.rank and labels.shape[-1] == 1
    return labels[..., 0] if is_column else labels


def _binary_cross_entropy(labels, logits, gamma):
    """Return the loss of each logit."""
    labels, logits = tf.cast(labels, tf.float32), tf.cast(logits, tf.float32)
    if not gamma:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
    # The log-odds of the label: the logit if it is 1, the negated logit if it is 0.
    return _focal((2.0 * labels - 1.0) * logits, gamma)


def _focal(margins, gamma):
    """Return -(1 - p)^gamma log p, with p = sigmoid(margin).

    It is computed from log p and log (1 - p), because a power of 1 - p = 0 has no finite gradient
    for gamma below 1.
    """
    return tf.exp(-gamma * tf.nn.softplus(margins)) * tf.nn.softplus(-margins)


@keras.saving.register_keras_serializable("bert_tf")
class WeightedMean(keras.losses.Loss):
    """Loss for Keras `compile`: sum(weight * loss) / sum(weight), as in the train step.

    Args:
        loss: Function of this module, its name, or a `functools.partial` of it; or a `BatchLoss`.
            Labels and weights `(B, 1)` of one loss per example count as `(B,)`.
        name: Name of the Keras loss. Defaults to the function's name.
        **options: Arguments bound to the function, such as gamma=2.0.
    """

    def __init__(
        self, loss: str | Callable[..., tf.Tensor], name: str | None = None, **options: Any
    ) -> None:
        if isinstance(loss, functools.partial):
            options, loss = {**loss.keywords, **options}, loss.func
        if isinstance(loss, Mapping):  # A `BatchLoss` in a saved Keras config.
            loss = keras.saving.deserialize_keras_object(loss)
        # A saved Keras config refers to the function by name; focal losses may have their own.
        named = loss if callable(loss) else globals()[loss.removeprefix("focal_")]
        self.function, self.options = named, options
        super().__init__(name=name or self.function.__name__, reduction="mean_with_sample_weight")

    def __call__(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return this replica's summand of the mean over the global batch.

        Keras would divide by the weights of the replica alone.
        """
        total, weight_sum = weighted_sum(self, y_true, y_pred, sample_weight)
        replica = tf.distribute.get_replica_context()
        # While Keras builds a model under a strategy there is no replica context.
        if replica is not None and replica.num_replicas_in_sync > 1:
            weight_sum = replica.all_reduce(tf.distribute.ReduceOp.SUM, weight_sum)
        return tf.math.divide_no_nan(total, weight_sum)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return one loss per element."""
        return self.function(y_true, y_pred, **self.options)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras config; it stores the function's name."""
        loss = self.function.__name__
        if isinstance(self.function, BatchLoss):
            loss = keras.saving.serialize_keras_object(self.function)
        return {"loss": loss, "name": self.name, **self.options}


class FunctionLoss(keras.losses.Loss):
    """Loss of a function (labels, output), which Keras would wrap alike.

    Args:
        function: Returns one loss per element, or their mean.
    """

    def __init__(self, function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> None:
        super().__init__()  # A lambda has no name that TensorFlow allows.
        self.function = function

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the losses; labels `(B,)` of outputs `(B, 1)` get their axis."""
        if y_pred.shape.rank == y_true.shape.rank + 1 and y_pred.shape[-1] == 1:
            y_true = y_true[..., tf.newaxis]
        return self.function(y_true, y_pred)


def has_own_divisor(loss: Callable[..., tf.Tensor]) -> TypeGuard[keras.losses.Loss]:
    """Return True for a loss of Keras, whose `reduction` chooses what its sum is divided by."""
    return isinstance(loss, keras.losses.Loss) and not isinstance(loss, WeightedMean)


def compares_examples(losses: Iterable[Callable[..., tf.Tensor]]) -> bool:
    """Return True if one of the losses is a `BatchLoss`, perhaps wrapped for Keras."""
    wrapped = ((loss, getattr(loss, "function", None)) for loss in losses)
    return any(isinstance(loss, BatchLoss) for pair in wrapped for loss in pair)


def weighted_sum(
    loss: Callable[..., tf.Tensor],
    labels: tf.Tensor,
    output: tf.Tensor,
    weights: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return sum(weight * loss), and its divisor; the quotient over all replicas is the mean.

    The divisor is sum(weight), unless the loss `has_own_divisor`. That of a mean is the number of
    elements whose weight is not 0, since rows of weight 0 fill batches up.

    Args:
        loss: Function of this module, or a loss of Keras.
        labels: Labels of the replica's batch.
        output: Output of the model.
        weights: Weights of the elements; by default 1.
    """
    if has_own_divisor(loss):
        # A loss of Keras weights its elements itself, and may have its own way to do so.
        of_elements = object.__new__(type(loss))  # The module copy would save and load it.
        vars(of_elements).update(vars(loss), reduction=None)
        weighted = of_elements(labels, output, weights)
        if loss.reduction == "mean_with_sample_weight" and weights is not None:
            return tf.reduce_sum(weighted), tf.reduce_sum(tf.cast(weights, weighted.dtype))
        if loss.reduction in (None, "none", "sum"):
            # Outside of the replicas, such as in an evaluation, the batch is that of all of them.
            replica = tf.distribute.get_replica_context()
            replicas = 1 if replica is None else replica.num_replicas_in_sync
            return tf.reduce_sum(weighted), tf.constant(1 / replicas, weighted.dtype)
        return tf.reduce_sum(weighted), _num_weighted(weighted, weights)
    function = loss.function if isinstance(loss, WeightedMean) else loss
    if isinstance(function, BatchLoss):
        values = function(labels, output, weights)
    else:
        values = (loss.call if isinstance(loss, WeightedMean) else loss)(labels, output)
    weights = tf.ones_like(values) if weights is None else _per_element(weights, values)
    return tf.reduce_sum(weights * values), tf.reduce_sum(weights)


def _num_weighted(weighted, weights):
    """Return the number of elements whose weight is not 0."""
    if weights is None:
        return tf.cast(tf.size(weighted), weighted.dtype)
    return tf.math.count_nonzero(_per_element(weights, weighted), dtype=weighted.dtype)


def _per_element(weights, values):
    """Return weights in the dtype and shape of values; either may have more axes."""
    weights = tf.cast(weights, values.dtype)
    ranks = values.shape.rank, weights.shape.rank
    missing = 0 if None in ranks else ranks[0] - ranks[1]
    weights = tf.squeeze(weights, -1) if missing < 0 else weights[(..., *[tf.newaxis] * missing)]
    return tf.broadcast_to(weights, tf.shape(values))
