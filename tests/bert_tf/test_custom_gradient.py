"""Custom gradients: right wherever they are traced, and freed with their graph."""

import gc
import weakref

import pytest
import tensorflow as tf

from bert_tf.model.custom_gradient import custom_gradient, own_gradients, recompute_grad

X = 1.5


def cubed(x):
    """Return x^3 whose gradient is made ten times as large, to tell it from TensorFlow's own."""
    square = x * x  # Captured, as intermediate values of the forward pass are.
    return custom_gradient(lambda x: (x * square, lambda upstream: 30 * upstream * square))(x)


def with_while(x):
    return tf.while_loop(lambda n, x: n < 2, lambda n, x: (n + 1, cubed(x)), (0, x))[1]


FORMS = {
    "eager": (cubed, 1),
    "graph": (tf.function(cubed), 1),
    "compiled": (tf.function(cubed, jit_compile=True), 1),
    "nested": (tf.function(lambda x: tf.function(cubed)(x)), 1),
    "cond": (tf.function(lambda x: tf.cond(x > 0, lambda: cubed(x), lambda: x)), 1),
    "while": (tf.function(with_while), 2),
    "recomputed": (tf.function(lambda x: recompute_grad(cubed)(x)), 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_function(form):
    function, times = FORMS[form]

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        return tape.gradient(result, x)

    expected = 30 * X**2 if times == 1 else 30 * X**6 * 30 * X**2  # Of x^3, or of (x^3)^3.
    for of in (gradient, tf.function(gradient)):
        assert float(of(tf.constant(X))) == pytest.approx(expected, rel=1e-6)


def test_gradients_are_right_on_replicas(mirrored):
    @tf.function
    def step():
        def on_replica():
            x = tf.constant(X)
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = cubed(x)
            return tape.gradient(result, x)

        return mirrored.reduce(tf.distribute.ReduceOp.SUM, mirrored.run(on_replica), axis=None)

    assert float(step()) == pytest.approx(2 * 30 * X**2, rel=1e-6)


def test_a_saved_model_keeps_custom_gradients(tmp_path):
    module = tf.Module()
    module.cubed = tf.function(cubed, input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = loaded.cubed(x)
    assert float(tape.gradient(result, x)) == pytest.approx(30 * X**2, rel=1e-6)


def reduced(x):
    """Return the sum over replicas, for which TensorFlow has a custom gradient of its own."""
    replica = tf.distribute.get_replica_context()
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, x * 2.0)


@pytest.mark.parametrize("function", [cubed, with_while, reduced, recompute_grad(cubed)])
def test_a_graph_with_custom_gradients_and_its_variables_are_freed(function):
    alive = []

    def differentiate():
        variable = tf.Variable(X)

        @tf.function
        def gradient():
            with tf.GradientTape() as tape:
                result = function(variable * 1.0)
            gradient = tape.gradient(result, variable)
            own_gradients()
            return gradient

        gradient()
        graph = gradient.get_concrete_function().graph
        alive.extend([weakref.ref(graph), weakref.ref(variable)])

    differentiate()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
