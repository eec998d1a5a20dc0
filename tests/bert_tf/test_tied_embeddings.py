"""The gradient of a table that is looked up in and multiplied with."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model.dense import tied_embeddings
from bert_tf.pretraining.model import PretrainingModel
from tests.bert_tf.test_training import tiny_config

SEED = tf.constant([7, 5], tf.int64)
SIZE, WIDTH = 6, 4
IDS = [1, 5, 1, 1, 0]  # 2, 3 and 4 are not looked up, 1 is three times.
MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "XLA": functools.partial(tf.function, jit_compile=True),
}


def integers(shape, seed):
    """Return small integers, whose products and sums are exact in bfloat16."""
    return tf.constant(np.random.default_rng(seed).integers(-2, 3, shape), tf.float32)


TABLE = integers([SIZE, WIDTH], 0)
HIDDEN = integers([3, WIDTH], 1)
OF_LOOKUP, OF_PRODUCT = integers([len(IDS), WIDTH], 2), integers([3, SIZE], 3)


def gradients(uses, dtype, seed=SEED):
    """Return the gradients of the table and of the other factor of its product.

    The loss is linear in the vectors that are looked up and in the product, as far as `uses` names
    them.
    """
    hidden = tf.cast(HIDDEN, dtype)
    with tf.GradientTape() as tape:
        tape.watch([TABLE, hidden])
        look_up, project = tied_embeddings(TABLE, dtype, seed)
        loss = 0.0
        if "lookup" in uses:
            loss += tf.reduce_sum(look_up(tf.constant(IDS)) * OF_LOOKUP)
        if "product" in uses:
            loss += tf.reduce_sum(tf.cast(project(hidden), tf.float32) * OF_PRODUCT)
    zero = tf.UnconnectedGradients.ZERO
    of_table, of_hidden = tape.gradient(loss, [TABLE, hidden], unconnected_gradients=zero)
    return tf.convert_to_tensor(of_table), of_hidden


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("uses", [("lookup", "product"), ("lookup",), ("product",)])
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_sum_over_both_uses(mode, uses, dtype):
    expected = np.zeros([SIZE, WIDTH])
    if "lookup" in uses:
        for row, number in enumerate(IDS):
            expected[number] += OF_LOOKUP[row]
    if "product" in uses:
        expected += OF_PRODUCT.numpy().T @ HIDDEN.numpy()
    of_hidden = OF_PRODUCT.numpy() @ TABLE.numpy() * ("product" in uses)
    for seed in (SEED, None):
        found = MODES[mode](lambda seed=seed: gradients(uses, dtype, seed))()
        assert found[0].dtype == tf.float32 and found[1].dtype == dtype
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(tf.cast(found[1], tf.float32), of_hidden)


def test_a_second_product_is_an_error():
    _, project = tied_embeddings(TABLE, "float32", SEED)
    project(HIDDEN)
    with pytest.raises(ValueError, match="called again; expected one call"):
        project(HIDDEN)


def gradient_of_table(uses):
    @tf.function
    def of_table(table, hidden):
        with tf.GradientTape() as tape:
            tape.watch(table)
            look_up, project = tied_embeddings(table, "float32", SEED)
            loss = tf.reduce_sum(project(hidden))
            if "lookup" in uses:
                loss += tf.reduce_sum(look_up(tf.range(4)))
        return tape.gradient(loss, table)

    return of_table


def peak_memory(function, *args):
    """Return what `function` returns and the largest memory that it took, in bytes."""
    function(*args)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    result = function(*args)  # Kept until the peak is read.
    return result, tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def test_the_gradient_waits_for_the_one_of_the_lookup():
    table, hidden = tf.ones([100, 32]), tf.ones([4, 32])
    of_table = gradient_of_table({"lookup", "product"})
    np.testing.assert_array_equal(of_table(table, hidden)[:, 0], 4.0 + (np.arange(100) < 4))
    (product,) = (
        operation
        for operation in of_table.get_concrete_function(table, hidden).graph.get_operations()
        if operation.type == "MatMul" and operation.get_attr("transpose_a")
    )
    assert product.control_inputs, "the product may be computed before the lookup's gradient"


def test_the_gradient_takes_the_memory_of_one_table():
    table, hidden = tf.ones([500_000, 32]), tf.ones([4, 32])
    try:
        # What a product takes beside its result differs from processor to processor.
        _, of_product = peak_memory(gradient_of_table({"product"}), table, hidden)
    except ValueError:
        pytest.skip("TensorFlow counts the memory of a CPU with oneDNN only")
    gradient, of_both = peak_memory(gradient_of_table({"lookup", "product"}), table, hidden)
    of_one_table = table.shape.num_elements() * 4
    assert of_one_table <= of_both < of_product + 0.5 * of_one_table
    np.testing.assert_array_equal(gradient[:, 0], 4.0 + (np.arange(500_000) < 4))


def test_pretraining_has_one_gradient_of_the_table():
    model = PretrainingModel(tiny_config())
    variable = model.encoder.embeddings.word_embeddings_VH
    inputs = {"input_ids": [[1, 2, 3]], "masked_lm_positions": [[1]]}
    inputs = {name: tf.constant(values) for name, values in inputs.items()}

    @tf.function
    def of_table():
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True, seed=SEED)
            loss = tf.add_n([tf.reduce_sum(output) for output in outputs.values()])
        return tape.gradient(loss, variable.value)

    operations = of_table.get_concrete_function().graph.get_operations()
    large = {op.type for op in operations if op.outputs and op.outputs[0].shape == variable.shape}
    assert "ScatterNdNonAliasingAdd" in large
    assert not large & {"AddN", "AddV2", "UnsortedSegmentSum"}
