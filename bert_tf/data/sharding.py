"""Documents dealt to shards: every num_shards-th of the index, as many to each, within limits."""

import numpy as np

from bert_tf.errors import UserError

MIN_DOCUMENTS = 5  # A shard; random next segments come from the shard's other documents.
MAX_BYTES = 144 << 20  # Of a shard's text and instances, as _cost counts: some 0.4 GB in memory.


def check(index, settings):
    """Raises UserError where shards would be too few documents, or too much text for memory."""
    min_documents = 1 if settings.same_document_next else MIN_DOCUMENTS
    max_shards = len(index) // min_documents
    if settings.num_shards > max_shards:
        advice = (
            f"use --num_shards={max_shards} or less"
            if max_shards
            else "separate documents by blank lines (or see --input_format)"
        )
        raise UserError(
            f"--num_shards={settings.num_shards}: {len(index)} documents, wanted at least "
            f"{min_documents} a shard, since random next segments come from a shard's other "
            f"documents; {advice}"
        )
    if _cost(index, settings, settings.num_shards) <= MAX_BYTES:
        return
    text = _largest(index, settings.num_shards) / 1e6
    number = settings.num_shards
    while number < max_shards and _cost(index, settings, number) > MAX_BYTES:
        number = min(max_shards, number * 5 // 4 + 1)
    if _cost(index, settings, number) <= MAX_BYTES:
        advice = f"use --num_shards={number}"
    else:
        largest = index.lengths.argmax()
        advice = (
            f"break up the largest document ({index.lengths[largest] / 1e6:.0f} MB at byte "
            f"{index.offsets[largest]} of {index.paths[index.files[largest]]}), or lower "
            "--dupe_factor"
        )
    raise UserError(
        f"--num_shards={settings.num_shards}: up to {text:.0f} MB of text a shard, "
        f"{settings.dupe_factor} times, is more than fits in memory; {advice}"
    )


def spans(index, number, num_shards):
    """(path, offset, length) of the documents of a shard."""
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
    """Bytes of text of the largest shard."""
    owners = np.arange(len(index)) % num_shards
    return np.bincount(owners, weights=index.lengths, minlength=num_shards).max()


def _cost(index, settings, num_shards):
    """Memory grows with the text, and by an eighth of that for each time it is gone through."""
    return _largest(index, num_shards) * (1 + settings.dupe_factor / 8)
