"""What is in a folder of shards: is it what was written, how is it distributed, how does it read?

Legend: N examples, L their length, P the most predictions.
"""

import os

import numpy as np
import tensorflow as tf

from bert_tf import files
from bert_tf.data import tf_examples
from bert_tf.data.manifest import NAME, VOCABULARY_NAME, Manifest
from bert_tf.errors import UserError

BATCH_EXAMPLES = 4096


class ShardStatistics:
    """Counts over examples; lengths are of input_ids without padding, with [CLS] and [SEP]."""

    def __init__(self, mask_id):
        self.mask_id = mask_id
        self.lengths, self.lengths_b, self.predictions = [], [], []
        self.random_next = 0
        self.mask_actions = np.zeros(3, np.int64)  # [MASK], as it was, another token.

    def add(self, examples):
        """Counts {feature: array [N, ...]}."""
        self.lengths.append(examples["input_mask"].sum(axis=1, dtype=np.int32))
        self.lengths_b.append(examples["segment_ids"].sum(axis=1, dtype=np.int32))
        self.random_next += int(examples[tf_examples.LABELS].sum())
        if "masked_lm_ids" in examples:
            is_predicted = examples["masked_lm_weights"] > 0
            self.predictions.append(is_predicted.sum(axis=1, dtype=np.int32))
            seen = np.take_along_axis(
                examples["input_ids"], examples["masked_lm_positions"], axis=1
            )
            is_mask, is_same = seen == self.mask_id, seen == examples["masked_lm_ids"]
            for number, action in enumerate((is_mask, is_same & ~is_mask, ~is_same & ~is_mask)):
                self.mask_actions[number] += (action & is_predicted).sum()

    def lines(self, max_seq_length):
        """The distributions, as lines to read."""
        lengths, lengths_b = np.concatenate(self.lengths), np.concatenate(self.lengths_b)
        num_positions = len(lengths) * max_seq_length
        yield f"{len(lengths):,} examples of {max_seq_length} places, {lengths.sum():,} tokens"
        yield f"padding                {1 - lengths.sum() / num_positions:.2%} of all places"
        yield f"full examples          {np.mean(lengths == max_seq_length):.2%}"
        yield _deciles("tokens an example", lengths)
        yield _deciles("of segment A", lengths - lengths_b - 2)
        yield _deciles("of segment B", lengths_b - 1)
        yield f"random next            {self.random_next / len(lengths):.2%}"
        if not self.predictions:
            yield "predicted tokens       none: masks are drawn in training"
            return
        predictions = np.concatenate(self.predictions)
        yield _deciles("predicted tokens", predictions)
        yield f"predicted              {predictions.sum() / lengths.sum():.2%} of all tokens"
        mask, same, other = self.mask_actions / max(self.mask_actions.sum(), 1)
        yield f"of these               {mask:.2%} [MASK], {same:.2%} kept, {other:.2%} replaced"


def read_shard(path, parse):
    """The examples of a file, {feature: array [N, ...]} at a time.

    Raises UserError naming the file where it is damaged, or a record is not as `parse` wants it.
    """
    number = 0
    try:
        for batch in tf.data.TFRecordDataset(path).batch(BATCH_EXAMPLES):
            yield {name: value.numpy() for name, value in parse(batch).items()}
            number += len(batch)
    except tf.errors.DataLossError:
        raise UserError(f"{path}: damaged behind record {number}; write it again") from None
    except tf.errors.InvalidArgumentError:
        raise UserError(
            f"{path}: record {number} or one of the next has not the features and lengths that "
            "the first record or the manifest shows"
        ) from None
    except tf.errors.OpError as error:
        raise UserError(f"{path}: cannot be read ({error.message.splitlines()[0]})") from None


def inspect(manifest, vocabulary, log=lambda line: None):
    """Checks hashes and counts of all shards -> ShardStatistics.

    Raises UserError naming the first.
    """
    manifest.check_files()
    if vocabulary.sha256 != manifest.values["vocabulary"]["sha256"]:
        raise UserError(
            f"--vocab: not the vocabulary of {manifest.directory} "
            f"({len(vocabulary)} entries, there {manifest.values['vocabulary']['entries']})"
        )
    statistics = ShardStatistics(vocabulary["[MASK]"])
    parse = manifest_parser(manifest)
    for number, entry in enumerate(manifest.shards, start=1):
        count = 0
        for examples in read_shard(manifest.path(entry["file"]), parse):
            statistics.add(examples)
            count += len(examples["input_ids"])
        if count != entry["records"]:
            raise UserError(
                f"{manifest.path(entry['file'])}: {count} records, {NAME} has {entry['records']}"
            )
        if number % 16 == 0:
            log(f"{number}/{len(manifest.shards)} shards")
    return statistics


def manifest_parser(manifest):
    """records.parser for what a manifest's shards hold."""
    settings = manifest.settings
    is_masked = settings["masking"] == "static"
    return tf_examples.parser(
        settings["max_seq_length"], settings["max_predictions_per_seq"] if is_masked else 0
    )


def first_examples(manifest, count):
    """The first `count` examples, {feature: array} each."""
    parse = manifest_parser(manifest)
    for entry in manifest.shards:
        for examples in read_shard(manifest.path(entry["file"]), parse):
            for row in range(len(examples["input_ids"])):
                if count == 0:
                    return
                count -= 1
                yield {name: values[row] for name, values in examples.items()}


def format_example(example, vocabulary):
    """An example as lines: its segments as text, predicted places in braces, their answers."""

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
    yield f"{length} tokens, {'random next' if example[tf_examples.LABELS][0] else 'is next'}"
    for number, name in enumerate("AB"):
        words = [word for word, owner in zip(tokens, segments, strict=True) if owner == number]
        yield f"  {name}  {' '.join(words)}"
    if labels:
        yield f"  predict  {', '.join(labels)}"


def write_manifest(directory, vocabulary):
    """Writes the manifest of shards that another program made, once every record was read.

    Raises UserError naming a file that does not hold the released features, or a number that cannot
    be, such as an id that the vocabulary does not have.
    """
    if NAME in files.listdir(directory):
        raise UserError(f"{os.path.join(directory, NAME)}: is there already")
    path = os.path.join(directory, VOCABULARY_NAME)
    if files.exists(path) and files.read_text(path) != vocabulary.to_bytes().decode():
        raise UserError(f"{path}: is there already, and not the one of --vocab; which is right?")
    names = [name for name in files.listdir(directory) if "tfrecord" in name and name[0] != "."]
    if not names:
        raise UserError(f"{directory}: no file with tfrecord in its name")
    lengths = _lengths(os.path.join(directory, names[0]))
    parse, entries = tf_examples.parser(*lengths), []
    for name in names:
        path, count, tokens, random_next = os.path.join(directory, name), 0, 0, 0
        for examples in read_shard(path, parse):
            for feature, limit in tf_examples.limits(len(vocabulary), lengths[0]).items():
                values = examples[feature]
                is_bad = (values < 0) | (values >= limit)
                if is_bad.any():
                    row = is_bad.any(axis=1).argmax()
                    raise UserError(
                        f"{path}: record {count + row}: {feature} holds {values[is_bad][0]}, "
                        f"wanted 0 to {limit - 1}"
                    )
            count += len(examples["input_ids"])
            tokens += int(examples["input_mask"].sum())
            random_next += int(examples[tf_examples.LABELS].sum())
        entries.append(
            {
                "file": name,
                "records": count,
                "bytes": files.size(path),
                "sha256": files.sha256(path),
                "tokens": tokens,
                "random_next": random_next,
            }
        )
    manifest = Manifest(
        directory,
        {
            "complete": True,
            "settings": {
                "max_seq_length": lengths[0],
                "max_predictions_per_seq": lengths[1],
                "masking": "static",
            },
            "vocabulary": {"sha256": vocabulary.sha256, "entries": len(vocabulary)},
            "shards": entries,
        },
    )
    manifest.save_vocabulary(vocabulary)
    manifest.save()
    return manifest


def _lengths(path):
    """(max_seq_length, max_predictions_per_seq) that the first record of a file shows."""
    try:
        record = next(iter(tf.data.TFRecordDataset(path)), None)
        example = tf.train.Example.FromString(record.numpy() if record is not None else b"")
    except (tf.errors.OpError, ValueError):
        raise UserError(f"{path}: not a TFRecord file of tf.train.Examples") from None
    has = sorted(example.features.feature)  # Asking for one puts it there.
    sizes = [
        len(example.features.feature[name].int64_list.value)
        for name in ("input_ids", "masked_lm_positions")
    ]
    if not all(sizes):
        raise UserError(
            f"{path}: its first record has the features {has}; "
            f"wanted {', '.join((*tf_examples.INPUTS, *tf_examples.MASKS, tf_examples.LABELS))}"
        )
    return sizes


def _deciles(name, numbers):
    values = np.percentile(numbers, [0, 10, 50, 90, 100]).astype(int)
    return (
        f"{name:22} mean {numbers.mean():.2f}; least {values[0]}, 10% {values[1]}, "
        f"half {values[2]}, 90% {values[3]}, most {values[4]}"
    )
