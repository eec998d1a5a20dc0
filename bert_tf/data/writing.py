"""Write pretraining shards: index the documents, assign them to shards and run the workers.

Shard i gets documents i, i + num_shards, ... of the index. For local paths, this process does not
import TensorFlow: only its workers do.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bert_tf.config import TOKENIZER_SETTINGS, strips_accents
from bert_tf.data import documents
from bert_tf.data.documents import DocumentIndex
from bert_tf.data.manifest import Manifest
from bert_tf.data.settings import WriteShardsSettings
from bert_tf.data.sharded_output import NAME, Span, WriteShard, check_directory
from bert_tf.errors import UserError
from bert_tf.storage import files, ownership
from bert_tf.system.command import import_tensorflow
from bert_tf.system.environment import gpus_hidden
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

SPILL = ".unpacked"
MIN_DOCUMENTS = 5  # Per shard: random next segments come from other documents of the shard.
MAX_BYTES = 144 << 20  # Maximum `_cost` of a shard, which is about 0.4 GB of memory.


def open_writer(
    settings: WriteShardsSettings, vocabulary: Vocabulary, tokenizer: dict[str, Any]
) -> WriteShard:
    """Return the function of a worker that writes a shard; arguments as of `ShardWriter`."""
    with gpus_hidden():  # Workers share a machine, and prepare text on its processors.
        import_tensorflow()
        from bert_tf.data.shards import ShardWriter

        return ShardWriter(settings, vocabulary, tokenizer).write


def write_shards(
    settings: WriteShardsSettings, log: Callable[[str], None] = lambda line: None
) -> Manifest:
    """Write the shards of a corpus, or those that are still missing; return their manifest.

    Raises:
        UserError: If the input cannot be used, or if --output_dir contains shards of other
            settings, text or versions.
    """
    vocabulary = Vocabulary.load(settings.vocab)
    given = {name: getattr(settings, name) for name in TOKENIZER_SETTINGS}
    tokenizer = vocabulary.normalization() | {
        name: value for name, value in given.items() if value is not None
    }
    directory = settings.output_dir
    is_here = not files.is_remote(directory)
    paths = documents.find_files(settings.input, os.path.realpath(directory) if is_here else None)
    if os.path.realpath(settings.vocab) in map(os.path.realpath, paths):
        raise UserError(f"--vocab={settings.vocab}: is part of --input; name the text files alone")
    check_directory(directory)
    for warning in (
        unreachable_entries(vocabulary, tokenizer, settings.vocab),
        too_few_predictions(settings),
    ):
        if warning:
            log(f"warning: {warning}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(ownership.sole_writer(directory))
        spill_dir = os.path.join(directory, SPILL)
        stack.callback(files.remove_tree, spill_dir)
        planned = functools.partial(
            Manifest.planned,
            directory,
            settings,
            vocabulary,
            {**tokenizer, "tables_sha256": unicode_tables.sha256()},
        )
        if NAME in files.listdir(directory):  # All but the text is compared before it is read.
            on_disk = Manifest.load(directory)
            on_disk.check_same_plan(planned(on_disk.corpus))

        log(f"indexing: {len(paths)} files, {'uncased' if tokenizer['do_lower_case'] else 'cased'}")
        # Workers read the documents again by offset, so files must not change until the end.
        began, stamps = time.monotonic(), {path: files.stamp(path) for path in paths}
        index = documents.index(paths, settings.input_format, settings.text_field, spill_dir)
        if not settings.next_sentence:
            what = f"running text, filled up to {settings.max_seq_length} tokens within documents"
            if settings.input_format == "jsonl":
                what = "one text per object"
            # A file without blank lines is a single document.
            elif settings.input_format == "lines" and len(index) == len(np.unique(index.files)):
                what = "one text per line, since no blank line separates documents"
                index = documents.index(paths, "texts", settings.text_field, spill_dir)
            log(f"input: {what}")
        num_bytes = int(index.lengths.sum())
        log(
            f"{len(index):,} documents, {num_bytes / 1e6:.1f} MB of text "
            f"({num_bytes / 1e6 / max(time.monotonic() - began, 1e-3):.0f} MB/s)"
        )
        check_index(index, settings)
        manifest = planned({"documents": len(index), "sha256": index.sha256})
        were_missing = manifest.write_missing(
            functools.partial(open_writer, settings, vocabulary, tokenizer),
            lambda number: ShardSpans(index, number, settings.num_shards),
            stamps,
            settings,
            log,
        )
    if were_missing:
        log(_summary(manifest))
    for warning in manifest.warnings():
        log(f"warning: {warning}")
    return manifest


def unreachable_entries(
    vocabulary: Vocabulary, tokenizer: Mapping[str, Any], vocab: str
) -> str | None:
    """Return a warning if over 1% of the entries are not normalized like the text."""
    lower = tokenizer["do_lower_case"]
    strips = strips_accents(lower, tokenizer["strip_accents"])
    count = vocabulary.count_changed(lower, strips)
    if count <= 0.01 * len(vocabulary):
        return None
    return (
        f"--vocab={vocab}: {count:,} of {len(vocabulary):,} entries cannot occur in text "
        f"with --do_lower_case={str(lower).lower()} --strip_accents={str(strips).lower()}; "
        "expected the flags of learn_vocab"
    )


def too_few_predictions(settings: WriteShardsSettings) -> str | None:
    """Return a warning if full examples have fewer predictions than their fraction asks for."""
    length, limit = settings.max_seq_length, settings.max_predictions_per_seq
    expected = round(length * settings.masked_lm_prob)
    if limit >= expected:
        return None
    return (
        f"--max_predictions_per_seq={limit}: predicts at most {limit / length:.1%} of {length} "
        f"tokens; --masked_lm_prob={settings.masked_lm_prob:g} asks for {expected} tokens"
    )


def check_index(index: DocumentIndex, settings: WriteShardsSettings) -> None:
    """Check that each shard gets enough documents and fits in memory.

    Raises:
        UserError: If there are too many shards for the documents, or too few for the text. The
            message suggests a number.
    """
    is_alone = settings.same_document_next or not settings.next_sentence
    min_documents = 1 if is_alone else MIN_DOCUMENTS
    max_shards = len(index) // min_documents
    if settings.next_sentence and settings.num_shards > max_shards:
        advice = (
            f"use --num_shards={max_shards} or less"
            if max_shards
            else "separate documents by blank lines (or see --input_format), or write single "
            "texts with --next_sentence=false"
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
        path = index.inputs[index.files[largest]]
        advice = (
            f"split the largest document ({index.lengths[largest] / 1e6:.0f} MB at byte "
            f"{index.offsets[largest]} of {path}{', decompressed' * path.endswith('.gz')}), or "
            "lower --dupe_factor"
        )
    raise UserError(
        f"--num_shards={settings.num_shards}: up to {text:.0f} MB of text per shard with "
        f"--dupe_factor={settings.dupe_factor} does not fit in memory; {advice}"
    )


class ShardSpans:
    """Path, offset and length in bytes of each document of a shard, numbered from 0.

    Arrays save memory: runners of Beam receive the documents of all shards at once.
    """

    def __init__(self, index: DocumentIndex, number: int, num_shards: int) -> None:
        files, self._offsets, self._lengths = (
            column[number::num_shards] for column in (index.files, index.offsets, index.lengths)
        )
        used, positions = np.unique(files, return_inverse=True)
        self._paths = [index.paths[file] for file in used]
        self._files = positions.astype(np.int32)

    def __iter__(self) -> Iterator[Span]:
        columns = (self._files, self._offsets, self._lengths)
        for file, offset, length in zip(*(column.tolist() for column in columns), strict=True):
            yield self._paths[file], offset, length


def _largest(index, num_shards):
    """Return the bytes of text of the largest shard."""
    owners = np.arange(len(index)) % num_shards
    return np.bincount(owners, weights=index.lengths, minlength=num_shards).max()


def _cost(index, settings, num_shards):
    """Estimate memory in bytes: that of the text, and an eighth of it per pass."""
    return _largest(index, num_shards) * (1 + settings.dupe_factor / 8)


def _summary(manifest):
    tokens = sum(entry["tokens"] for entry in manifest.shards)
    num_positions = manifest.num_examples * manifest.settings["max_seq_length"]
    pairs = f"; {manifest.random_next:.1%} random next" * manifest.has_next_sentence
    return (
        f"{manifest.directory}: {manifest.num_examples:,} examples in {len(manifest.shards)} "
        f"shards, {sum(entry['bytes'] for entry in manifest.shards) / 1e6:.1f} MB; {tokens:,} "
        f"tokens, {1 - tokens / num_positions:.1%} of {num_positions:,} positions are padding"
        f"{pairs}"
    )
