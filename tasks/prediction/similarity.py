"""Cosine similarity of vectors in a file, which may be larger than memory.

Shape suffixes: N vectors, n vectors of a block, D size, K results.
"""

import numpy as np

from bert_tf.errors import UserError

BLOCK = 65_536  # Vectors in memory.


def open_vectors(path: str) -> np.ndarray:
    """Open the array of a .npy file without reading it.

    Args:
        path: File of tasks.extract.

    Returns:
        float32 `(N, D)`, mapped into memory.

    Raises:
        UserError: If the file holds no such array.
    """
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: expected a .npy file of tasks.extract ({error})") from None
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float32:
        raise UserError(f"{path}: expected a float32 array (rows, size) of tasks.extract")
    return vectors


def nearest(vectors_ND: np.ndarray, query_D: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Return the K vectors of largest cosine similarity to a query.

    Args:
        vectors_ND: float32 `(N, D)`.
        query_D: float32 `(D,)`.
        top_k: K; all vectors if there are fewer.

    Returns:
        (index, similarity) pairs, most similar first. A vector of zeros has similarity 0.
    """
    parts = [
        cosines(vectors_ND[first : first + BLOCK], query_D)
        for first in range(0, len(vectors_ND), BLOCK)
    ]
    similarity_N = np.concatenate(parts)
    # Stable, so that equal vectors keep their order.
    order_K = np.argsort(-similarity_N, kind="stable")[:top_k]
    return [(int(index), float(similarity_N[index])) for index in order_K]


def cosines(vectors_nD: np.ndarray, query_D: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of each vector to a query, float32 `(n,)`."""
    norms_n = np.linalg.norm(vectors_nD, axis=1) * np.linalg.norm(query_D)
    products_n = vectors_nD @ query_D
    return np.divide(products_n, norms_n, out=np.zeros_like(products_n), where=norms_n > 0)
