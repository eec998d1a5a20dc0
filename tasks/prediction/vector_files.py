"""Vectors in files, which may be larger than memory, and an approximate index of them.

Files of vectors are those of bert-tf extract: an array, or a directory of shards in order.

Shape suffixes: N vectors, n vectors of a block, Q queries, D size, K results.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bert_tf.data.sharded_output import NAME
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system.progress import Progress
from tasks.data.readers.rows import import_pyarrow
from tasks.metrics.retrieval import VECTORS_PER_BLOCK, nearest_in_blocks, normalized
from tasks.prediction.outputs import OutputManifest

MIN_COSINE = 0.999  # Of a vector to the same one of another source.
SAMPLE = 100  # Vectors whose neighbors are compared with the exact ones.
NEIGHBORS = 10
# Vectors that an index returns per result; the most similar of them are chosen exactly.
CANDIDATES_PER_RESULT = 4
MIN_CANDIDATES = 100


class Vectors:
    """The vectors of .npy and .parquet files, in the order of their names.

    An array of a .npy file is mapped into memory while it is read, so that there may be more files
    than a process may open. Columns of .parquet files are read into memory.

    Args:
        pattern: File, pattern of files, or directory of shards, of bert-tf extract.

    Attributes:
        path: The pattern.
        size: D.

    Raises:
        UserError: If there is no file, a shard is missing, or a file does not hold vectors of the
            same size.
    """

    def __init__(self, pattern: str) -> None:
        self.path, self._paths = pattern, _paths_of(pattern)
        self._in_memory: dict[str, np.ndarray] = {}
        lengths: list[int] = []
        for path in self._paths:
            array = open_vectors(path)
            if not isinstance(array, np.memmap):
                self._in_memory[path] = array
            if not lengths:
                self.size = array.shape[1]
            if array.shape[1] != self.size:
                raise UserError(
                    f"{path}: vectors of {array.shape[1]} numbers. Expected: {self.size}, as in "
                    f"{self._paths[0]}"
                )
            lengths.append(len(array))
        self._splits = np.cumsum([0, *lengths])

    def __len__(self) -> int:
        return int(self._splits[-1])

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all vectors in order, float32 `(n, D)`."""
        for path in self._paths:
            array = self._array(path)
            for first in range(0, len(array), VECTORS_PER_BLOCK):
                yield array[first : first + VECTORS_PER_BLOCK]

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return the vectors at `n` indices, float32 `(n, D)`."""
        vectors_nD = np.empty((len(indices), self.size), np.float32)
        file_n = np.searchsorted(self._splits, indices, side="right") - 1
        for number in np.unique(file_n):
            is_here_n = file_n == number
            array = self._array(self._paths[number])
            vectors_nD[is_here_n] = array[indices[is_here_n] - self._splits[number]]
        return vectors_nD

    def sample(self, count: int) -> np.ndarray:
        """Return the indices of at most `count` vectors, evenly spaced."""
        return np.unique(np.linspace(0, len(self) - 1, count).astype(int))

    def are_at(self, indices: np.ndarray, expected_nD: np.ndarray) -> bool:
        """Return whether the vectors at `n` indices have the directions of others.

        Half precision or another batch changes their last digits. Vectors of zeros have none.
        """
        if expected_nD.shape[1] != self.size:
            return False
        cosines_n = np.sum(normalized(expected_nD) * normalized(self.take(indices)), axis=1)
        return bool(np.all((cosines_n >= MIN_COSINE) | ~np.any(expected_nD, axis=1)))

    def nearest(self, queries_QD: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the K most similar vectors; see `nearest_in_blocks`."""
        return nearest_in_blocks(self.blocks(), queries_QD, top_k)

    def _array(self, path):
        return self._in_memory[path] if path in self._in_memory else open_vectors(path)


def _paths_of(pattern):
    """Return the files of a pattern or of a directory of shards, in order."""
    if os.path.isdir(pattern):
        if not os.path.exists(os.path.join(pattern, NAME)):
            raise UserError(
                f"--vectors={pattern}: no {NAME}; expected a directory of shards of bert-tf extract"
            )
        try:
            manifest = OutputManifest.read(pattern)
        except UserError as error:
            raise UserError(
                f"--vectors={pattern}: expected a directory of shards of bert-tf extract; {error}"
            ) from None
        if not manifest.is_complete:
            raise UserError(f"--vectors={pattern}: shards are missing; rerun bert-tf extract")
        paths = [manifest.path(entry["file"]) for entry in manifest.shards]
        for path in paths:
            if not path.endswith((".npy", ".parquet")):
                raise UserError(
                    f"--vectors={pattern}: expected shards of bert-tf extract with "
                    f"--file_format=npy or parquet, received {os.path.basename(path)}"
                )
        return paths
    paths = sorted(files.glob_files(pattern))
    if not paths:
        raise UserError(f"--vectors={pattern}: no such file")
    return paths


def open_vectors(path: str) -> np.ndarray:
    """Open the array of a .npy file without reading it, or read the column of a .parquet file.

    Args:
        path: File of bert-tf extract.

    Returns:
        float32 `(N, D)`.

    Raises:
        UserError: If the file holds no such array.
    """
    if path.endswith(".parquet"):
        return _read_parquet(path)
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: expected a .npy file of bert-tf extract ({error})") from None
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float32:
        raise UserError(f"{path}: expected a float32 array (rows, size) of bert-tf extract")
    return vectors


def _read_parquet(path):
    import_pyarrow(path)
    import pyarrow.compute
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, columns=["vector"])
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: expected a Parquet file of bert-tf extract ({str(error).splitlines()[0]})"
        ) from None
    if table.num_columns != 1 or (table.num_rows and table["vector"].null_count):
        raise UserError(f"{path}: expected a vector in every row")
    column = table["vector"].combine_chunks()
    try:
        lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
        numbers = column.flatten().to_numpy().astype(np.float32, copy=False)
    except pyarrow.ArrowException:  # No lists, or lists of strings or nulls.
        raise UserError(f"{path}: expected lists of numbers in the column vector") from None
    if len(np.unique(lengths)) > 1:
        raise UserError(f"{path}: expected vectors of one size")
    return numbers.reshape(len(lengths), -1) if len(lengths) else np.zeros((0, 0), np.float32)


class ApproximateIndex:
    """A graph of near vectors (HNSW; Malkov and Yashunin 2018), mapped into memory.

    Args:
        path: The file.
        vectors: The vectors that it was built of.

    Raises:
        UserError: If it is missing or damaged, or of other vectors.
    """

    def __init__(self, path: str, vectors: Vectors) -> None:
        usearch = _import_usearch()
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file; run bert-tf search --build_index first")
        try:
            self._index = usearch.Index.restore(path, view=True)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"{path}: not an index: {error}") from None
        self._vectors = vectors
        if self._index is None or not self._is_of(vectors):
            raise UserError(
                f"{path}: not an index of {vectors.path}; run bert-tf search --build_index again"
            )

    def _is_of(self, vectors):
        if len(self._index) != len(vectors) or self._index.ndim != vectors.size:
            return False
        sample = vectors.sample(SAMPLE)
        # In half precision, the square of a length of 256 is infinite.
        there = np.reshape(self._index.get(sample), (-1, vectors.size)).astype(np.float32)
        return vectors.are_at(sample, there)

    def nearest(self, queries_QD: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the K most similar of the vectors that the index finds, and exact similarities.

        Arguments and results as of `Vectors.nearest`.
        """
        count = min(max(top_k * CANDIDATES_PER_RESULT, MIN_CANDIDATES), len(self._index))
        self._index.expansion_search = count
        indices, similarities = [], []
        for query_1D in np.split(queries_QD, len(queries_QD)):
            found = np.sort(self._index.search(query_1D[0], count).keys.astype(np.int64))
            best, values = nearest_in_blocks([self._vectors.take(found)], query_1D, top_k)
            indices.append(found[best[0]])
            similarities.append(values[0])
        return np.stack(indices), np.stack(similarities)


def index_path(pattern: str) -> str:
    """Return the path of the index of vectors, which is next to them, or to their directories."""
    if os.path.isdir(pattern):
        return os.path.join(pattern, "vectors.usearch")
    if files.has_pattern(pattern) and not os.path.exists(pattern):
        directory = os.path.dirname(pattern)
        while directory and not os.path.isdir(directory):  # Part of the pattern.
            directory = os.path.dirname(directory)
        return os.path.join(directory, "vectors.usearch")
    return f"{os.path.splitext(pattern)[0]}.usearch"


def build_index(vectors: Vectors, path: str, log: Callable[[str], None]) -> float:
    """Write the approximate index of vectors, atomically.

    Args:
        vectors: The vectors.
        path: File to write.
        log: Callable that takes log lines.

    Returns:
        The recall of the 10 nearest vectors of a sample of the vectors: the fraction that is as
        similar as those of an exact search.
    """
    index = _import_usearch().Index(ndim=vectors.size, metric="cos", dtype="f16")
    done = 0
    with Progress(log, "vectors", len(vectors)) as progress:
        for vectors_nD in vectors.blocks():
            index.add(np.arange(done, done + len(vectors_nD)), np.ascontiguousarray(vectors_nD))
            done += len(vectors_nD)
            progress.update(done)
    try:
        with files.atomic_path(path) as temporary:
            index.save(temporary)
    except RuntimeError as error:  # Of usearch, also if the disk is full.
        raise OSError(errno.EIO, str(error), path) from None
    sample = np.random.default_rng(0).choice(len(vectors), min(SAMPLE, len(vectors)), replace=False)
    queries_QD = vectors.take(sample)
    _, exact_QK = vectors.nearest(queries_QD, NEIGHBORS)
    _, found_QK = ApproximateIndex(path, vectors).nearest(queries_QD, NEIGHBORS)
    return recall(exact_QK, found_QK)


def recall(exact_QK: np.ndarray, found_QK: np.ndarray) -> float:
    """Return the fraction of results that are as similar as the K exact ones.

    Of equal vectors, an index may find others than the exact search.

    Args:
        exact_QK: Similarities of the exact results, the largest first.
        found_QK: Similarities of the results of the index.
    """
    return float(np.mean(found_QK >= exact_QK[:, -1:] - 1e-5))


def _import_usearch() -> Any:
    try:
        import usearch.index
    except ModuleNotFoundError:
        raise UserError(
            "an approximate index requires usearch; pip install 'bert_tf[index]'"
        ) from None
    return usearch.index
