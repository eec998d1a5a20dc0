"""Training on a real GPU: equality with the CPU, memory, precision.

BERT_TF_TEST_GPU=1 python -m pytest -m gpu tests/gpu
"""

import dataclasses
import os

import pytest
import tensorflow as tf

from bert_tf.model import fused_attention
from bert_tf.train.compilation import is_accelerated
from bert_tf.train.distribution import (
    distribute,
    make_strategy,
    resolve_precision,
    use_precision,
)
from tests.bert_tf.test_packed import STILL, assert_equal_training, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "BERT_TF_TEST_GPU" not in os.environ, reason="BERT_TF_TEST_GPU is not set: no GPU"
    ),
]


@pytest.mark.parametrize("is_compiled", [True, False], ids=["step", "kernels"])
def test_training_equals_the_cpu(config, is_compiled):
    use_precision("float32")
    config = dataclasses.replace(config, **STILL)
    with tf.device("CPU:0"):
        expected = train(config, make_strategy("none"), False)
    with tf.device("GPU:0"):
        assert_equal_training(config, train(config, make_strategy("none"), is_compiled), expected)


def test_a_gpu_is_chosen_and_its_memory_grows(config):
    strategy = make_strategy("none")
    assert is_accelerated(strategy)
    assert resolve_precision("auto", strategy) in ("bfloat16", "float16")
    tf.random.normal([1024, 1024])
    assert tf.config.experimental.get_memory_info("GPU:0")["peak"] < 2**30
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_attention_by_cudnn_is_that_of_the_formula(dtype):
    assert fused_attention.is_available(tf.TensorShape([2, 128, 2, 64]), dtype)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_training_in_half_precision_is_close(config, precision):
    from bert_tf import AdamW

    strategy = make_strategy("none")
    optimizer = AdamW(1e-3, scales_loss=precision == "mixed_float16")
    config = dataclasses.replace(config, **STILL)
    logs, _ = train(config, strategy, True, optimizer=optimizer, dtype=precision)
    expected, _ = train(config, strategy, True)
    assert logs[0]["loss"] == pytest.approx(expected[0]["loss"], rel=2e-2)


def test_batches_of_a_compiled_step_are_on_the_gpu(config):
    batches = tf.data.Dataset.range(3).map(
        lambda number: {"ids": tf.fill([2], tf.cast(number, "int32"))}
    )
    read = [of["ids"] for of in distribute(lambda local: batches, make_strategy("none"), True)]
    assert [ids.numpy().tolist() for ids in read] == [[0, 0], [1, 1], [2, 2]]
    assert {ids.device[-5:] for ids in read} == {"GPU:0"}
