"""What every metric asks of its arrays, so that a wrong one cannot pass as a figure."""

import numpy as np

from bert_tf.errors import UserError


def same_shape(first, second):
    """The two as arrays. Raises ValueError where numpy would have broadcast them."""
    first, second = np.asarray(first), np.asarray(second)
    if first.shape != second.shape:
        raise ValueError(f"shapes {first.shape} and {second.shape}, wanted the same")
    return first, second


def finite(values, what="scores"):
    """`values` in float64. Raises UserError at NaN and infinity: no order, no mean holds there."""
    values = np.asarray(values, np.float64)
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise UserError(
            f"{what}: {bad} of {values.size} are NaN or infinite, wanted numbers; "
            "if a model gave them, it has diverged: train it with a lower --learning_rate"
        )
    return values
