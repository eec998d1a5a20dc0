"""The fused update of AdamW against its plain formulation in numpy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.model.fused_kernels import MIN_WIDTH, compile_kernels
from bert_tf.train.optimizer import AdamW, Lamb, update_in_place


@pytest.mark.parametrize("width", [3, MIN_WIDTH + 1])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adamw_by_numpy(decay, width):
    rng = np.random.default_rng(0)
    weights, m, gradient = (rng.normal(size=[7, width]).astype(np.float32) for _ in range(3))
    v = np.square(rng.normal(size=[7, width])).astype(np.float32)
    variables = [tf.Variable(value) for value in (weights, m, v)]
    update_in_place(
        AdamW._rule,
        [variable.handle for variable in variables],
        [7, width],
        tf.constant(gradient),
        tf.constant([0.5, 0.02, 0.3, 0.2]),
        beta_1=0.9,
        beta_2=0.99,
        epsilon=1e-3,
        decay=decay,
    )
    m = 0.9 * m + 0.1 * (0.5 * gradient)
    v = 0.99 * v + 0.01 * (0.5 * gradient) ** 2
    weights = weights - 0.02 * (m / 0.3 / (np.sqrt(v / 0.2) + 1e-3) + decay * weights)
    for variable, expected in zip(variables, (weights, m, v), strict=True):
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_update_is_compiled_with_the_kernels(is_compiled):
    variables = [tf.Variable(tf.ones([MIN_WIDTH])) for _ in range(3)]

    @tf.function
    def update():
        update_in_place(
            AdamW._rule,
            [variable.handle for variable in variables],
            [MIN_WIDTH],
            tf.ones([MIN_WIDTH]),
            tf.ones([4]),
            beta_1=0.9,
            beta_2=0.9,
            epsilon=1e-6,
            decay=0.0,
        )

    compile_kernels(is_compiled)
    try:
        nodes = update.get_concrete_function().graph.as_graph_def().node
    finally:
        compile_kernels(True)
    assert any(node.attr["_XlaMustCompile"].b for node in nodes) == is_compiled


@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
def test_a_scalar_is_updated(optimizer_class):
    """Use a weight such as the temperature of a head of one's own."""
    temperature = keras.Variable(2.0, dtype="float32", name="bias")
    optimizer_class(0.1).apply([tf.constant(1.0)], [temperature])
    assert temperature.numpy() == pytest.approx(1.9, abs=1e-5)


@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
def test_a_checkpoint_of_tensorflow_holds_the_moments(optimizer_class, tmp_path):
    """As loops of the user save them."""
    variable = keras.Variable([2.0, 3.0], name="kernel")
    saved, restored = (optimizer_class(0.1) for _ in range(2))
    saved.apply([tf.constant([1.0, -1.0])], [variable])
    path = tf.train.Checkpoint(optimizer=saved).save(str(tmp_path / "checkpoint"))
    restored.build([variable])
    tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
    for first, second in zip(saved.variables, restored.variables, strict=True):
        np.testing.assert_array_equal(first, second)
    assert int(restored.iterations.numpy()) == 1


def test_a_loss_without_a_variable_is_named():
    """In a loop of the user, whose tape may have seen another model."""
    variable = keras.Variable(2.0)
    with pytest.raises(ValueError, match="no variable has a gradient"):
        AdamW(0.5).apply_gradients([(None, variable)])


def test_reads_before_an_update_keep_their_value():
    """Check a value read earlier, because the kernel updates the variable in place."""
    variables = [tf.Variable(tf.ones([512, 64])) for _ in range(3)]

    @tf.function
    def step():
        before = variables[0].read_value()
        with tf.control_dependencies([before]):
            update_in_place(
                AdamW._rule,
                [variable.handle for variable in variables],
                [512, 64],
                tf.ones([512, 64]),
                tf.constant([1.0, 0.1, 1.0, 1.0]),
                beta_1=0.9,
                beta_2=0.99,
                epsilon=1e-6,
                decay=0.0,
            )
        return before

    before = step()
    np.testing.assert_array_equal(before, np.ones([512, 64]))
    assert np.all(variables[0].numpy() < 0.95)


# As Keras calls it, and as a compiled step does.
STEPS = [{}, {"is_running": tf.constant(True)}]


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
def test_excluded_variables_do_not_decay(optimizer_class, options):
    """With gradients of 0, only the decay changes a variable."""
    kernel, embeddings = (keras.Variable([2.0, 3.0], name=name) for name in ("kernel", "table"))
    optimizer = optimizer_class(0.1, weight_decay_rate=0.5)
    optimizer.exclude_from_weight_decay(var_names=["tab"])
    optimizer.apply([tf.zeros(2)] * 2, [kernel, embeddings], **options)
    np.testing.assert_array_equal(embeddings, [2.0, 3.0])
    assert (kernel.numpy() < [2.0, 3.0]).all()


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
def test_constraints_hold_after_an_update(optimizer_class, options):
    free, constrained = (keras.Variable([2.0, 3.0], name="kernel") for _ in range(2))
    constrained.constraint = keras.constraints.NonNeg()
    gradients, optimizer = [tf.constant([1.0, -1.0])] * 2, optimizer_class(10.0)
    optimizer.build([free, constrained])
    apply = functools.partial(optimizer.apply, gradients, [free, constrained], **options)
    tf.function(apply, autograph=False)()
    assert free.numpy()[0] < 0 < free.numpy()[1]
    np.testing.assert_array_equal(constrained, tf.nn.relu(free))
