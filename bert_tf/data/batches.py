"""Shards to batches: in an order that is a function of (seed, epoch), from any position on.

An epoch goes through the shards in an order drawn from (seed, epoch), whole shards at a time until
they hold BLOCK_EXAMPLES; the examples of such a block are put in an order drawn from (seed,
epoch, block). So a position is three numbers, and to go on from it costs reading one block.

Legend: N examples, B of a batch, L their length, P the most predictions, T tokens of a batch.
"""

import re
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.bucketing import round_up_to_bucket
from bert_tf.data import masking, tf_examples
from bert_tf.data.manifest import Manifest
from bert_tf.errors import UserError

BLOCK_EXAMPLES = 1 << 16
_MESSAGE = re.compile(r"<<(.*?)>>", re.DOTALL)


class DataPosition(NamedTuple):
    """Where training is in the data: the next example is number `next_example` of its epoch."""

    seed: int
    epoch: int
    next_example: int


class PretrainingDataset:
    """A folder of shards, to train or evaluate on with one vocabulary."""

    def __init__(self, directory, vocabulary, config):
        """Raises UserError where manifest, vocabulary and BertConfig do not fit together."""
        self.manifest = Manifest.load(directory)
        self.manifest.check_complete()
        self.vocabulary, self.vocab_size = vocabulary, config.vocab_size
        settings = self.manifest.settings
        self.max_seq_length = settings["max_seq_length"]
        made_with = self.manifest.values["vocabulary"]
        if made_with["sha256"] != vocabulary.sha256:
            raise UserError(
                f"{directory}: made with another vocabulary ({made_with['entries']} entries, "
                f"sha256 {made_with['sha256'][:12]}..., now {len(vocabulary)} entries, "
                f"{vocabulary.sha256[:12]}...); its ids would mean other tokens"
            )
        vocabulary.check_size(config.vocab_size, where=str(directory))
        tokenizer = self.manifest.values.get("tokenizer")
        if tokenizer and tokenizer["do_lower_case"] != config.do_lower_case:
            raise UserError(
                f"{directory}: made with do_lower_case={tokenizer['do_lower_case']}, the "
                f"configuration has {config.do_lower_case}"
            )
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"{directory}: max_seq_length={self.max_seq_length}, the configuration has "
                f"{config.max_position_embeddings} positions"
            )
        self._mask = None
        num_predictions = settings["max_predictions_per_seq"]
        if settings["masking"] == "dynamic":
            self._mask = masking.MaskGenerator(
                vocabulary,
                masked_lm_prob=settings["masked_lm_prob"],
                max_predictions_per_seq=num_predictions,
                whole_word_mask=settings["whole_word_mask"],
                replace_with_any=settings["replace_with_any"],
            )
            num_predictions = 0
        counts = [entry["records"] for entry in self.manifest.shards]
        self._paths = [self.manifest.path(entry["file"]) for entry in self.manifest.shards]
        self._counts = np.array(counts, np.int64)
        self._first_of_shard = np.cumsum([0, *counts[:-1]])
        self._parse = tf_examples.parser(self.max_seq_length, num_predictions)

    def __len__(self):
        return self.manifest.num_examples

    def verify(self):
        """Raises UserError naming the first shard that is not as it was written."""
        self.manifest.check_files()

    def position(self, seed, num_examples):
        """The DataPosition after so many examples from the start."""
        return DataPosition(seed, *divmod(num_examples, len(self)))

    def training_batches(self, position, batch_size, layout):
        """Batches without end from a DataPosition on: a Dataset of {feature: tensor}.

        Each is `batch_size` examples; batches run over the ends of epochs, so that none is left
        out. `layout` is pad_examples or flatten_examples.
        """
        blocks = self._training_blocks(position)
        return self._batches(blocks, position.seed, batch_size, layout, drop_remainder=True)

    def evaluation_batches(self, batch_size, layout):
        """All examples once, in the shards' order; the last batch may be smaller."""

        def block(shard):
            return tf.zeros([], tf.int64), [shard], tf.range(tf.gather(self._counts, shard))

        blocks = tf.data.Dataset.range(len(self._counts)).map(block)
        return self._batches(blocks, 0, batch_size, layout, drop_remainder=False)

    def _training_blocks(self, position):
        """Dataset of (epoch, shards, order of their records), a block an element.

        Not from_generator: TensorFlow then has the process give all freed memory back at once
        (M_TRIM_THRESHOLD), and a train step of 2.5 s, with 14,000 page faults, takes 8% longer.
        """

        def of_epoch(epoch):
            count = tf.numpy_function(
                lambda epoch: len(self._blocks(position.seed, epoch)), [epoch], tf.int64
            )
            return tf.data.Dataset.range(count).map(lambda number: (epoch, *block(epoch, number)))

        def block(epoch, number):
            columns = tf.numpy_function(
                lambda *indices: self._block(position, *indices), [epoch, number], [tf.int64] * 2
            )
            return tuple(tf.ensure_shape(column, [None]) for column in columns)

        blocks = tf.data.Dataset.counter(position.epoch).flat_map(of_epoch)
        return blocks.filter(lambda epoch, shards, order: tf.size(order) > 0)

    def _block(self, position, epoch, number):
        """(shards, order of their records) of an epoch's block, as far as `position` leaves it.

        Shards are numbers; records count through all of a block's shards.
        """
        blocks = self._blocks(position.seed, epoch)
        sizes = [self._counts[shards].sum() for shards in blocks]
        order = self._order(position.seed, epoch, number, sizes[number])
        done = position.next_example - sum(sizes[:number]) if epoch == position.epoch else 0
        return blocks[number], order[max(done, 0) :]

    def _blocks(self, seed, epoch):
        """The shards of each block of an epoch, int64 arrays."""
        shards = np.random.default_rng([seed, epoch, 0]).permutation(len(self._counts))
        blocks, size = [[]], 0
        for shard in shards:
            if size >= BLOCK_EXAMPLES:
                blocks.append([])
                size = 0
            blocks[-1].append(shard)
            size += self._counts[shard]
        return [np.array(block, np.int64) for block in blocks]

    def _order(self, seed, epoch, block, size):
        """Of a block's records. 0 is for the order of the shards."""
        return np.random.default_rng([seed, epoch, block + 1]).permutation(size)

    def _batches(self, blocks, seed, batch_size, layout, drop_remainder):
        # The next block is read while this one is used.
        blocks = blocks.map(self._read_block).prefetch(1)
        rows = blocks.flat_map(lambda *columns: tf.data.Dataset.from_tensor_slices(columns))
        batches = rows.batch(batch_size, drop_remainder=drop_remainder)

        def finish(record_B, epoch_B, shard_B, number_B):
            examples = self._parse(record_B)
            with tf.control_dependencies(self._checks(examples, shard_B, number_B)):
                examples = {
                    name: tf.cast(value, tf.int32) if value.dtype == tf.int64 else value
                    for name, value in examples.items()
                }
            if self._mask is not None:
                numbers_B = tf.gather(self._first_of_shard, shard_B) + number_B
                examples = self._mask(examples, masking.keys(seed, epoch_B, numbers_B))
            return layout(examples)

        batches = batches.map(finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return batches.prefetch(2)

    def _read_block(self, epoch, shards, order_N):
        """-> records string, epoch, shard, number in the shard int64, each [N], in order."""
        paths = tf.gather(self._paths, shards)
        records_N = tf.data.TFRecordDataset(paths).batch(tf.int64.max).get_single_element()
        expected = tf.gather(self._counts, shards)
        where = tf.strings.reduce_join(paths, separator=", ")
        counts = [
            tf.strings.as_string(tf.size(records_N)),
            tf.strings.as_string(tf.reduce_sum(expected)),
        ]
        message = [where, ": ", counts[0], " records, the manifest has ", counts[1]]
        is_right = tf.size(records_N, tf.int64) == tf.reduce_sum(expected)
        with tf.control_dependencies([_require(is_right, message)]):
            records_N = tf.identity(records_N)
        columns = (
            records_N,
            tf.fill(tf.shape(records_N), epoch),
            tf.repeat(shards, expected),
            tf.ragged.range(expected).flat_values,
        )
        return tuple(tf.gather(column, order_N) for column in columns)

    def _checks(self, examples, shard_B, number_B):
        """Operations that fail, naming the first example with an id, position or label too large.

        A gather on a processor would refuse it without saying where, and on other devices give 0
        or NaN.
        """
        checks = []
        for name, limit in tf_examples.limits(self.vocab_size, self.max_seq_length).items():
            if name in examples:
                values = examples[name]
                is_bad = (values < 0) | (values >= limit)
                first = tf.argmax(tf.reduce_any(is_bad, axis=1))
                value = values[first][tf.argmax(is_bad[first])]
                path, number = tf.gather(self._paths, shard_B[first]), number_B[first]
                message = [path, ": record ", tf.strings.as_string(number), f": {name} holds "]
                message += [tf.strings.as_string(value), f", wanted 0 to {limit - 1}"]
                checks.append(_require(~tf.reduce_any(is_bad), message))
        return checks


def bad_record(error):
    """The UserError in an error of TensorFlow's that reading a batch gave, or None."""
    found = _MESSAGE.search(str(error))
    return UserError(found[1]) if found else None


def _require(condition, message):
    return tf.debugging.Assert(condition, [tf.strings.join(["<<", *message, ">>"])], summarize=1)


def pad_examples(examples):
    """As on disk, [B, L] and [B, P]; next_sentence_labels [B]."""
    return {**examples, tf_examples.LABELS: examples[tf_examples.LABELS][:, 0]}


def flatten_examples(examples):
    """Without padding: {input_ids, segment_ids [T], row_splits [B + 1], ...}.

    T is rounded up to one of few sizes. masked_lm_positions [B, P] count through all T.
    """
    is_token_BL = examples["input_mask"] > 0
    lengths_B = tf.reduce_sum(examples["input_mask"], axis=1)
    row_splits = tf.concat([[0], tf.cumsum(lengths_B)], axis=0)
    tail = [[0, round_up_to_bucket(row_splits[-1]) - row_splits[-1]]]
    flattened = {
        name: tf.pad(tf.boolean_mask(examples[name], is_token_BL), tail)
        for name in ("input_ids", "segment_ids")
    }
    positions = examples["masked_lm_positions"] + row_splits[:-1, tf.newaxis]
    others = {name: examples[name] for name in tf_examples.MASKS}
    return {
        **others,
        **flattened,
        "row_splits": row_splits,
        "masked_lm_positions": positions,
        tf_examples.LABELS: examples[tf_examples.LABELS][:, 0],
    }
