"""The train step as one XLA program of static shapes, as a TPU requires."""

import dataclasses
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, Vocabulary
from bert_tf.config import MODEL_SIZES
from bert_tf.data.batches import PretrainingDataset, pad_examples
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.train.distribution import make_strategy
from bert_tf.train.optimizer import AdamW
from bert_tf.train.step import TrainStep
from tests.corpus import config_of, write_shards

# Operations whose output shape depends on values.
DYNAMIC = {"Where", "Unique", "UniqueV2", "UniqueWithCountsV2", "ListDiff", "DynamicPartition"}
PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def train_step(config, is_compiled=True):
    model = PretrainingModel(config)
    optimizer = AdamW(1e-3)
    optimizer.build(model.trainable_variables)
    strategy = tf.distribute.get_strategy()
    return TrainStep(model, LOSSES, optimizer, strategy, 1, METRICS, is_compiled=is_compiled)


def compiled(step):
    """Return the compiled step of a replica; on a TPU, `next` stays on the host."""
    return tf.function(
        lambda batch: step._on_replica(batch, tf.constant(True)), jit_compile=True, autograph=False
    )


def all_operations(graph):
    """Return the operations of a graph and of all functions in its library."""
    operations = list(graph.get_operations())
    for function in graph._functions.values() if hasattr(graph, "_functions") else ():
        operations += all_operations(function.graph)
    return operations


def specs(data, batch_size):
    batches = data.training_batches(data.position(1, 0), batch_size, pad_examples)
    return batches.map(to_batch).element_spec


@pytest.mark.slow
def test_the_pretraining_step_of_bert_base_is_one_program_of_static_shapes(tmp_path):
    shards = write_shards(tmp_path / "shards", max_seq_length=512, max_predictions_per_seq=77)
    vocabulary = Vocabulary.load(shards / "vocab.txt")
    small = dataclasses.replace(MODEL_SIZES["base"], vocab_size=len(vocabulary), do_lower_case=True)
    batch = specs(PretrainingDataset(shards, vocabulary, small), 32)
    assert batch[0]["input_ids"].shape == (32, 512)
    assert all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(batch))

    step = train_step(MODEL_SIZES["base"])
    function = compiled(step)
    operations = all_operations(function.get_concrete_function(batch).graph)
    for operation in operations:
        assert operation.type not in DYNAMIC | PYTHON, operation
        assert tf.string not in [tensor.dtype for tensor in operation.outputs], operation
    zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), batch)
    program = function.experimental_get_compiler_ir(zeros)(stage="hlo")
    assert program.startswith("HloModule") and "custom-call" not in program
    assert program.count(" dot(") > 3 * 6 * 12  # Dense layers, forward and backward.
    # Such a size has only an upper bound.
    assert re.search(r"\[<=\d|set-dimension-size", program) is None


def state(step):
    variables = (*step.model.variables, *step.optimizer.variables)
    return {variable.path: variable.numpy() for variable in variables}


@pytest.mark.slow
def test_the_compiled_step_equals_the_uncompiled_one_and_skips_updates_that_are_not_finite(
    tmp_path,
):
    """Check the norm of the gradient as well, because XLA drops check_numerics."""
    shards = write_shards(tmp_path / "shards")
    vocabulary = Vocabulary.load(shards / "vocab.txt")
    # XLA draws other dropout noise.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = config_of(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **still)
    data = PretrainingDataset(shards, vocabulary, config)
    batches = data.training_batches(data.position(1, 0), 8, pad_examples)
    batch = next(iter(batches.map(to_batch)))
    results = []
    for wrap in (compiled, lambda step: lambda batch: step._on_replica(batch, tf.constant(True))):
        keras.utils.set_random_seed(1)
        step = train_step(config, wrap is compiled)
        run = wrap(step)
        floats, _, norm = run(batch)
        # Adam's first update depends only on the gradients' signs, which are noise near 0.
        moments = {name: value for name, value in state(step).items() if "adam" in name}
        results.append([floats[0], norm, *moments.values()])
        if wrap is compiled:
            before = state(step)
            inputs, labels, weights = batch
            bad = {**weights, "next_sentence": weights["next_sentence"] * math.inf}
            *_, norm = run((inputs, labels, bad))
            assert not math.isfinite(norm)
            for name, value in state(step).items():
                np.testing.assert_array_equal(value, before[name], err_msg=name)
    for xla, plain in zip(*results, strict=True):
        np.testing.assert_allclose(xla, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.slow  # TensorFlow asks the network for a TPU if the machine has none.
def test_a_missing_tpu_is_reported():
    with pytest.raises(UserError, match="--strategy=tpu --tpu=local: no TPU found"):
        make_strategy("tpu")
