"""What helps where classes are rare: their weights, their odds, the bias to begin with.

Free of TensorFlow, so that flags can be checked before it is imported. Legend: N examples, C
labels.
"""

import math

import numpy as np

from bert_tf.errors import UserError
from tasks.metrics.thresholds import parse_objective


def check_options(
    *,
    multi_label=False,
    class_weights=(),
    balanced_sampling=False,
    rare_label=None,
    threshold_objective=None,
    **others,
):
    """Raises UserError, naming the flag, at options that no labels could make right."""
    if multi_label:
        for name, value in (
            ("class_weights", class_weights),
            ("balanced_sampling", balanced_sampling),
        ):
            if value:
                raise UserError(
                    f"--{name}: not with --multi_label, where a row has no one class to be weighed "
                    "by; --focal_gamma and --threshold_objective are for both"
                )
        if rare_label is not None:
            raise UserError(
                "--rare_label: not with --multi_label, where every label has a threshold; "
                "--threshold_objective tunes them"
            )
    if _is_balanced(class_weights) and balanced_sampling:
        raise UserError(
            "--balanced_sampling: with --class_weights=balanced rare classes would be made up for "
            "twice; give one of them"
        )
    if threshold_objective is not None:
        parse_objective(threshold_objective)
    if class_weights and not _is_balanced(class_weights):
        _numbers(class_weights)


def class_weights_of(given, labels, counts_C):
    """The flag's texts -> C floats in the order of the labels, or () if there are none.

    "balanced" gives N / (C * count), so that each class counts as much as any other, and all of
    them as much as without weights. Raises UserError where numbers and labels are not as many.
    """
    if _is_balanced(given):
        counts_C = np.asarray(counts_C)
        weights_C = counts_C.sum() / (len(labels) * np.maximum(counts_C, 1))
        return tuple(weights_C.tolist())
    weights = _numbers(given)
    if weights and len(weights) != len(labels):
        raise UserError(
            f"--class_weights={','.join(map(str, given))}: {len(weights)} of them, wanted "
            f"{len(labels)}, in the order of the labels {', '.join(labels)}"
        )
    return weights


def sampling_weights(labels_N):
    """[N]: weights with which every class is drawn as often as any other."""
    _, class_N, counts = np.unique(labels_N, return_inverse=True, return_counts=True)
    return 1.0 / counts[class_N]


def log_prior(counts_C, total):
    """float32 [C]: the logits at which a softmax answers with the classes' shares of `total`.

    A class that never stands there counts as half an example.
    """
    return np.log(np.maximum(counts_C, 0.5) / total).astype(np.float32)


def log_odds(counts_C, total):
    """float32 [C]: the logits at which sigmoids answer with the labels' shares of `total`.

    A label that never, or always, stands there does so but for half an example.
    """
    fractions_C = np.clip(counts_C, 0.5, total - 0.5) / total
    return np.log(fractions_C / (1 - fractions_C)).astype(np.float32)


def _is_balanced(class_weights):
    return tuple(class_weights) == ("balanced",)


def _numbers(class_weights):
    weights = []
    for text in class_weights:
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UserError(
                f"--class_weights={','.join(map(str, class_weights))}: got {text!r}, wanted a "
                "number over 0 for each label, or balanced"
            )
        weights.append(weight)
    return tuple(weights)
