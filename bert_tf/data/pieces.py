"""Pieces of shards, which are read at once: a shard, or a part of one with many records.

A TFRecord file has no index. Each record is its length as uint64, a checksum of the length, the
content and a checksum of the content. TensorFlow verifies the checksums.
"""

import os
import struct
from typing import NamedTuple

import numpy as np

from bert_tf.storage import files

BUFFER_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES = 16


class Pieces(NamedTuple):
    """The pieces of all shards, in order. All arrays have the shape `(N,)`.

    Attributes:
        shards: int64, indices of the shards.
        firsts: int64, index in the shard of the first record.
        records: int64, numbers of records.
        is_part: bool, whether the piece is a part of a shard.
    """

    shards: np.ndarray
    firsts: np.ndarray
    records: np.ndarray
    is_part: np.ndarray


def split(counts: np.ndarray, max_records: int, piece_records: int) -> Pieces:
    """Split shards of more than `max_records` records.

    Args:
        counts: int64, numbers of records of the shards.
        max_records: Maximum number of records of a shard that is one piece.
        piece_records: Number of records of each piece of the others; the last one may have fewer.
    """
    is_large = counts > max_records
    sizes = np.where(is_large, piece_records, np.maximum(counts, 1))
    num_pieces = np.maximum(-(-counts // sizes), 1)
    shards = np.repeat(np.arange(len(counts)), num_pieces)
    numbers = np.arange(len(shards)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    firsts = numbers * sizes[shards]
    records = np.minimum(counts[shards] - firsts, sizes[shards])
    return Pieces(shards, firsts, records, is_large[shards])


def record_offsets(path: str | os.PathLike, every: int) -> tuple[int, np.ndarray]:
    """Count the records of a TFRecord file and find some of them, by their lengths alone.

    Args:
        path: The file.
        every: Distance in records between two offsets.

    Returns:
        Number of complete records, and int64 offsets in bytes of records 0, `every`, 2 * `every`
        and so on.
    """
    size, unpack = files.stamp(path)[0], _LENGTH.unpack_from
    number, position, offsets = 0, 0, [0]
    with files.open_file(path) as stream:
        while position < size:
            stream.seek(position)
            data = stream.read(BUFFER_BYTES)
            at, last = 0, len(data) - _LENGTH.size
            while at <= last:
                at += _FRAME_BYTES + unpack(data, at)[0]
                if position + at > size:  # The record is truncated, or its length is damaged.
                    return number, np.array(offsets)
                number += 1
                if number % every == 0:
                    offsets.append(position + at)
            if at == 0:  # Too few bytes for a length.
                break
            position += at
    return number, np.array(offsets)
