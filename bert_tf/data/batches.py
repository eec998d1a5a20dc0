"""Batches of pretraining examples from shards, in a reproducible order, resumable anywhere.

Each epoch shuffles the shards, groups them into blocks of about `BLOCK_EXAMPLES` examples and
shuffles each block, all from (seed, epoch). A position in the data is therefore three integers, and
resuming reads one block. A shard of more examples is split into pieces, which take part in the
order as shards do.

Shape suffixes: N examples of a block, B batch size, L sequence length, P maximum predictions per
sequence, T tokens of a batch.
"""

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_tf.config import BertConfig, strips_accents
from bert_tf.data import masking, tf_examples
from bert_tf.data.manifest import Manifest, content_fault
from bert_tf.errors import UserError, tensorflow_reason
from bert_tf.storage import files
from bert_tf.text.encoder_inputs import (
    PackedShape,
    from_padded,
    place_sequences,
    to_flat,
    to_packed,
)
from bert_tf.text.vocabulary import Vocabulary

ToLayout = Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]
Select = Callable[[tf.data.Dataset], tf.data.Dataset]
BLOCK_EXAMPLES = 1 << 16
SAMPLED_EXAMPLES = 1024  # Whose lengths stand for those of all.
READ_BYTES = 1 << 18  # As `tf.data.TFRecordDataset`.
PIECES_PER_BLOCK = 16  # Of large shards, so that a block mixes examples of many parts of a file.
BUFFER_BYTES = 1 << 20
# A TFRecord is its length as uint64, a checksum of the length, the content and a checksum of the
# content. TensorFlow verifies the checksums.
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES = 16
_MESSAGE = re.compile(r"<<(.*?)>>", re.DOTALL)


class DataPosition(NamedTuple):
    """Position of training in the data."""

    seed: int  # Seed of the order.
    epoch: int  # Epoch number from 0.
    next_example: int  # Index of the next example in the shuffled epoch.


class Pieces(NamedTuple):
    """The pieces of all shards, in order. A piece is a shard, or a part of one with many records.

    All arrays have the shape `(N,)`.
    """

    shards: np.ndarray  # int64, indices of the shards.
    firsts: np.ndarray  # int64, index in the shard of the first record.
    records: np.ndarray  # int64, numbers of records.
    is_part: np.ndarray  # bool, whether the piece is a part of a shard.


def split_shards(counts: np.ndarray, max_records: int, piece_records: int) -> Pieces:
    """Split shards of more than `max_records` records into pieces of `piece_records`.

    The last piece of a shard may have fewer; an empty shard has no piece. `counts` are the numbers
    of records, int64 `(shards,)`.
    """
    is_large = counts > max_records
    sizes = np.where(is_large, piece_records, np.maximum(counts, 1))
    num_pieces = -(-counts // sizes)
    shards = np.repeat(np.arange(len(counts)), num_pieces)
    numbers = np.arange(len(shards)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    firsts = numbers * sizes[shards]
    records = np.minimum(counts[shards] - firsts, sizes[shards])
    return Pieces(shards, firsts, records, is_large[shards])


def record_offsets(path: str | os.PathLike, every: int) -> tuple[int, np.ndarray]:
    """Count the records of a TFRecord file and find some of them, by their lengths alone.

    A TFRecord file has no index.

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


def bad_record(error: tf.errors.OpError, where: str = "") -> UserError | None:
    """Return the `UserError` for a TensorFlow error from reading a batch, or `None`.

    Args:
        error: Error raised by TensorFlow.
        where: Prefix of a message that names no record, such as the current step.
    """
    if found := _MESSAGE.search(str(error)):
        return UserError(found[1])
    is_missing = "No such file or directory" in str(error)
    if is_missing or isinstance(error, tf.errors.DataLossError):
        return UserError(
            f"{where}a shard is {'missing' if is_missing else 'damaged'} "
            f"({tensorflow_reason(error)}); run bert-tf inspect_shards to find it"
        )
    return None


@contextlib.contextmanager
def names_bad_record() -> Iterator[None]:
    """Raise `UserError` for a TensorFlow error from reading a batch."""
    try:
        yield
    except tf.errors.OpError as error:
        raise bad_record(error) or error from None


class PretrainingDataset:
    """Batches of a directory of shards for training and evaluation.

    The vocabulary of the model has to be that of the shards.

    Raises:
        UserError: If the shards are incomplete or do not match the vocabulary or the configuration.
    """

    def __init__(self, directory: str, vocabulary: Vocabulary, config: BertConfig) -> None:
        self.manifest = Manifest.load(directory)
        self.manifest.check_complete()
        self.vocabulary = vocabulary
        settings = self.manifest.settings
        self.max_seq_length = settings["max_seq_length"]
        self._limits = tf_examples.limits(
            config.vocab_size, self.max_seq_length, config.type_vocab_size
        )
        if not self.manifest.has(vocabulary):
            sha256 = self.manifest.vocabulary_sha256
            raise UserError(
                f"{directory}: written with another vocabulary ({self.manifest.vocab_size} "
                f"entries, SHA-256 {sha256[:12]}..., now {len(vocabulary)} entries, "
                f"{vocabulary.sha256[:12]}...); use the vocab.txt of the shards"
            )
        vocabulary.check_size(config.vocab_size, where=str(directory))
        tokenizer = self.manifest.tokenizer
        if tokenizer and tokenizer["do_lower_case"] != config.do_lower_case:
            raise UserError(
                f"{directory}: written with do_lower_case={tokenizer['do_lower_case']}; the "
                f"configuration has {config.do_lower_case}"
            )
        if tokenizer:
            found = strips_accents(tokenizer["do_lower_case"], tokenizer.get("strip_accents"))
            expected = strips_accents(config.do_lower_case, config.strip_accents)
            if found != expected:
                raise UserError(
                    f"{directory}: written with strip_accents={found}; the configuration has "
                    f"{expected}; expected shards and configuration that agree (--strip_accents of "
                    "write_shards)"
                )
        # Examples of other programs may have a single segment; their numbers are checked as read.
        if tokenizer and config.type_vocab_size < 2 and self.manifest.has_next_sentence:
            raise UserError(
                f"{directory}: pairs of two segments; the configuration has type_vocab_size="
                f"{config.type_vocab_size}, expected at least 2"
            )
        if self.max_seq_length > config.max_position_embeddings:
            raise UserError(
                f"{directory}: max_seq_length={self.max_seq_length} exceeds "
                f"max_position_embeddings={config.max_position_embeddings} of the configuration"
            )
        masks = self.manifest.masks
        self._mask = masking.MaskGenerator(vocabulary, **masks) if masks else None
        self._paths = [self.manifest.path(entry["file"]) for entry in self.manifest.shards]
        self._counts = np.array([entry["records"] for entry in self.manifest.shards], np.int64)
        self._piece_records = max(1, BLOCK_EXAMPLES // PIECES_PER_BLOCK)
        self._pieces = split_shards(self._counts, BLOCK_EXAMPLES, self._piece_records)
        self._offsets: dict[int, np.ndarray] = {}  # Of the pieces of large shards, once used.
        # Masking keys use the index of an example among all shards.
        self._first_of_shard = np.cumsum(self._counts) - self._counts
        self._parse = tf_examples.parser_of(settings)

    def __len__(self) -> int:
        return self.manifest.num_examples

    def position(self, seed: int, num_examples: int) -> DataPosition:
        """Return the position after `num_examples` examples from the start of training."""
        return DataPosition(seed, *divmod(num_examples, len(self)))

    def training_batches(
        self,
        position: DataPosition,
        batch_size: int,
        layout: ToLayout,
        select: Select = lambda batches: batches,
    ) -> tf.data.Dataset:
        """Return an infinite dataset of shuffled batches, dicts of tensors by feature name.

        Batches continue across epoch boundaries, so that no example is dropped. `position` is that
        of the first example. `select` returns the batches to make of a dataset of all; the others
        are not parsed.
        """
        rows = self._rows(self._training_blocks(position))
        batches = select(rows.batch(batch_size, drop_remainder=True))
        return self._finished(batches, position.seed, layout)

    def evaluation_batches(
        self, batch_size: int, layout: ToLayout, select: Select = lambda batches: batches
    ) -> tf.data.Dataset:
        """Return batches of all examples once, in order. The last batch may be smaller."""

        def block(piece):
            return tf.zeros([], tf.int64), [piece], tf.range(tf.gather(self._pieces.records, piece))

        rows = self._rows(tf.data.Dataset.range(len(self._pieces.records)).map(block))
        return self._finished(select(rows.batch(batch_size)), 0, layout)

    @names_bad_record()
    def sequence_lengths(self) -> np.ndarray:
        """Return the number of tokens of the first `SAMPLED_EXAMPLES` examples, int `(N,)`."""
        lengths = self.evaluation_batches(
            SAMPLED_EXAMPLES, lambda examples: {"": tf.reduce_sum(examples["input_mask"], axis=1)}
        )
        return next(iter(lengths))[""].numpy()

    def _training_blocks(self, position):
        """Return a dataset of (epoch, pieces, order of their records), one block per element.

        Records are numbered across the pieces of a block. Those before `position` are left out.

        `from_generator` is avoided: with it TensorFlow makes the process return freed memory to the
        system at once (M_TRIM_THRESHOLD), which slows down a train step of 2.5 s by 8%, with 14,000
        page faults.
        """

        def of_epoch(epoch):
            columns = tf.numpy_function(
                lambda epoch: self._blocks(position.seed, epoch), [epoch], [tf.int64] * 3
            )
            order, splits, starts = (tf.ensure_shape(column, [None]) for column in columns)
            # In the epoch of `position`, examples before it are dropped; later epochs are complete.
            done = tf.where(
                epoch == position.epoch, tf.constant(position.next_example, tf.int64), 0
            )

            def block(number):
                size = starts[number + 1] - starts[number]
                order_N = tf.numpy_function(
                    lambda *numbers: self._order(position.seed, *numbers),
                    [epoch, number, size],
                    tf.int64,
                )
                order_N = tf.ensure_shape(order_N, [None])
                pieces_of_block = order[splits[number] : splits[number + 1]]
                return epoch, pieces_of_block, order_N[tf.maximum(done - starts[number], 0) :]

            first = tf.searchsorted(starts, [done], side="right", out_type=tf.int64)[0] - 1
            return tf.data.Dataset.range(first, tf.size(splits, tf.int64) - 1).map(block)

        return tf.data.Dataset.counter(position.epoch).flat_map(of_epoch)

    def _blocks(self, seed, epoch):
        """Divide an epoch into blocks.

        Returns:
            int64 arrays: the order of the pieces, and the first piece and the first example of each
            block in this order. The last two end with the totals.
        """
        order = np.random.default_rng([seed, epoch, 0]).permutation(len(self._pieces.records))
        ends = np.cumsum(self._pieces.records[order])
        splits, starts = [0], [0]
        while splits[-1] < len(order):
            # A block ends with the piece that makes it large enough.
            last = min(np.searchsorted(ends, starts[-1] + BLOCK_EXAMPLES), len(order) - 1)
            splits.append(last + 1)
            starts.append(ends[last])
        return order, np.array(splits, np.int64), np.array(starts, np.int64)

    def _order(self, seed, epoch, block, size):
        """Return the order of a block's records. Stream 0 is used for the order of the pieces."""
        return np.random.default_rng([seed, epoch, block + 1]).permutation(size)

    def _rows(self, blocks):
        """Return a dataset of records, and where they are from."""
        # Prefetching reads the next block while this one is used.
        blocks = blocks.map(self._read_block).prefetch(1)
        return blocks.flat_map(lambda *columns: tf.data.Dataset.from_tensor_slices(columns))

    def _finished(self, batches, seed, layout):
        """Return batches of examples in a layout, of batches of `_rows`."""

        @tf.autograph.experimental.do_not_convert
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

        # Batches are finished in parallel, but delivered in order.
        batches = batches.map(finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return batches.prefetch(2)

    def _read_block(self, epoch, pieces_of_block, order_N):
        """Read a block. Return record, epoch, shard and index in the shard, each `(N,)`."""
        # Complete shards first, since a single dataset reads many files several times as fast.
        is_part = tf.gather(self._pieces.is_part, pieces_of_block)
        order = tf.argsort(tf.cast(is_part, tf.int32), stable=True)
        pieces_of_block = tf.gather(pieces_of_block, order)
        shards, firsts, expected, is_part = (
            tf.gather(column, pieces_of_block) for column in self._pieces
        )
        offsets = tf.numpy_function(self._find, [shards, firsts, is_part], tf.int64)
        # Before they are read, since one shard may have records that another one lacks.
        checked = tf.numpy_function(self._check_sizes, [shards], [])
        with tf.control_dependencies([checked]):
            paths = tf.gather(self._paths, shards)
        sources = (paths, tf.ensure_shape(offsets, [None]), expected)
        num_shards = tf.size(shards) - tf.math.count_nonzero(is_part, dtype=tf.int32)
        parts = tf.data.Dataset.from_tensor_slices(tuple(column[num_shards:] for column in sources))
        # Complete shards are read to their end, which shows surplus records.
        records = tf.data.TFRecordDataset(sources[0][:num_shards]).concatenate(
            parts.flat_map(_part)
        )
        records_N = records.batch(tf.int64.max).get_single_element()
        missing = tf.reduce_sum(expected) - tf.size(records_N, tf.int64)
        checked = tf.numpy_function(self._check_count, [missing, shards], [])
        with tf.control_dependencies([checked]):
            records_N = tf.identity(records_N)
        columns = (
            records_N,
            tf.fill(tf.shape(records_N), epoch),
            tf.repeat(shards, expected),
            tf.ragged.range(firsts, firsts + expected).flat_values,
        )
        return tuple(tf.gather(column, order_N) for column in columns)

    def _find(self, shards, firsts, is_part):
        """Return the offsets in bytes of pieces. A file is searched when it is first read."""
        offsets = np.zeros(len(shards), np.int64)
        for row in np.flatnonzero(is_part):
            shard = shards[row]
            if shard not in self._offsets:
                self._offsets[shard] = self._counted(shard)
            offsets[row] = self._offsets[shard][firsts[row] // self._piece_records]
        return offsets

    def _check_sizes(self, shards):
        """Raise an error that names the first shard of another size and number of records."""
        for shard in shards:
            if files.stamp(self._paths[shard])[0] != self.manifest.shards[shard]["bytes"]:
                self._counted(shard)

    def _check_count(self, missing, shards):
        """Raise an error that names the first shard of another number of records, if any."""
        for shard in shards if missing else ():
            self._counted(shard)

    def _counted(self, shard):
        """Return the offsets of a shard's pieces, after a check of its number of records."""
        path = self._paths[shard]
        count, offsets = record_offsets(path, self._piece_records)
        if count != self._counts[shard]:
            fault = content_fault(path)
            found = f"{count} records{f' ({fault})' if fault else ''}"
            raise ValueError(f"<<{path}: {found}; the manifest has {self._counts[shard]}>>")
        return offsets

    def _checks(self, examples, shard_B, number_B):
        """Return assertions that fail if an id, position or label is out of range.

        The message names the record. Without them, `tf.gather` would fail on a CPU without naming
        it, and return 0 or NaN on other devices.
        """
        checks = []
        for name, limit in self._limits.items():
            if name in examples:
                values = examples[name]
                is_bad = (values < 0) | (values >= limit)
                first = tf.argmax(tf.reduce_any(is_bad, axis=1))
                value = values[first][tf.argmax(is_bad[first])]
                path, number = tf.gather(self._paths, shard_B[first]), number_B[first]
                message = [path, ": record ", tf.strings.as_string(number), f": {name} is "]
                message += [tf.strings.as_string(value), f"; expected 0 to {limit - 1}"]
                # TensorFlow adds text around the message; `bad_record` finds it by the marks.
                marked = tf.strings.join(["<<", *message, ">>"])
                checks.append(tf.debugging.Assert(~tf.reduce_any(is_bad), [marked], summarize=1))
        return checks


def _part(path, offset, expected):
    """Return a dataset of the records of a part of a shard."""
    records = tf.data.experimental.from_variant(
        tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type="", buffer_size=READ_BYTES, byte_offsets=[offset]
        ),
        tf.TensorSpec([], tf.string),
    )
    return records.take(expected)


def pad_examples(examples: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Return `examples` as of `pack_examples` in the padded layout, with labels `(B,)`."""
    return {**examples, **_next_sentence_labels(examples)}


def flatten_examples(examples: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Return `examples` as of `pack_examples` in the flat layout, without padding between them.

    Returns:
        Dict with int32 input_ids and segment_ids `(T,)`, row_splits `(B + 1,)`,
        masked_lm_positions `(B, P)` relative to T, the other masked_lm_* tensors and
        next_sentence_labels `(B,)`, if there are some. T is rounded up to a bucket size; the tail
        is 0.
    """
    flat = to_flat(from_padded(examples), None)
    return _with_labels(flat, examples, flat["row_splits"][:-1, tf.newaxis])


def pack_examples(
    examples: Mapping[str, tf.Tensor], shape: PackedShape, num_parts: int = 1
) -> dict[str, tf.Tensor]:
    """Return examples in the packed layout, several per row.

    Args:
        examples: Tensors `(B, L)`, `(B, P)` and `(B, 1)` by feature name.
        shape: Tokens per row and numbers of rows.
        num_parts: With gradient accumulation, the number of consecutive batches among the examples.
            They get the same number of rows and are stacked on a new first axis.

    Returns:
        Dict with the inputs of `to_packed`, masked_lm_positions `(B, P)` relative to all
        tokens, the other masked_lm_* tensors and next_sentence_labels `(B,)`, if there are some.
    """
    if num_parts == 1:
        return _pack(examples, shape)
    lengths = tf.reduce_sum(examples["input_mask"], axis=1)
    num_rows, starts = place_sequences(tf.reshape(lengths, [num_parts, -1]), shape)
    names = list(examples)
    split = zip(*(tf.split(examples[name], num_parts) for name in names), strict=True)
    packed = [
        _pack(dict(zip(names, values, strict=True)), shape, (num_rows, starts_B))
        for values, starts_B in zip(split, tf.unstack(starts), strict=True)
    ]
    return {name: tf.stack([part[name] for part in packed]) for name in packed[0]}


def _pack(examples, shape, places=None):
    packed = to_packed(from_padded(examples), None, shape, places=places)
    return _with_labels(packed, examples, packed["token_indices"][:, :1])


def _with_labels(inputs, examples, starts_B1):
    """Add the labels of examples whose first tokens are at `starts_B1` among all tokens."""
    return {
        **inputs,
        **{name: examples[name] for name in tf_examples.MASKS},
        "masked_lm_positions": examples["masked_lm_positions"] + starts_B1,
        **_next_sentence_labels(examples),
    }


def _next_sentence_labels(examples):
    """Return the labels `(B,)` by name; examples without next sentences have none."""
    return {name: examples[name][:, 0] for name in (tf_examples.LABELS,) if name in examples}
