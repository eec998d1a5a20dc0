"""A loss over all rows of a global batch: one batch, parts of it, and replicas train equally."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.train.losses import BatchLoss
from bert_tf.train.optimizer import AdamW
from bert_tf.train.step import TrainStep
from tests.gpu_kernels import operations

ROWS, SIZE = 8, 4


class Embedder(keras.Model):
    """Two vectors per row, with dropout from the seed of the step."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3, name="layer")
        self.layer.build((None, SIZE))
        self.built = True

    def call(self, inputs, training=False, seed=None):
        return {"vector": self.layer(inputs["x"])}


def contrastive(labels, vectors, weights):
    """Return the cross-entropy of each row's second vector among those of all rows."""
    scores = tf.matmul(vectors[:, 0], vectors[:, 1], transpose_b=True)
    scores = tf.where(weights[tf.newaxis] > 0, scores, -1e9)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)


def rows(weights):
    rng = np.random.default_rng(0)
    mask = np.tri(ROWS, dtype=np.int32)  # As many tokens as the number of the row, from 1.
    inputs = {"x": rng.normal(size=(ROWS, 2, SIZE)).astype(np.float32)}
    inputs |= {"input_ids": mask, "input_mask": mask}
    return inputs, {"vector": np.arange(ROWS, dtype=np.int32)}, {"vector": np.float32(weights)}


OF_ALL_ROWS = BatchLoss(contrastive)


def make_step(strategy, accumulation_steps=1, is_compiled=False, loss=OF_ALL_ROWS):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Embedder()
        optimizer = AdamW(0.1)
        optimizer.build(model.trainable_variables)
    return TrainStep(
        *(model, {"vector": loss}, optimizer, strategy, 0),
        accumulation_steps=accumulation_steps,
        is_compiled=is_compiled,
    )


def trained(strategy, batches, *arguments):
    """Return losses, weights, and numbers of examples and tokens of three updates."""
    step = make_step(strategy, *arguments)
    if strategy.num_replicas_in_sync > 1:
        batches = strategy.experimental_distribute_dataset(batches)
    iterator = iter(batches)
    logs = [step(iterator) for _ in range(3)]
    values = [variable.numpy() for variable in step.model.trainable_variables]
    counts = [(int(log["examples"]), int(log["tokens"])) for log in logs]
    return [float(log["loss"]) for log in logs], values, counts


EQUAL_WEIGHTS = pytest.param([1] * ROWS, marks=pytest.mark.medium)


@pytest.fixture(scope="module", params=[[1, 2, 0, 1, 1, 0, 3, 1], EQUAL_WEIGHTS])
def whole(request):
    data = tf.data.Dataset.from_tensors(rows(request.param)).repeat()
    return request.param, trained(tf.distribute.get_strategy(), data)


def equal(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for value, expected in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert one[2] == other[2]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_parts_of_a_batch_train_like_the_whole_batch(whole, is_compiled):
    weights, expected = whole
    data = tf.data.Dataset.from_tensor_slices(rows(weights)).repeat()
    data = data.batch(2, drop_remainder=True).batch(4, drop_remainder=True)
    equal(trained(tf.distribute.get_strategy(), data, 4, is_compiled), expected)


def test_parts_of_different_sizes_train_like_the_whole_batch(whole):
    weights, expected = whole
    parts = [slice(0, 3), slice(3, 6), slice(6, 8)]
    elements = [
        tf.nest.map_structure(lambda x, part=part: x[part], rows(weights)) for part in parts
    ]
    signature = tf.nest.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), elements[0]
    )
    data = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=signature)
    equal(trained(tf.distribute.get_strategy(), data.repeat().ragged_batch(3), 3), expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_replicas_train_like_one(whole, mirrored, parts):
    weights, expected = whole
    data = tf.data.Dataset.from_tensor_slices(rows(weights)).repeat()
    if parts == 1:
        equal(trained(mirrored, data.batch(ROWS, drop_remainder=True)), expected)
        return
    # The parts of a replica follow each other; the loss does not depend on the order of the rows.
    data = data.batch(2, drop_remainder=True).batch(4, drop_remainder=True)
    equal(trained(mirrored, data, parts), expected)


@pytest.mark.parametrize(
    ("loss", "num_loops"),
    [(OF_ALL_ROWS, 2), (lambda labels, vectors: vectors[:, 0, 0], 1)],
    ids=["of all rows", "per row"],
)
def test_one_part_of_a_batch_is_in_memory_at_a_time(loss, num_loops):
    step = make_step(tf.distribute.get_strategy(), 4, loss=loss)
    data = tf.data.Dataset.from_tensor_slices(rows([1] * ROWS)).batch(2).batch(4)
    graph = step.__call__.get_concrete_function(iter(data)).graph
    loops = [of for of, _ in operations(graph) if of.type in ("While", "StatelessWhile")]
    assert [of.get_attr("parallel_iterations") for of in loops] == [1] * num_loops
