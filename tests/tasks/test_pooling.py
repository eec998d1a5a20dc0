"""Pooling of tokens in all layouts."""

import numpy as np
import pytest
import tensorflow as tf

from tasks.graph.heads import POOLING

TOKENS = np.array([[1.0, 8.0], [3.0, -2.0], [5.0, 0.0], [7.0, 1.0]], np.float32)
# Of the first three tokens, and of the last one.
EXPECTED = {
    "cls": [[1, 8], [7, 1]],
    "mean": [[3, 2], [7, 1]],
    "max": [[5, 8], [7, 1]],
    "mean_sqrt_len": [[9 / 3**0.5, 6 / 3**0.5], [7, 1]],
}
PADDING = [-99.0, 99.0]


def padded():
    values = np.full((2, 4, 2), PADDING, np.float32)
    values[0, :3], values[1, :1] = TOKENS[:3], TOKENS[3:]
    ids, mask = [[6, 7, 8, 0], [5, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]]
    return values, {"input_ids": ids, "input_mask": mask}


def flat():
    return np.concatenate([TOKENS, [PADDING]]).astype(np.float32), {"row_splits": [0, 3, 4]}


def packed():
    """Return both sequences in one row; the second one comes first."""
    values = np.concatenate([TOKENS[3:], TOKENS[:3], [PADDING]]).astype(np.float32)[np.newaxis]
    return values, {
        "input_ids": [[5, 6, 7, 8, 0]],
        "sequence_ids": [[2, 1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2, 0]],
        "token_indices": [[1, 2, 3], [0, -1, -1]],
    }


@pytest.mark.parametrize("layout", [padded, flat, packed])
@pytest.mark.parametrize("name", POOLING)
def test_vectors_are_those_of_the_tokens_without_padding(name, layout):
    values, inputs = layout()
    inputs = {key: tf.constant(value) for key, value in inputs.items()}
    pooled = POOLING[name](tf.constant(values), inputs)
    assert pooled.dtype == tf.float32
    np.testing.assert_allclose(pooled, EXPECTED[name], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in POOLING if name != "cls"])
def test_a_sequence_without_tokens_is_0(name):
    values, inputs = packed()
    inputs["token_indices"].append([-1, -1, -1])
    inputs = {key: tf.constant(value) for key, value in inputs.items()}
    pooled = POOLING[name](tf.constant(values), inputs)
    np.testing.assert_allclose(pooled, [*EXPECTED[name], [0, 0]], rtol=1e-6)
