"""Layer-wise learning rates and frozen layers."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, Encoder, WarmupLinearDecay
from bert_tf.runs.checkpoints import assign, model_variables
from bert_tf.train.distribution import make_strategy
from bert_tf.train.losses import WeightedMean
from bert_tf.train.optimizer import Lamb
from bert_tf.train.step import TrainStep
from tasks.types.classification.text_classifier import ClassificationTask
from tests import reference, small

# Exponents by hand for three layers: 3 - i for layer i, 4 for the embeddings, 0 for the rest.
EXPONENTS = {
    "bert/embeddings/word_embeddings": 4,
    "bert/embeddings/LayerNorm/gamma": 4,
    "bert/layer_0/attention/query/kernel": 3,
    "bert/layer_1/output/bias": 2,
    "bert/layer_2/intermediate/kernel": 1,
    "bert/pooler/kernel": 0,
    "classifier/kernel": 0,
}
OPTIMIZERS = pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])


def variables_of(paths, rng):
    """Return {path: Keras variable with that path}."""
    variables = {}
    for path in paths:
        *scopes, name = path.split("/")
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            variables[path] = keras.Variable(rng.normal(size=(3, 4)).astype(np.float32), name=name)
        assert variables[path].path == path
    return variables


def steps_of(optimizer, num_steps=12, seed=0):
    """Return the weights before, the gradients of each step, and the weights after."""
    rng = np.random.default_rng(seed)
    variables = variables_of(EXPONENTS, rng)
    before = {path: variable.numpy() for path, variable in variables.items()}
    gradients = [
        {path: rng.normal(size=(3, 4)).astype(np.float32) for path in variables}
        for _ in range(num_steps)
    ]
    for grads in gradients:
        optimizer.apply([tf.constant(grad) for grad in grads.values()], list(variables.values()))
    return before, gradients, {path: variable.numpy() for path, variable in variables.items()}


@OPTIMIZERS
def test_layer_decay_equals_numpy(optimizer_class):
    rates = [0.1 * (step / 4 if step < 4 else 1 - step / 12) for step in range(12)]
    optimizer = optimizer_class(WarmupLinearDecay(0.1, 12, 4), layer_decay=0.5)
    before, gradients, after = steps_of(optimizer)
    expected = reference.adamw(
        before,
        gradients,
        rates,
        decayed={path for path in EXPONENTS if path.split("/")[-1] not in ("gamma", "bias")},
        bias_correction=True,
        lamb=optimizer_class is Lamb,
        factors={path: 0.5**exponent for path, exponent in EXPONENTS.items()},
    )
    for path, array in after.items():
        np.testing.assert_allclose(array, expected[path], rtol=0, atol=1e-5, err_msg=path)


@OPTIMIZERS
def test_a_layer_decay_of_1_is_bitwise_neutral_and_kept_in_the_config(optimizer_class):
    halves = optimizer_class(0.1, layer_decay=0.5)
    plain, ones, half, again = (
        steps_of(optimizer)[2]
        for optimizer in (
            optimizer_class(0.1),
            optimizer_class(0.1, layer_decay=1.0),
            halves,
            optimizer_class.from_config(halves.get_config()),
        )
    )
    for path, exponent in EXPONENTS.items():
        np.testing.assert_array_equal(plain[path], ones[path])
        np.testing.assert_array_equal(half[path], again[path])
        assert np.array_equal(half[path], plain[path]) == (exponent == 0)


def test_every_variable_of_a_model_has_the_rate_of_its_layer(config):
    step = make_step(config)
    assert len(step.model.encoder.transformer) == 2
    for name, variable in model_variables(step.model).items():
        if variable.trainable:
            position = name.split("/")[1]
            expected = {"embeddings": 3, "layer_0": 2, "layer_1": 1}.get(position, 0)
            assert step.optimizer._exponents[id(variable)] == expected, name


def make_step(config, num_frozen=None, **options):
    keras.utils.set_random_seed(0)
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=8)
    model = task.build_model(config)
    if num_frozen is not None:
        model.encoder.freeze(num_frozen)
    optimizer = AdamW(1e-2, **options)
    optimizer.build(model.trainable_variables)
    return TrainStep(model, task.losses, optimizer, make_strategy("none"), seed=0)


def weights_of(step):
    return {name: variable.numpy() for name, variable in model_variables(step.model).items()}


@pytest.mark.medium
@pytest.mark.parametrize("num_frozen", [0, 1, 2])
def test_only_frozen_variables_stay_constant_and_checkpoints_record_it(config, num_frozen):
    """Check that decay skips frozen variables and that only trainable ones have slots."""
    step = make_step(config, num_frozen, weight_decay_rate=0.1)
    names = {variable.path: name for name, variable in model_variables(step.model).items()}
    before, iterator = weights_of(step), iter(small.batches(vocab_size=config.vocab_size))
    for _ in range(3):
        step(iterator)
    after = weights_of(step)
    frozen = ("bert/embeddings/", "bert/layer_0/", "bert/layer_1/")[: 1 + num_frozen]
    learned = {name for name in before if not name.startswith(frozen) and "seed" not in name}
    assert {name for name in after if not np.array_equal(after[name], before[name])} == learned
    slots = {f"{name}/{slot}" for name in learned for slot in ("adam_m", "adam_v")}
    assert set(step.optimizer.state(names)) == slots | {"step"}
    assert set(after) == set(weights_of(make_step(config)))


def gradients_of(config, inputs_BL, num_frozen, recompute=False):
    """Return {name: gradient} and the number of matrix products of dense layers it depends on."""
    encoder = Encoder(config, recompute=recompute)
    encoder.build()
    variables, weights = model_variables(encoder), small.random_weights(config)
    assign({name: variables[name] for name in weights}, weights, "test")
    if num_frozen is not None:
        encoder.freeze(num_frozen)

    @tf.function(autograph=False)
    def gradients(inputs):
        with tf.GradientTape() as tape:
            outputs = encoder(inputs, training=True, seed=(1, 2))
            loss = tf.reduce_sum(outputs["pooled"] ** 2)
        expected = {name: one.value for name, one in variables.items() if one.trainable}
        found = tape.gradient(loss, expected)
        return {name: tf.convert_to_tensor(gradient) for name, gradient in found.items()}

    function = gradients.get_concrete_function(inputs_BL)
    needed, waiting = set(), [output.op for output in function.outputs]
    while waiting:  # TensorFlow removes the others before it runs the function.
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [*operation.control_inputs, *(of.op for of in operation.inputs)]
    types = [operation.type for operation in needed]
    return gradients(inputs_BL), types.count("MatMul")


@pytest.mark.slow
def test_no_gradient_is_computed_through_frozen_layers(config, inputs_BL):
    """Count products: two layers have 6 each, the pooler 1, and the backward pass two per product.

    The embeddings of segments are one product, whose backward pass is another one. The products
    for the inputs of query, key and value are omitted in the lowest trainable layer, that of the
    pooler if no layer is trainable.
    """
    complete, count = gradients_of(config, inputs_BL, None)
    assert count == 1 + 13 + 2 * 13 + 1
    for num_frozen, backwards in enumerate((2 * 13 - 3, 2 * 7 - 3, 1)):
        part, count = gradients_of(config, inputs_BL, num_frozen)
        assert count == 1 + 13 + backwards
        recomputed, _ = gradients_of(config, inputs_BL, num_frozen, recompute=True)
        assert set(part) == set(recomputed) < set(complete)
        for name, gradient in part.items():  # Dropout in the lower layers is unchanged.
            np.testing.assert_allclose(gradient, complete[name], rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(
                recomputed[name], complete[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.medium
def test_frozen_layers_stay_constant_under_fit(config):
    step = make_step(config, 1)
    losses = {name: WeightedMean(loss) for name, loss in step.losses.items()}
    step.model.compile(optimizer=step.optimizer, loss=losses)
    before = weights_of(step)
    dataset = small.batches(vocab_size=config.vocab_size).take(2)
    step.model.fit(dataset, epochs=1, verbose=0)
    for name, array in weights_of(step).items():
        stays = name.startswith(("bert/embeddings/", "bert/layer_0/"))
        assert np.array_equal(array, before[name]) == stays, name


def test_fewer_frozen_layers_are_trained_again(config):
    encoder = Encoder(config)
    encoder.build()
    for num_layers, expected in ((2, [False, False]), (1, [False, True]), (0, [True, True])):
        encoder.freeze(num_layers)
        assert [bool(layer.trainable_variables) for layer in encoder.transformer] == expected
    assert not encoder.embeddings.trainable_variables
    encoder.trainable = False  # As that of an autoencoder.
    encoder.freeze(1)
    assert not any(variable.trainable for variable in encoder.weights)


def test_freezing_more_layers_than_there_are_is_rejected(config):
    for num_layers in (3, -1):
        with pytest.raises(ValueError, match=f"^num_layers={num_layers}: expected 0 to 2"):
            Encoder(config).freeze(num_layers)
