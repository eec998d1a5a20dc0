"""Batches of the replicas of a process, batches on a GPU, and deterministic operations."""

import os

import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism, is_op_determinism_enabled

from bert_tf import Vocabulary
from bert_tf.config import read_json_object
from bert_tf.data.batches import PretrainingDataset
from bert_tf.pretraining import recipe
from bert_tf.pretraining.evaluation import PretrainingEvaluator
from bert_tf.train import compilation, distribution
from bert_tf.train.distribution import LocalReplicas, distribute, make_strategy
from tests.corpus import config_of, write_shards
from tests.pretraining import assert_same_bits, make_config, settings_of, weights_of

HALVES = [LocalReplicas(first, 2, 4) for first in (0, 2)]  # Two processes of two replicas each.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    shards = write_shards(tmp_path_factory.mktemp("data") / "shards")
    return PretrainingDataset(str(shards), Vocabulary.load(shards / "vocab.txt"), config_of())


def test_each_replica_reads_its_elements_in_order():
    elements = tf.data.Dataset.range(16)
    assert LocalReplicas().select(elements) is elements

    def read(replicas, **options):
        return [int(number) for number in replicas.select(elements, **options)]

    assert [read(half) for half in HALVES] == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]
    # Two batches per replica and step, which it accumulates.
    assert read(HALVES[1], per_replica=2) == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.medium
def test_a_process_parses_its_own_batches_alone(data):
    position, parsed = data.position(3, 0), []

    def layout(examples):
        ids = tf.numpy_function(
            lambda ids: parsed.append(1) or ids, [examples["input_ids"]], tf.int32
        )
        return {"input_ids": ids}

    def read(select, count):
        parsed.clear()
        batches = data.training_batches(position, 4, layout, select)
        return [of["input_ids"].tobytes() for of in batches.take(count).as_numpy_iterator()]

    expected = read(lambda batches: batches.take(8), 8)
    for half in HALVES:
        mine = read(lambda batches, half=half: half.select(batches.take(8)), 4)
        assert mine == [expected[half.first + number] for number in (0, 1, 4, 5)]
        assert len(parsed) == 4


@pytest.mark.medium
@pytest.mark.parametrize("num_batches", [1, 3, 4])
def test_processes_evaluate_each_example_once(data, monkeypatch, num_batches):
    monkeypatch.setattr("bert_tf.pretraining.evaluation.BATCH_EXAMPLES", 4)
    evaluator = PretrainingEvaluator(None, make_strategy("none"), data, num_batches=num_batches)
    parts = [list(evaluator._batches(replicas)) for replicas in (LocalReplicas(), *HALVES)]
    counted = [
        [inputs["input_ids"].numpy().tolist() for inputs, _, weights in part if sum_of(weights)]
        for part in parts
    ]
    complete, *halves = counted
    assert len(complete) == num_batches and len(parts[1]) == len(parts[2]) == 2
    for number, half in enumerate(halves):
        assert half == [ids for at, ids in enumerate(complete) if at % 4 // 2 == number]


def sum_of(weights):
    return float(sum(tf.reduce_sum(weight) for weight in weights.values()))


def test_a_single_gpu_receives_the_batches_of_a_compiled_step_in_advance(monkeypatch):
    batches = tf.data.Dataset.range(3).map(lambda number: {"ids": tf.fill([2], number)})

    def devices(is_compiled):
        dataset = distribute(lambda local: batches, make_strategy("none"), is_compiled)
        read = [of["ids"] for of in dataset]
        assert [ids.numpy().tolist() for ids in read] == [[0, 0], [1, 1], [2, 2]]
        return {ids.device.split(":", 1)[1][-5:] for ids in read}

    assert devices(True) == {"CPU:0"}
    monkeypatch.setattr(distribution, "is_accelerated", lambda strategy: True)
    monkeypatch.setattr(distribution, "GPU", "/CPU:1")
    assert devices(True) == {"CPU:1"} and devices(False) == {"CPU:0"}


def test_deterministic_operations_are_switched_on_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    assert not is_op_determinism_enabled()
    try:
        compilation.make_deterministic()
        compilation.make_deterministic()
        assert is_op_determinism_enabled()
        assert os.environ["XLA_FLAGS"].split() == [
            "--xla_gpu_deterministic_ops=true",
            "--xla_gpu_autotune_level=0",
            "--xla_gpu_autotune_level=2",  # The user's own prevails.
        ]
    finally:
        disable_op_determinism()


@pytest.mark.slow
def test_equal_deterministic_runs_have_equal_bits(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    make_config(tmp_path)
    directories = {"shards": data.manifest.directory, "config": tmp_path / "config.json"}
    try:
        runs = [
            recipe.pretrain(
                settings_of(directories, tmp_path / name, deterministic=True, compile="step")
            )
            for name in ("one", "two")
        ]
        assert is_op_determinism_enabled() and "deterministic_ops" in os.environ["XLA_FLAGS"]
    finally:
        disable_op_determinism()
    assert_same_bits(*map(weights_of, runs))
    assert read_json_object(runs[0].file("train.json"))["settings"]["deterministic"] is True
