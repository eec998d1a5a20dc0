"""Options against class imbalance: weights of classes, their sampling, and their threshold.

Does not import TensorFlow, so that flags can be checked before that import.

Shape suffixes: C labels.
"""

import math
from collections.abc import Sequence

import numpy as np

from bert_tf.errors import UserError
from tasks.metrics.thresholds import parse_objective


def check_options(
    *,
    multi_label: bool = False,
    class_weights: Sequence[str] = (),
    balanced_sampling: bool = False,
    rare_label: str | None = None,
    threshold_objective: str | None = None,
    **others,
) -> None:
    """Check the options of `ClassificationTask` that do not depend on the labels.

    `class_weights` are the flag's strings: numbers, or ("balanced",). `others` are ignored.

    Raises:
        UserError: The options contradict each other; the message starts with the flag.
    """
    if multi_label:
        given = {"class_weights": class_weights, "balanced_sampling": balanced_sampling}
        for name, value in given.items():
            if value:
                raise UserError(
                    f"--{name}: not supported with --multi_label, where rows have no single class; "
                    "use --focal_gamma or --threshold_objective"
                )
        if rare_label is not None:
            raise UserError(
                "--rare_label: not supported with --multi_label, where every label has a "
                "threshold; use --threshold_objective"
            )
    if _is_balanced(class_weights) and balanced_sampling:
        raise UserError(
            "--balanced_sampling: with --class_weights=balanced, rare classes would be compensated "
            "for twice; set one of the two"
        )
    if threshold_objective is not None:
        parse_objective(threshold_objective)
        if not multi_label and rare_label is None:
            raise UserError(
                f"--threshold_objective={threshold_objective}: requires --rare_label, the label "
                "that has the threshold"
            )
    if class_weights and not _is_balanced(class_weights):
        _numbers(class_weights)


def class_weights_of(
    given: Sequence[str], labels: Sequence[str], counts_C: Sequence[int]
) -> tuple[float, ...]:
    """Return the C class weights that a flag asks for, or () if none are given.

    Args:
        given: The flag's strings: numbers in the order of `labels`, or ("balanced",), which means
            N / (C * count) as in scikit-learn: all classes have the same total weight.
        labels: Names of the C labels.
        counts_C: Training examples per label, N together.

    Raises:
        UserError: The number of weights differs from the number of labels.
    """
    if _is_balanced(given):
        weights_C = np.sum(counts_C) / (len(labels) * np.maximum(counts_C, 1))
        return tuple(weights_C.tolist())
    weights = _numbers(given)
    if weights and len(weights) != len(labels):
        raise UserError(
            f"--class_weights={','.join(map(str, given))}: {len(weights)} weights; expected "
            f"{len(labels)}, in the order of the labels {', '.join(labels)}"
        )
    return weights


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
                f"--class_weights={','.join(map(str, class_weights))}: {text!r}: expected a "
                "number > 0 per label, or balanced"
            )
        weights.append(weight)
    return tuple(weights)
