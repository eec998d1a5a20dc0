"""Batches of shards: order and position, both layouts, dynamic masks and damaged files."""

import gzip
import json
import os
import pathlib
import shutil
import zlib

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, Vocabulary
from bert_tf.data import batches as module
from bert_tf.data import inspection, tf_examples
from bert_tf.data.batches import PretrainingDataset, bad_record, flatten_examples, pad_examples
from bert_tf.data.manifest import Manifest
from bert_tf.pretraining.evaluation import PretrainingEvaluator
from bert_tf.system import progress
from tests.corpus import ENTRIES, config_of, write_shards

LENGTH, PREDICTIONS = 32, 5


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("static"))


@pytest.fixture
def copy(shards, tmp_path):
    """Return a copy of the shards that a test may damage."""
    return pathlib.Path(shutil.copytree(shards, tmp_path / "copy"))


def data_of(directory, **changes):
    return PretrainingDataset(directory, Vocabulary(ENTRIES), config_of(**changes))


def rows(dataset, count=None):
    """Return {feature: array} for all examples of the first `count` batches."""
    found = list(dataset.take(-1 if count is None else count))
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def as_bytes(examples):
    return [
        b"".join(examples[name][row].tobytes() for name in sorted(examples))
        for row in range(len(examples["input_ids"]))
    ]


@pytest.mark.medium
def test_an_epoch_reads_every_example_once_in_its_own_order(shards, monkeypatch):
    data = data_of(shards)
    everything = as_bytes(rows(data.evaluation_batches(64, pad_examples)))
    assert len(everything) == len(data) == data.manifest.num_examples > 200
    # One shuffle block for all shards, several blocks, and one block per shard.
    for block in (1 << 16, 100, 1):
        monkeypatch.setattr(module, "BLOCK_EXAMPLES", block)
        epochs = 2 * len(data)
        drawn = as_bytes(
            rows(data.training_batches(data.position(5, 0), len(data), pad_examples), 2)
        )
        assert len(drawn) == epochs
        first, second = drawn[: len(data)], drawn[len(data) :]
        assert sorted(first) == sorted(second) == sorted(everything)
        assert first != second and first != everything
        again = rows(data.training_batches(data.position(6, 0), len(data), pad_examples), 1)
        assert as_bytes(again) != first


@pytest.mark.medium
def test_resuming_at_any_position_yields_the_same_batches(shards, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_EXAMPLES", 100)
    data, size = data_of(shards), 7
    count = len(data) // size + 5  # This reaches into the second epoch.
    complete = as_bytes(rows(data.training_batches(data.position(5, 0), size, pad_examples), count))
    for step in (0, 1, 15, count - 6, count - 5, count - 1):
        position = data.position(5, step * size)
        assert position == (5, step * size // len(data), step * size % len(data))
        rest = data.training_batches(position, size, pad_examples)
        assert as_bytes(rows(rest, count - step)) == complete[step * size :]


def test_orders_of_shards_blocks_and_epochs_are_independent(shards):
    data = data_of(shards)
    orders = [np.random.default_rng([*pair, 0]).permutation(30) for pair in np.ndindex(3, 3)]
    orders += [data._order(*numbers, 30) for numbers in np.ndindex(3, 3, 3)]
    assert len({tuple(order) for order in orders}) == 9 + 27


def test_input_pipelines_do_not_use_from_generator(shards):
    """Check the graph: from_generator sets M_TRIM_THRESHOLD, which slows down every later step."""
    data = data_of(shards)
    for batches in (
        data.training_batches(data.position(5, 0), 7, pad_examples),
        data.evaluation_batches(7, pad_examples),
    ):
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=batches._variant_tensor, external_state_policy=1
        )
        definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        operations = {node.op for node in nodes}
        assert "MapDataset" in operations and "GeneratorDataset" not in operations


def test_a_block_mixes_shards(shards):
    data = data_of(shards)
    order = data._order(5, epoch=0, block=0, size=len(data))
    owner = np.searchsorted(np.cumsum(data._counts), order, side="right")
    assert len(set(owner[:30])) == 3


def test_the_flat_layout_is_the_padded_layout_without_padding(shards):
    data = data_of(shards)
    padded, flat = (
        list(data.training_batches(data.position(1, 3), 9, layout).take(3))
        for layout in (pad_examples, flatten_examples)
    )
    for wide, narrow in zip(padded, flat, strict=True):
        wide, narrow = (
            {name: value.numpy() for name, value in batch.items()} for batch in (wide, narrow)
        )
        assert set(narrow) == {*wide, "row_splits"} - {"input_mask"}
        splits = narrow["row_splits"]
        ids = narrow["input_ids"]
        assert splits[-1] <= len(ids) < splits[-1] * 1.125 + 8 and not ids[splits[-1] :].any()
        for row in range(9):
            length = wide["input_mask"][row].sum()
            part = slice(splits[row], splits[row + 1])
            assert (ids[part] == wide["input_ids"][row, :length]).all()
            assert (narrow["segment_ids"][part] == wide["segment_ids"][row, :length]).all()
            for name in ("masked_lm_ids", "masked_lm_weights"):
                assert (narrow[name][row] == wide[name][row]).all()
            weights = wide["masked_lm_weights"][row] > 0
            seen = ids[narrow["masked_lm_positions"][row][weights]]
            positions = wide["masked_lm_positions"][row][weights]
            assert (seen == wide["input_ids"][row][positions]).all()
        assert narrow["next_sentence_labels"].shape == (9,)
        assert wide["input_ids"].shape == (9, LENGTH)


@pytest.mark.slow
def test_dynamic_masks_change_per_epoch_and_depend_on_the_example_only(tmp_path, shards):
    data = data_of(write_shards(tmp_path / "dynamic", "dynamic"))
    size = len(data)
    two = rows(data.training_batches(data.position(5, 0), size, pad_examples), 2)

    def unmasked(examples):
        ids = examples["input_ids"].copy()
        for row in range(len(ids)):
            weights = examples["masked_lm_weights"][row] > 0
            positions = examples["masked_lm_positions"][row][weights]
            ids[row, positions] = examples["masked_lm_ids"][row][weights]
        return ids

    plain = unmasked(two)
    first, second = np.lexsort(plain[:size].T), np.lexsort(plain[size:].T) + size
    assert (plain[first] == plain[second]).all()
    same = (two["masked_lm_positions"][first] == two["masked_lm_positions"][second]).all(axis=1)
    assert same.mean() < 0.3  # Short examples have few positions to choose from.
    # Masks depend neither on the batch size nor on the position at which training resumes.
    small = rows(data.training_batches(data.position(5, 40), 10, pad_examples), 6)
    for name in two:
        assert (small[name] == two[name][40:100]).all(), name
    other = rows(data.training_batches(data.position(6, 0), size, pad_examples), 1)
    third = np.lexsort(unmasked(other).T)
    same = (two["masked_lm_positions"][first] == other["masked_lm_positions"][third]).all(axis=1)
    assert same.mean() < 0.3
    # Static shards have the same text and the same number of masks.
    static, dynamic = (
        rows(source.evaluation_batches(9, pad_examples)) for source in (data_of(shards), data)
    )
    assert (unmasked(static) == unmasked(dynamic)).all()
    weights = [found["masked_lm_weights"].sum(axis=1) for found in (static, dynamic)]
    assert (weights[0] == weights[1]).all()


def test_settings_that_do_not_fit_are_rejected_with_both_values(shards, copy):
    with pytest.raises(UserError, match="max_seq_length=32 exceeds max_position_embeddings=16"):
        data_of(shards, max_position_embeddings=16)
    with pytest.raises(UserError, match=f"{len(ENTRIES)} entries, but .* vocab_size is 99"):
        data_of(shards, vocab_size=99)
    with pytest.raises(UserError, match="do_lower_case=True; the configuration has False"):
        data_of(shards, do_lower_case=False)
    with pytest.raises(UserError, match="strip_accents=True; the configuration has False"):
        data_of(shards, strip_accents=False)
    with pytest.raises(UserError, match="two segments; the configuration has type_vocab_size=1"):
        data_of(shards, type_vocab_size=1)
    with pytest.raises(UserError, match=r"another vocabulary .* now 60 entries"):
        PretrainingDataset(shards, Vocabulary([*ENTRIES, "more"]), config_of())
    with pytest.raises(UserError, match="nowhere/manifest.json: no such file"):
        PretrainingDataset("/nowhere", Vocabulary(ENTRIES), config_of())
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
    with pytest.raises(UserError, match="manifest.json: not complete"):
        data_of(copy)
    (copy / "manifest.json").write_text(
        json.dumps({name: value for name, value in manifest.items() if name != "versions"})
    )
    with pytest.raises(UserError, match="manifest.json: damaged .*versions"):
        data_of(copy)
    (copy / "manifest.json").write_text('{"complete": tr')
    with pytest.raises(UserError, match="manifest.json: damaged"):
        data_of(copy)


def second_shard(directory):
    return directory / "examples-00001-of-00003.tfrecord"


def last_record_begins(data):
    """Return the offset of the last record of a TFRecord file."""
    begin = position = 0
    while position < len(data):
        begin, position = (
            position,
            position + 16 + int.from_bytes(data[position : position + 8], "little"),
        )
    return begin


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, data: path.write_bytes(data[: last_record_begins(data)]),
        lambda path, data: path.write_bytes(data[:-20]),
        lambda path, data: path.write_bytes(b""),
        lambda path, data: path.unlink(),
        lambda path, data: path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
        lambda path, data: path.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
        lambda path, data: path.with_name("extra.tfrecord").write_bytes(data),
    ],
    ids=["record boundary", "inside", "empty", "missing", "byte", "length", "extra"],
)
def test_damage_is_reported_before_training(copy, damage):
    path = second_shard(copy)
    damage(path, path.read_bytes())
    with pytest.raises(UserError) as caught:
        data_of(copy).manifest.check_files()
    name = "extra.tfrecord" if (copy / "extra.tfrecord").exists() else path.name
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_damage_is_an_error_in_training_without_verification(copy):
    """Check that reading damaged shards fails even if `verify` was not called."""
    path = second_shard(copy)
    data = path.read_bytes()
    batches = data_of(copy).evaluation_batches(10, pad_examples)  # Each iteration reads the files.
    for damaged, kind in (
        (data[: last_record_begins(data)], tf.errors.InvalidArgumentError),
        (data[:-20], tf.errors.InvalidArgumentError),
        (data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], tf.errors.DataLossError),
    ):
        path.write_bytes(damaged)
        with pytest.raises(kind) as caught:
            rows(batches)
        if kind is tf.errors.InvalidArgumentError:
            assert "records; the manifest has" in str(bad_record(caught.value))


@pytest.mark.parametrize("damage", ["missing", "damaged", "impossible"])
def test_a_bad_shard_is_named_outside_of_training(copy, damage):
    """In evaluations, and while lengths are sampled for a compiled step."""
    path = second_shard(copy)
    data = data_of(copy)
    _, examples = next(inspection.read_shards([str(path)], tf_examples.parser(LENGTH, PREDICTIONS)))
    examples["segment_ids"][3, 0] = 7
    if damage == "missing":
        path.unlink()
    elif damage == "damaged":
        content = path.read_bytes()
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    else:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in tf_examples.serialize(examples):
                writer.write(record)
    evaluator = PretrainingEvaluator(None, tf.distribute.get_strategy(), data)
    evaluator._sums = lambda batch: tf.zeros([], tf.float64)
    for read in (data.sequence_lengths, evaluator.metrics):
        with pytest.raises(UserError) as caught:
            read()
        expected = f"{path}: record 3: segment_ids is 7" if damage == "impossible" else damage
        assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module", params=[pad_examples, flatten_examples])
def second_and_batches(request, shards, tmp_path_factory):
    """Return the path of a shard that a test may overwrite, and the batches of an epoch.

    Building the graphs of the batches takes longer than reading them.
    """
    directory = shutil.copytree(shards, tmp_path_factory.mktemp("layout") / "copy")
    data = data_of(directory)
    batches = data.training_batches(data.position(0, 0), 10, request.param)
    return second_shard(directory), batches.take(len(data) // 10 + 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", len(ENTRIES), f"input_ids is {len(ENTRIES)}; expected 0 to 58"),
        ("masked_lm_ids", 70_000, "masked_lm_ids is 70000"),
        ("input_mask", 2, "input_mask is 2; expected 0 to 1"),
        ("masked_lm_positions", LENGTH, "masked_lm_positions is 32; expected 0 to 31"),
        ("segment_ids", 2, "segment_ids is 2"),
        ("next_sentence_labels", 2, "next_sentence_labels is 2"),
    ],
)
def test_an_impossible_number_is_reported_with_shard_and_record(
    second_and_batches, shards, name, value, message
):
    path, batches = second_and_batches
    _, examples = next(
        inspection.read_shards([str(second_shard(shards))], tf_examples.parser(LENGTH, PREDICTIONS))
    )
    examples[name][17, 0] = value
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in tf_examples.serialize(examples):
            writer.write(record)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        for _ in batches:
            pass
    assert f"{path}: record 17: {message}" in str(bad_record(caught.value))


def test_inspection_counts_examples_and_features(shards, copy, monkeypatch):
    monkeypatch.setattr(inspection, "BATCH_EXAMPLES", 50)  # Several batches per shard.
    manifest = Manifest.load(shards)
    statistics = inspection.inspect(manifest, Vocabulary(ENTRIES))
    everything = rows(data_of(shards).evaluation_batches(50, pad_examples))
    assert np.concatenate(statistics.lengths).tolist() == (
        everything["input_mask"].sum(axis=1).tolist()
    )
    assert statistics.random_next == everything["next_sentence_labels"].sum()
    assert statistics.mask_actions.sum() == everything["masked_lm_weights"].sum()
    lines = list(statistics.lines(LENGTH))
    fraction = 1 - everything["input_mask"].mean()
    assert lines[1] == f"padding                {fraction:.2%} of all positions"
    path = second_shard(copy)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="examples-00001-of-00003.tfrecord: .* bytes; expected"):
        inspection.inspect(Manifest.load(copy), Vocabulary(ENTRIES))


def test_inspection_compares_the_vocabulary_before_it_reads_shards(shards, monkeypatch):
    monkeypatch.setattr(Manifest, "check_files", lambda *arguments: pytest.fail("read shards"))
    with pytest.raises(UserError, match="--vocab: not the vocabulary of"):
        inspection.inspect(Manifest.load(shards), Vocabulary([*ENTRIES, "more"]))


def test_inspection_reports_progress_inside_a_shard(shards, monkeypatch):
    monkeypatch.setattr(inspection, "BATCH_EXAMPLES", 50)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(Manifest, "check_files", lambda *arguments: None)
    manifest, said = Manifest.load(shards), []
    inspection.inspect(manifest, Vocabulary(ENTRIES), said.append)
    total = f"{manifest.num_examples:,}"
    assert said[0].startswith(f"50/{total} examples")
    assert said[-1].startswith(f"{total}/{total} examples")


def test_an_example_may_have_no_segment_b():
    ids = np.array([[2, 7, 8, 3]])
    statistics = inspection.ShardStatistics(mask_id=4)
    features = {"input_ids": ids, "input_mask": ids * 0 + 1, "segment_ids": ids * 0}
    statistics.add({**features, "next_sentence_labels": np.zeros((1, 1), np.int64)})
    lines = list(statistics.lines(4))
    assert "tokens of segment A    mean 2.00; min 2, 10% 2, median 2, 90% 2, max 2" in lines
    assert "tokens of segment B    mean 0.00; min 0, 10% 0, median 0, 90% 0, max 0" in lines


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_inspection_names_the_shard_of_a_damaged_record(copy, monkeypatch, kept):
    """Without the digests, the reader finds the damage: at the start of a shard and inside it."""
    monkeypatch.setattr(inspection, "BATCH_EXAMPLES", 10)
    monkeypatch.setattr(Manifest, "check_files", lambda manifest, log: None)
    path = second_shard(copy)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) - 20] if kept < 1 else b"x" + data[1:])
    with pytest.raises(
        UserError, match=f"{path}: damaged after record {'[1-9]' if kept < 1 else 0}"
    ):
        inspection.inspect(Manifest.load(copy), Vocabulary(ENTRIES))
    path.write_bytes(data[: last_record_begins(data)])
    with pytest.raises(UserError, match=f"{path}: [0-9]+ records; manifest.json has"):
        inspection.inspect(Manifest.load(copy), Vocabulary(ENTRIES))


def test_an_example_is_formatted_as_text():
    vocabulary = Vocabulary("[PAD] [UNK] [CLS] [SEP] [MASK] un ##able cat".split())
    example = {
        "input_ids": np.array([2, 5, 4, 3, 7, 3, 0]),
        "input_mask": np.array([1, 1, 1, 1, 1, 1, 0]),
        "segment_ids": np.array([0, 0, 0, 0, 1, 1, 0]),
        "masked_lm_positions": np.array([2, 4, 0]),
        "masked_lm_ids": np.array([6, 7, 0]),
        "masked_lm_weights": np.array([1.0, 1.0, 0.0]),
        "next_sentence_labels": np.array([1]),
    }
    assert list(inspection.format_example(example, vocabulary)) == [
        "6 tokens, random next",
        "  A  [CLS] un {[MASK]} [SEP]",
        "  B  {cat} [SEP]",
        "  predict  2 ##able, 4 cat",
    ]


@pytest.mark.slow
def test_shards_of_other_programs_get_a_manifest(copy, tmp_path, run_command):
    """Write features one by one with protobuf, as google-research/bert does."""
    everything = rows(data_of(copy).evaluation_batches(50, pad_examples))
    directory = tmp_path / "released"
    directory.mkdir()
    with tf.io.TFRecordWriter(str(directory / "tf_examples.tfrecord")) as writer:
        for row in range(len(everything["input_ids"])):
            example = tf.train.Example()
            for name in (*tf_examples.INPUTS, *tf_examples.MASKS, tf_examples.LABELS):
                values = np.atleast_1d(everything[name][row]).tolist()
                feature = example.features.feature[name]
                is_float = name == "masked_lm_weights"
                (feature.float_list if is_float else feature.int64_list).value.extend(values)
            writer.write(example.SerializeToString())
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    arguments = [f"--shards={directory}", f"--vocab={tmp_path / 'vocab.txt'}"]
    done = run_command("bert_tf.inspect_shards", *arguments)
    assert done.returncode == 2 and "--write_manifest" in done.stderr
    done = run_command("bert_tf.inspect_shards", *arguments, "--write_manifest", "--num_examples=1")
    assert done.returncode == 0, done.stderr
    assert "1 shards verified" in done.stdout and "  A  [CLS]" in done.stdout
    data = data_of(directory)
    data.manifest.check_files()
    adopted = rows(data.evaluation_batches(50, pad_examples))
    assert as_bytes(adopted) == as_bytes(everything)
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match="vocab.txt: already exists and differs from --vocab"):
        inspection.write_manifest(str(directory), Vocabulary(ENTRIES[:20]))
    (directory / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"record \d+: input_ids is \d+; expected 0 to 19"):
        inspection.write_manifest(str(directory), Vocabulary(ENTRIES[:20]))
    assert not (directory / "manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda data: b"", "0 bytes"),
        (gzip.compress, "compressed with gzip or zlib"),
        (zlib.compress, "compressed with gzip or zlib"),
        (lambda data: zlib.compress(data, 0), "compressed with gzip or zlib"),
    ],
)
def test_an_empty_or_compressed_shard_is_reported_as_such(copy, change, fault):
    path, vocabulary = second_shard(copy), Vocabulary(ENTRIES)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=rf"^{path}: {fault}; expected \d+ bytes; delete it and"):
        inspection.inspect(Manifest.load(copy), vocabulary)
    # Training does not verify the digests of all shards; evaluation reads one of them at a time.
    data = data_of(copy)
    for batches in (
        data.evaluation_batches(10, pad_examples),
        data.training_batches(data.position(0, 0), 10, pad_examples).take(1),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            rows(batches)
        message = f"{path}: 0 records ({fault}); the manifest has "
        assert str(bad_record(caught.value)).startswith(message)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"^{path}: {fault}; expected TFRecords without compr"):
        inspection.write_manifest(str(copy), vocabulary)


def test_ids_beyond_32_bits_and_below_0_are_rejected(copy):
    """Check that both write_manifest and training report the value stored in the file."""
    path = second_shard(copy)
    records_of = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    example = tf.train.Example.FromString(records_of[5])
    batches = data_of(copy).evaluation_batches(10, pad_examples)
    (copy / "manifest.json").unlink()
    for value in (-7, 2**32 + 9):
        example.features.feature["input_ids"].int64_list.value[1] = value
        records_of[5] = example.SerializeToString()
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records_of:
                writer.write(record)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            rows(batches)
        assert f"{path}: record 5: input_ids is {value}; expected" in str(bad_record(caught.value))
        with pytest.raises(UserError, match=f"record 5: input_ids is {value}; expected 0 to 58"):
            inspection.write_manifest(str(copy), Vocabulary(ENTRIES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("masked_lm_ids", None),
            "no feature masked_lm_ids; it has input_ids, input_mask",
        ),
        (("segment_ids", [0, 1]), "segment_ids does not have the type and length of the first"),
        (("input_mask", b"1"), "input_mask does not have the type and length of the first"),
        (None, "not a tf.train.Example"),
    ],
)
@pytest.mark.parametrize("record", [0, 3])
def test_the_feature_and_the_record_that_do_not_fit_are_named(tmp_path, change, message, record):
    sizes = dict.fromkeys(tf_examples.INPUTS, 4) | dict.fromkeys(tf_examples.MASKS, 2)
    examples = {name: np.ones([5, size], np.int64) for name, size in sizes.items()}
    examples["masked_lm_weights"] = np.ones([5, 2], np.float32)
    records = tf_examples.serialize({**examples, tf_examples.LABELS: np.ones([5, 1], np.int64)})
    example = tf.train.Example.FromString(records[record])
    if change is not None:
        name, values = change
        del example.features.feature[name]
        if isinstance(values, bytes):
            example.features.feature[name].bytes_list.value.append(values)
        elif values is not None:
            example.features.feature[name].int64_list.value.extend(values)
    records[record] = b"no example" if change is None else example.SerializeToString()
    path = str(tmp_path / "x.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for serialized in records:
            writer.write(serialized)
    parse = tf_examples.parser(4, 2)
    with pytest.raises(UserError, match=f"{path}: record {record}: {message}"):
        list(inspection.read_shards([path], parse))
    if record == 0 and change == ("masked_lm_ids", None):
        with pytest.raises(UserError, match="record 0: no feature masked_lm_ids; it has"):
            inspection.write_manifest(str(tmp_path), Vocabulary(ENTRIES))
    if record == 0 and change is None:
        with pytest.raises(UserError, match="x.tfrecord: not a TFRecord file of tf.train.Exam"):
            inspection.write_manifest(str(tmp_path), Vocabulary(ENTRIES))


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that fails")
def test_a_shard_of_a_storage_that_fails_is_not_called_damaged(copy, tmp_path):
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    (tmp_path / "a.tfrecord").symlink_to("/proc/self/mem")  # An "Input/output error".
    with pytest.raises(UserError, match=r"a.tfrecord: cannot be read \(.*Input/output error"):
        inspection.write_manifest(str(tmp_path), Vocabulary(ENTRIES))
    path, parse = str(second_shard(copy)), tf_examples.parser(LENGTH, PREDICTIONS)
    errors = [OSError("503 Service Unavailable")]

    def parse_later(records):
        def fail_once(records):
            if errors:
                raise errors.pop()
            return records

        return parse(tf.ensure_shape(tf.py_function(fail_once, [records], tf.string), [None]))

    with pytest.raises(UserError, match=r"or could not be read \(.*503 Service.*\); rerun"):
        list(inspection.read_shards([path], parse_later))
