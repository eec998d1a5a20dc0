"""What fine-tuning on a TPU would be given: batches of one shape, and the step as one program."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, Tokenizer
from bert_tf.text.packing import padded
from bert_tf.train.step import TrainStep
from tasks.classification import Classification
from tasks.evaluation import Evaluator
from tasks.examples import EncodedExamples, Examples
from tasks.pipeline import Pipeline
from tests import small

TEXTS = [text for texts in small.TEXTS.values() for text in texts] + ["the"]
LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]
ARGUMENTS = {"global_batch_size": 4, "num_epochs": 2, "seed": 5}


@pytest.fixture
def pipeline(config, vocabulary):
    # XLA draws other noise.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    task = Classification(labels=("billing", "hardware", "software"), max_seq_length=12)
    keras.utils.set_random_seed(3)
    model = task.build_model(dataclasses.replace(config, **still))
    return Pipeline(task, Tokenizer(vocabulary, True), model)


def encoded(pipeline, one_shape):
    examples = Examples({"text": TEXTS}, LABELS)
    return EncodedExamples.encode(examples, pipeline, padded, one_shape)


def shapes(batch):
    return [tuple(tensor.shape) for tensor in tf.nest.flatten(batch)]


def test_all_batches_have_one_shape_and_what_fills_them_up_has_no_weight(pipeline):
    data = encoded(pipeline, one_shape=True)
    batches = data.training_batches(**ARGUMENTS)
    assert all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(batches.element_spec))
    assert [shapes(batch) for batch in batches] == [[(4, 12)] * 3 + [(4,)] * 2] * 6
    usual = encoded(pipeline, one_shape=False).training_batches(**ARGUMENTS)
    for mine, theirs in zip(batches, usual, strict=True):
        count, length = theirs[0]["input_ids"].shape
        for name, values in theirs[0].items():
            np.testing.assert_array_equal(mine[0][name][:count, :length], values)
        assert not mine[0]["input_mask"][:count, length:].numpy().any()
        np.testing.assert_array_equal(mine[1]["label"][:count], theirs[1]["label"])
        assert mine[2]["label"].numpy().tolist() == [1.0] * count + [0.0] * (4 - count)
    evaluation = data.evaluation_batches(np.arange(10), 4)
    assert [is_unit.numpy().tolist() for _, is_unit in evaluation] == [
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]


def test_a_replica_that_has_nothing_left_gets_a_whole_batch_of_no_weight(pipeline):
    data = encoded(pipeline, one_shape=True)
    batches = list(data.training_batches(**ARGUMENTS, num_replicas=2))
    assert [shapes(batch) for batch in batches] == [[(2, 12)] * 3 + [(2,)] * 2] * 12
    weights = [batch[2]["label"].numpy().tolist() for batch in batches[:6]]
    assert weights == [[1.0, 1.0]] * 5 + [[0.0, 0.0]]


def test_evaluated_in_one_shape_the_outputs_are_the_same(pipeline):
    outputs = [
        Evaluator(pipeline.task, pipeline.model, tf.distribute.get_strategy(), 4).outputs(
            encoded(pipeline, one_shape)
        )["label"]
        for one_shape in (True, False)
    ]
    assert outputs[0].shape == (10, 3)
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_the_step_compiles_once_and_trains_as_without(pipeline):
    start = [variable.numpy() for variable in pipeline.model.variables]
    results, traces = [], []

    def step_of(one_shape):
        for variable, value in zip(pipeline.model.variables, start, strict=True):
            variable.assign(value)
        optimizer = AdamW(1e-3)
        optimizer.build(pipeline.model.trainable_variables)
        step = TrainStep(
            pipeline.model, pipeline.task.losses, optimizer, tf.distribute.get_strategy(), 0
        )

        def run(batch):
            traces.append(one_shape)
            return step._on_replica(batch, tf.constant(0))

        return tf.function(run, jit_compile=True, autograph=False) if one_shape else run

    for one_shape in (True, False):
        step = step_of(one_shape)
        batches = encoded(pipeline, one_shape).training_batches(**ARGUMENTS)
        logs = [step(batch)[0] for batch in batches]
        weights = [variable.numpy() for variable in pipeline.model.trainable_variables]
        counts = [int(log["examples"]) for log in logs]
        results.append(([float(log["loss"]) for log in logs], counts, weights))
    assert traces.count(True) == 1
    assert results[0][1] == results[1][1] == [4, 4, 2] * 2
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4)
    for mine, theirs in zip(results[0][2], results[1][2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)
