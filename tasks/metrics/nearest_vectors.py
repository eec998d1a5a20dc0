"""Exact search of the most similar vectors, in blocks.

Shape suffixes: N vectors, n vectors of a block, Q queries, D size of a vector, K results.
"""

from collections.abc import Iterable

import numpy as np

VECTORS_PER_BLOCK = 16_384
QUERIES_PER_BLOCK = 1024  # With it a block of similarities takes 64 MiB.


def nearest(
    vectors_ND: np.ndarray, queries_QD: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the K vectors of largest cosine similarity to each query.

    Args:
        vectors_ND: float32 `(N, D)`, which may be mapped into memory.
        queries_QD: float32 `(Q, D)`.
        top_k: K; all vectors if there are fewer.

    Returns:
        (indices, similarities), int64 and float32 `(Q, K)`, most similar first. Of equal vectors
        the first one comes first. A vector of zeros has similarity 0.
    """
    size = VECTORS_PER_BLOCK
    blocks = (vectors_ND[first : first + size] for first in range(0, len(vectors_ND), size))
    return nearest_in_blocks(blocks, queries_QD, top_k)


def nearest_in_blocks(
    blocks: Iterable[np.ndarray], queries_QD: np.ndarray, top_k: int, is_cosine: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `nearest` does for vectors that come block by block.

    Args:
        blocks: float32 `(n, D)` each.
        queries_QD: float32 `(Q, D)`.
        top_k: K.
        is_cosine: Whether the similarity is the cosine, otherwise the dot product.
    """
    scaled = normalized if is_cosine else np.asarray
    units_QD, count = scaled(queries_QD), 0
    indices_QK = np.zeros((len(queries_QD), 0), np.int64)
    similarities_QK = np.zeros((len(queries_QD), 0), np.float32)
    for vectors_nD in blocks:
        units_nD = scaled(vectors_nD)
        parts = []
        for first in range(0, len(units_QD), QUERIES_PER_BLOCK):
            rows = slice(first, first + QUERIES_PER_BLOCK)
            found_qk, of_found_qk = _largest(units_QD[rows] @ units_nD.T, top_k)
            # Those of earlier blocks come first, and the order is stable.
            together = np.concatenate([indices_QK[rows], found_qk + count], axis=1)
            of_together = np.concatenate([similarities_QK[rows], of_found_qk], axis=1)
            order_qk = np.argsort(-of_together, axis=1, kind="stable")[:, :top_k]
            parts.append(
                [np.take_along_axis(values, order_qk, axis=1) for values in (together, of_together)]
            )
        if parts:
            indices_QK, similarities_QK = map(np.concatenate, zip(*parts, strict=True))
        count += len(vectors_nD)
    return indices_QK, similarities_QK


def normalized(vectors_nD: np.ndarray) -> np.ndarray:
    """Return vectors of length 1, and of length 0 for a vector of zeros, float32 `(n, D)`."""
    norms_n1 = np.linalg.norm(vectors_nD, axis=1, keepdims=True)
    return np.divide(vectors_nD, norms_n1, out=np.zeros_like(vectors_nD), where=norms_n1 > 0)


def _largest(values_qn, top_k):
    """Return (indices, values) of the K largest per row in any order, equal ones by their index."""
    size = values_qn.shape[1]
    if top_k >= size:
        return np.broadcast_to(np.arange(size), values_qn.shape), values_qn
    indices_qk = np.argpartition(values_qn, size - top_k, axis=1)[:, size - top_k :]
    least_q1 = np.take_along_axis(values_qn, indices_qk, axis=1).min(axis=1, keepdims=True)
    # Where several values equal the least one, argpartition takes any of them.
    for row in np.flatnonzero(np.count_nonzero(values_qn >= least_q1, axis=1) > top_k):
        indices_qk[row] = np.argsort(-values_qn[row], kind="stable")[:top_k]
    indices_qk.sort(axis=1)
    return indices_qk, np.take_along_axis(values_qn, indices_qk, axis=1)
