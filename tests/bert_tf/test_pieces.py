"""Large shards in pieces: order, exact resume, memory, damaged files and offsets of records."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.data import batches as module
from bert_tf.data.batches import (
    PretrainingDataset,
    bad_record,
    pad_examples,
    record_offsets,
    split_shards,
)
from tests.bert_tf.test_batches import as_bytes, data_of, last_record_begins, rows
from tests.corpus import write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("static"))


@pytest.fixture
def copy(shards, tmp_path):
    """Return a copy of the shards that a test may damage."""
    return pathlib.Path(shutil.copytree(shards, tmp_path / "copy"))


def split_into_pieces(monkeypatch):
    """Split the shards, of more than 100 records each, into pieces of 10."""
    monkeypatch.setattr(module, "BLOCK_EXAMPLES", 40)
    monkeypatch.setattr(module, "PIECES_PER_BLOCK", 4)


@pytest.fixture
def small_blocks(monkeypatch):
    split_into_pieces(monkeypatch)


@pytest.mark.medium
def test_large_shards_are_read_in_pieces_in_the_order_of_small_shards(
    shards, tmp_path, small_blocks, monkeypatch
):
    """Compare with the same records in files of 10, which are pieces of their own."""
    manifest = json.loads((shards / "manifest.json").read_text())
    entries, size = [], 10
    for entry in manifest["shards"]:
        records = [
            record.numpy() for record in tf.data.TFRecordDataset(str(shards / entry["file"]))
        ]
        for begin in range(0, len(records), size):
            part = records[begin : begin + size]
            entries.append({**entry, "file": f"{len(entries)}.tfrecord", "records": len(part)})
            with tf.io.TFRecordWriter(str(tmp_path / entries[-1]["file"])) as writer:
                for record in part:
                    writer.write(record)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "shards": entries}))
    large, small = data_of(shards), data_of(tmp_path)
    assert len(large) == len(small) and len(large._paths) == 3 and len(small._paths) > 30
    size, read, read_block = 7, [], PretrainingDataset._read_block
    monkeypatch.setattr(PretrainingDataset, "_read_block", counted(read_block, read))
    count = 2 * len(large) // size
    drawn = as_bytes(rows(large.training_batches(large.position(5, 0), size, pad_examples), count))
    assert max(read) < 40 + 10 and sum(read) >= len(drawn)
    expected = small.training_batches(small.position(5, 0), size, pad_examples)
    assert drawn == as_bytes(rows(expected, count))
    evaluated = as_bytes(rows(large.evaluation_batches(size, pad_examples)))
    assert evaluated == as_bytes(rows(small.evaluation_batches(size, pad_examples)))
    assert sorted(drawn[: len(large)]) == sorted(evaluated)
    # 3, 7 and 100 are in the middle of a piece; the last one is in the second epoch.
    for number in (3, 7, 100, len(large) + 25):
        rest = large.training_batches(large.position(5, number), 5, pad_examples)
        assert as_bytes(rows(rest, 3)) == drawn[number : number + 15]
    first = sum(read)
    next(iter(large.training_batches(large.position(5, len(large) - 5), 5, pad_examples)))
    assert sum(read) - first < 3 * 50  # The rest of the epoch, and the prefetched block.


def counted(read_block, read):
    """Return `read_block` that also appends the number of records it has read to a list."""

    def counting(self, epoch, pieces_of_block, order_N):
        size = tf.reduce_sum(tf.gather(self._pieces.records, pieces_of_block))
        with tf.control_dependencies([tf.py_function(lambda n: read.append(int(n)), [size], [])]):
            return read_block(self, epoch, pieces_of_block, tf.identity(order_N))

    return counting


@pytest.fixture(scope="module")
def second_and_data(shards, tmp_path_factory):
    """Return the path of a shard that a test may overwrite, the data and batches of an epoch.

    The batches read the files in each iteration.
    """
    directory = shutil.copytree(shards, tmp_path_factory.mktemp("pieces") / "copy")
    with pytest.MonkeyPatch.context() as context:
        split_into_pieces(context)
        data = data_of(directory)
        batches = data.training_batches(data.position(0, 0), 10, pad_examples)
    return directory / "examples-00001-of-00003.tfrecord", data, batches


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: last_record_begins(data)], r"records; the manifest has 11\d"),
        (lambda data: data[:-20], r"records; the manifest has 11\d"),
        (lambda data: data + data[: last_record_begins(data)], r"records; the manifest has 11\d"),
        (lambda data: b"", r": 0 records \(0 bytes\); the manifest has 11"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "records; the manifest has|corrupted"),
        (lambda data: data[:7] + bytes([1]) + data[8:], ": 0 records; the manifest has"),
        (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "corrupted"),
    ],
    ids=["record boundary", "inside", "longer", "empty", "length", "huge length", "byte"],
)
def test_damage_of_large_shards_is_reported(second_and_data, shards, small_blocks, damage, message):
    path, data, batches = second_and_data
    path.write_bytes(damage((shards / path.name).read_bytes()))
    data._offsets.clear()  # Those that the previous test has found.
    with pytest.raises(tf.errors.OpError, match=message) as caught:
        rows(batches, len(data) // 10)
    named = rf"{path}: \d+ records( \(0 bytes\))?; .* has \d+|a shard is damaged .*"
    assert re.fullmatch(named, str(bad_record(caught.value)))


def test_surplus_and_missing_records_of_small_shards_name_the_shard(copy):
    """Check the number of each shard: the block as a whole has the right number."""
    files = [copy / f"examples-{shard:05d}-of-00003.tfrecord" for shard in (0, 1)]
    data = files[0].read_bytes()
    cut = last_record_begins(data)
    files[0].write_bytes(data[:cut])
    files[1].write_bytes(files[1].read_bytes() + data[cut:])
    dataset = data_of(copy)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        rows(dataset.training_batches(dataset.position(0, 0), 10, pad_examples), 1)
    assert re.fullmatch(
        r".*-0000[01]-of-00003.tfrecord: \d+ records; the manifest has \d+",
        str(bad_record(caught.value)),
    )


def test_offsets_of_records_are_found_in_buffers_of_any_size(tmp_path, monkeypatch):
    contents = [bytes([number % 256]) * (number * 37 % 101) for number in range(50)]
    path = tmp_path / "file.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in contents:
            writer.write(content)
    expected = np.cumsum([0, *(16 + len(content) for content in contents)])
    for buffer_bytes in (8, 13, 64, 1 << 20):
        monkeypatch.setattr(module, "BUFFER_BYTES", buffer_bytes)
        for every in (1, 7):
            number, offsets = record_offsets(path, every)
            assert number == 50 and offsets.tolist() == expected[::every].tolist()


def test_shards_of_up_to_a_block_are_not_split():
    found = split_shards(np.array([0, 5, 8, 9, 16, 1]), max_records=8, piece_records=4)
    assert found.shards.tolist() == [1, 2, 3, 3, 3, 4, 4, 4, 4, 5]
    assert found.firsts.tolist() == [0, 0, 0, 4, 8, 0, 4, 8, 12, 0]
    assert found.records.tolist() == [5, 8, 4, 4, 1, 4, 4, 4, 4, 1]
    assert np.flatnonzero(found.is_part).tolist() == [2, 3, 4, 5, 6, 7, 8]
