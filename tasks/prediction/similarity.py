"""Vectors in a file, which may be larger than memory.

Shape suffixes: N vectors, D size.
"""

import numpy as np

from bert_tf.errors import UserError


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
