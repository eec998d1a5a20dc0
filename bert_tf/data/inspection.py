"""Verify, summarize and print pretraining shards, and write the manifest of released shards.

Shape suffixes: N examples, L sequence length, P maximum predictions per sequence.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from bert_tf.data import tf_examples
from bert_tf.data.manifest import NAME, VOCABULARY_NAME, Manifest, content_fault
from bert_tf.errors import UserError, tensorflow_reason
from bert_tf.storage import files
from bert_tf.system.progress import Progress
from bert_tf.text.vocabulary import Vocabulary

BATCH_EXAMPLES = 4096
# TensorFlow's message on an example that cannot be parsed. Records count from 0.
_FEATURE = re.compile(r"\b(?:Key|Feature): (\w+)")


class ShardStatistics:
    """Statistics of examples. Lengths are in tokens, with [CLS] and [SEP], without padding."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id
        self.lengths: list[np.ndarray] = []
        self.lengths_b: list[np.ndarray] = []
        self.predictions: list[np.ndarray] = []
        self.random_next: int | None = None  # Unless the examples are pairs of segments.
        self.mask_actions = np.zeros(3, np.int64)  # Counts of [MASK], kept, replaced.

    def add(self, examples: Mapping[str, np.ndarray]) -> None:
        """Add examples: arrays `(N, ...)` by feature name."""
        self.lengths.append(examples["input_mask"].sum(axis=1, dtype=np.int32))
        self.lengths_b.append(examples["segment_ids"].sum(axis=1, dtype=np.int32))
        if tf_examples.LABELS in examples:
            random_next = int(examples[tf_examples.LABELS].sum())
            self.random_next = (self.random_next or 0) + random_next
        if "masked_lm_ids" in examples:
            is_predicted = examples["masked_lm_weights"] > 0
            self.predictions.append(is_predicted.sum(axis=1, dtype=np.int32))
            # Compare the token in the input with the label to infer the masking action.
            seen = np.take_along_axis(
                examples["input_ids"], examples["masked_lm_positions"], axis=1
            )
            is_mask, is_same = seen == self.mask_id, seen == examples["masked_lm_ids"]
            for number, action in enumerate((is_mask, is_same & ~is_mask, ~is_same & ~is_mask)):
                self.mask_actions[number] += (action & is_predicted).sum()

    def lines(self, max_seq_length: int) -> Iterator[str]:
        """Yield the statistics as lines of text; `max_seq_length` is the length with padding."""
        lengths, lengths_b = np.concatenate(self.lengths), np.concatenate(self.lengths_b)
        num_positions = len(lengths) * max_seq_length
        yield f"{len(lengths):,} examples of {max_seq_length} positions, {lengths.sum():,} tokens"
        yield f"padding                {1 - lengths.sum() / num_positions:.2%} of all positions"
        yield f"full examples          {np.mean(lengths == max_seq_length):.2%}"
        yield _deciles("tokens per example", lengths)
        if self.random_next is not None:
            yield _deciles("tokens of segment A", lengths - lengths_b - 2)
            yield _deciles("tokens of segment B", np.maximum(lengths_b - 1, 0))
            yield f"random next            {self.random_next / len(lengths):.2%}"
        if not self.predictions:
            yield "predicted tokens       none: dynamic masking"
            return
        predictions = np.concatenate(self.predictions)
        yield _deciles("predicted tokens", predictions)
        yield f"predicted              {predictions.sum() / lengths.sum():.2%} of all tokens"
        mask, same, other = self.mask_actions / max(self.mask_actions.sum(), 1)
        yield f"of these               {mask:.2%} [MASK], {same:.2%} kept, {other:.2%} replaced"


def read_shards(
    paths: Sequence[str], parse: Callable[[tf.Tensor], dict[str, tf.Tensor]]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Read the examples of TFRecord files in order, in batches of `BATCH_EXAMPLES`.

    Yields:
        Index of the file, and arrays `(N, ...)` by feature name.

    Raises:
        UserError: If a file is damaged or a record cannot be parsed.
    """
    names, shard = tf.constant(paths), 0

    def batches(number):
        records = tf.data.TFRecordDataset(tf.gather(names, number)).batch(BATCH_EXAMPLES)
        return records.map(lambda batch: (number, parse(batch)))

    try:
        # One dataset reads all files, because a dataset per file takes 14 ms.
        for number, examples in tf.data.Dataset.range(len(paths)).flat_map(batches):
            shard = int(number)
            yield shard, {name: value.numpy() for name, value in examples.items()}
    except tf.errors.OpError as error:
        # The error names no file: it is in that of the last batch or in a later one.
        for path in paths[shard:]:
            _check_records(path, parse)
        reason = tensorflow_reason(error)
        raise UserError(
            f"{paths[shard]}: was changed while it was read, or could not be read ({reason}); "
            "rerun the command"
        ) from None


def _check_records(path, parse):
    """Raise the UserError for the first record of a file that cannot be read or parsed, if any."""
    records, first = tf.data.TFRecordDataset(path), 0
    try:
        for batch in records.batch(BATCH_EXAMPLES):
            parse(batch)
            first += len(batch)
        return
    except tf.errors.DataLossError:
        raise UserError(f"{path}: damaged after record {first}; write it again") from None
    except tf.errors.InvalidArgumentError:
        pass  # The record is found below.
    except tf.errors.OpError as error:
        raise _unreadable(path, error) from None
    for number, record in enumerate(records.skip(first), first):
        try:
            parse(record[tf.newaxis])
        except tf.errors.InvalidArgumentError as error:
            found = _FEATURE.search(error.message)
            has = tf.train.Example.FromString(record.numpy()).features.feature if found else ()
            if not found:
                what = "not a tf.train.Example"
            elif found[1] in has:
                what = f"{found[1]} does not have the type and length of the first record or the "
                what += "manifest"
            else:
                what = f"no feature {found[1]}; it has {', '.join(sorted(has)) or 'none'}"
            raise UserError(f"{path}: record {number}: {what}") from None


def _unreadable(path, error):
    """Return the UserError for an error that is not about the content of a file."""
    return UserError(f"{path}: cannot be read ({tensorflow_reason(error)})")


def inspect(
    manifest: Manifest, vocabulary: Vocabulary, log: Callable[[str], None] = lambda line: None
) -> ShardStatistics:
    """Verify hashes and record counts of all shards and collect statistics; raises UserError."""
    if vocabulary.sha256 != manifest.vocabulary_sha256:
        raise UserError(
            f"--vocab: not the vocabulary of {manifest.directory} ({len(vocabulary)} entries; "
            f"the manifest has {manifest.vocab_size})"
        )
    manifest.check_files(log)
    statistics = ShardStatistics(vocabulary["[MASK]"])
    paths = [manifest.path(entry["file"]) for entry in manifest.shards]
    counts = [0] * len(paths)
    with Progress(log, "examples", manifest.num_examples) as progress:
        for shard, examples in read_shards(paths, tf_examples.parser_of(manifest.settings)):
            statistics.add(examples)
            counts[shard] += len(examples["input_ids"])
            progress.update(progress.done + len(examples["input_ids"]))
    for path, count, entry in zip(paths, counts, manifest.shards, strict=True):
        if count != entry["records"]:
            raise UserError(f"{path}: {count} records; {NAME} has {entry['records']}")
    return statistics


def first_examples(manifest: Manifest, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first `count` examples, as arrays by feature name."""
    paths = [manifest.path(entry["file"]) for entry in manifest.shards]
    rows = (
        {name: values[row] for name, values in examples.items()}
        for _, examples in read_shards(paths, tf_examples.parser_of(manifest.settings))
        for row in range(len(examples["input_ids"]))
    )
    return itertools.islice(rows, count)


def format_example(example: Mapping[str, np.ndarray], vocabulary: Vocabulary) -> Iterator[str]:
    """Yield an example of `first_examples` as lines of text.

    They are a summary, the tokens of each segment with masked positions in braces, and the labels
    of the masked positions.
    """

    def token(token_id):
        return vocabulary.entries[token_id]

    length = example["input_mask"].sum()
    tokens = [token(token_id) for token_id in example["input_ids"][:length]]
    labels = []
    for position, label, weight in zip(
        *(example.get(name, ()) for name in tf_examples.MASKS), strict=True
    ):
        if weight > 0:
            labels.append(f"{position} {token(label)}")
            tokens[position] = f"{{{tokens[position]}}}"
    segments = example["segment_ids"][:length]
    pair = [("is next", "random next")[label] for label in example.get(tf_examples.LABELS, ())]
    yield ", ".join([f"{length} tokens", *pair])
    for number, name in enumerate("AB" if pair else "A"):
        words = [word for word, owner in zip(tokens, segments, strict=True) if owner == number]
        yield f"  {name}  {' '.join(words)}"
    if labels:
        yield f"  predict  {', '.join(labels)}"


def write_manifest(directory: str | os.PathLike, vocabulary: Vocabulary) -> Manifest:
    """Write the manifest of shards from google-research/bert or another program.

    The shards are files with "tfrecord" in their names. Every record is read and checked before. A
    copy of the vocabulary is saved next to them.

    Raises:
        UserError: If a file is empty or does not contain the released features, or a value is out
            of range, such as an id that is not in the vocabulary.
    """
    if NAME in files.listdir(directory):
        raise UserError(
            f"{os.path.join(directory, NAME)}: already exists; delete it to write a new one"
        )
    path = os.path.join(directory, VOCABULARY_NAME)
    if files.exists(path) and Vocabulary.load(path).sha256 != vocabulary.sha256:
        raise UserError(
            f"{path}: already exists and differs from --vocab; keep the one of the shards"
        )
    names = [name for name in files.listdir(directory) if "tfrecord" in name and name[0] != "."]
    if not names:
        raise UserError(f"{directory}: no TFRecord files; expected names with 'tfrecord'")
    paths = [os.path.join(directory, name) for name in names]
    _check_content(paths)
    max_seq_length, max_predictions = _lengths(paths)
    parse = tf_examples.parser(max_seq_length, max_predictions)
    totals = [{"records": 0, "tokens": 0, "random_next": 0} for _ in paths]
    for number, examples in read_shards(paths, parse):
        of_shard = totals[number]
        for feature, limit in tf_examples.limits(len(vocabulary), max_seq_length).items():
            values = examples[feature]
            is_bad = (values < 0) | (values >= limit)
            if is_bad.any():
                record = of_shard["records"] + is_bad.any(axis=1).argmax()
                raise UserError(
                    f"{paths[number]}: record {record}: {feature} is {values[is_bad][0]}; "
                    f"expected 0 to {limit - 1}"
                )
        of_shard["records"] += len(examples["input_ids"])
        of_shard["tokens"] += int(examples["input_mask"].sum())
        of_shard["random_next"] += int(examples[tf_examples.LABELS].sum())
    entries = [
        {
            "file": name,
            "records": of_shard.pop("records"),
            "bytes": files.stamp(path)[0],
            "sha256": files.sha256(path),
            **of_shard,
        }
        for name, path, of_shard in zip(names, paths, totals, strict=True)
    ]
    manifest = Manifest.describe(directory, vocabulary, max_seq_length, max_predictions, entries)
    vocabulary.save(manifest.path(VOCABULARY_NAME))
    manifest.save_values()
    return manifest


def _check_content(paths):
    """Raise UserError if a file is empty or compressed."""
    for path in paths:
        try:
            fault = content_fault(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        if fault:
            raise UserError(
                f"{path}: {fault}; expected TFRecords without compression; replace or remove it"
            )


def _lengths(paths):
    """Return max_seq_length and max_predictions_per_seq of the first record of the files."""
    for path in paths:
        try:
            record = next(iter(tf.data.TFRecordDataset(path)), None)
            example = tf.train.Example.FromString(record.numpy() if record is not None else b"")
        except (tf.errors.DataLossError, DecodeError):
            raise UserError(f"{path}: not a TFRecord file of tf.train.Examples") from None
        except tf.errors.OpError as error:
            raise _unreadable(path, error) from None
        if record is not None:
            break
    has = example.features.feature
    expected = (*tf_examples.INPUTS, *tf_examples.MASKS, tf_examples.LABELS)
    if missing := [name for name in expected if name not in has]:
        raise UserError(
            f"{path}: record 0: no feature {', '.join(missing)}; it has "
            f"{', '.join(sorted(has)) or 'none'}"
        )
    names = ("input_ids", "masked_lm_positions")
    sizes = [len(has[name].int64_list.value) for name in names]
    if not all(sizes):
        raise UserError(f"{path}: record 0: {names[sizes.index(0)]}: expected a list of integers")
    return sizes


def _deciles(name, numbers):
    values = np.percentile(numbers, [0, 10, 50, 90, 100]).astype(int)
    return (
        f"{name:22} mean {numbers.mean():.2f}; min {values[0]}, 10% {values[1]}, "
        f"median {values[2]}, 90% {values[3]}, max {values[4]}"
    )
