"""Assign documents to shards: shard i gets documents i, i + num_shards, ... of the index."""

import numpy as np

from bert_tf.data.documents import DocumentIndex
from bert_tf.data.settings import WriteShardsSettings
from bert_tf.errors import UserError

MIN_DOCUMENTS = 5  # Per shard: random next segments come from other documents of the shard.
MAX_BYTES = 144 << 20  # Maximum `_cost` of a shard, which is about 0.4 GB of memory.


def check(index: DocumentIndex, settings: WriteShardsSettings) -> None:
    """Check that each shard gets enough documents and fits in memory.

    Args:
        index: The documents.
        settings: The settings.

    Raises:
        UserError: If there are too many shards for the documents, or too few for the text. The
            message suggests a number.
    """
    min_documents = 1 if settings.same_document_next else MIN_DOCUMENTS
    max_shards = len(index) // min_documents
    if settings.num_shards > max_shards:
        advice = (
            f"use --num_shards={max_shards} or less"
            if max_shards
            else "separate documents by blank lines (or see --input_format)"
        )
        raise UserError(
            f"--num_shards={settings.num_shards}: {len(index)} documents, expected at least "
            f"{min_documents} per shard, since random next segments come from other documents "
            f"of the shard; {advice}"
        )
    if _cost(index, settings, settings.num_shards) <= MAX_BYTES:
        return
    text = _largest(index, settings.num_shards) / 1e6
    number = settings.num_shards
    # More shards are smaller, but never smaller than the largest document.
    while number < max_shards and _cost(index, settings, number) > MAX_BYTES:
        number = min(max_shards, number * 5 // 4 + 1)
    if _cost(index, settings, number) <= MAX_BYTES:
        advice = f"use --num_shards={number}"
    else:
        largest = index.lengths.argmax()
        advice = (
            f"split the largest document ({index.lengths[largest] / 1e6:.0f} MB at byte "
            f"{index.offsets[largest]} of {index.paths[index.files[largest]]}), or lower "
            "--dupe_factor"
        )
    raise UserError(
        f"--num_shards={settings.num_shards}: up to {text:.0f} MB of text per shard with "
        f"--dupe_factor={settings.dupe_factor} does not fit in memory; {advice}"
    )


def spans(index: DocumentIndex, number: int, num_shards: int) -> list[tuple[str, int, int]]:
    """Return path, offset and length in bytes of each document of a shard.

    Args:
        index: All documents.
        number: The number of the shard, from 0.
        num_shards: The number of shards.
    """
    assigned = slice(number, None, num_shards)
    return [
        (index.paths[file], offset, length)
        for file, offset, length in zip(
            index.files[assigned].tolist(),
            index.offsets[assigned].tolist(),
            index.lengths[assigned].tolist(),
            strict=True,
        )
    ]


def _largest(index, num_shards):
    """Return the bytes of text of the largest shard."""
    owners = np.arange(len(index)) % num_shards
    return np.bincount(owners, weights=index.lengths, minlength=num_shards).max()


def _cost(index, settings, num_shards):
    """Estimate memory in bytes: that of the text, and an eighth of it per pass."""
    return _largest(index, num_shards) * (1 + settings.dupe_factor / 8)
