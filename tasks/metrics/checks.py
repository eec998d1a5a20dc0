"""Checks of metric inputs, so that a wrong array raises instead of giving a wrong metric."""

import numpy as np
from numpy.typing import ArrayLike

from bert_tf.errors import DivergenceError


def same_shape(first: ArrayLike, second: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both as arrays; raises ValueError if shapes differ, where NumPy would broadcast."""
    first, second = np.asarray(first), np.asarray(second)
    if first.shape != second.shape:
        raise ValueError(f"shapes {first.shape} and {second.shape}: expected equal shapes")
    return first, second


def finite(values: ArrayLike, what: str = "scores") -> np.ndarray:
    """Return the values as float64; raises DivergenceError at NaN or infinity."""
    values = np.asarray(values, np.float64)
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise DivergenceError(
            f"{what}: expected finite numbers, received {bad} of {values.size} that are NaN or "
            "infinite; if a model predicted them, train it with a lower --learning_rate"
        )
    return values
