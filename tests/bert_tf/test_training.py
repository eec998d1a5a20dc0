"""Losses, optimizers and train step against NumPy; one replica against two."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, BertConfig, WarmupLinearDecay
from bert_tf.runs.checkpoints import assign, model_variables
from bert_tf.train.distribution import distribute, make_strategy
from bert_tf.train.losses import (
    BatchLoss,
    WeightedMean,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
)
from bert_tf.train.optimizer import Lamb
from bert_tf.train.step import TrainStep, batch_counter, dropout_seed
from tasks.types.classification.text_classifier import ClassificationTask
from tests import reference, small

CLIP_NORM = 0.02  # Small enough to be exceeded at every step.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tiny_config(**changes):
    return BertConfig(
        **{
            "vocab_size": 30,
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 20,
            "max_position_embeddings": 16,
            **changes,
        }
    )


def make_step(config, strategy, optimizer=None, labels=("a", "b", "c"), seed=0, rate=1e-3):
    task = ClassificationTask(labels=labels, max_seq_length=8)
    with strategy.scope():
        model = task.build_model(config)
        optimizer = optimizer or AdamW(rate, clip_norm=CLIP_NORM)
        optimizer.build(model.trainable_variables)
    variables = model_variables(model)
    weights = small.random_weights(config)
    assign({name: variables[name] for name in weights}, weights, "test")
    rng = np.random.default_rng(1)
    for name in ("classifier/kernel", "classifier/bias"):
        variables[name].assign(rng.normal(0, 0.3, variables[name].shape))
    return TrainStep(model, task.losses, optimizer, strategy, seed)


def train(step, dataset, num_steps):
    iterator = iter(distribute(lambda local: dataset, step.strategy))
    logs = [
        {name: float(value) for name, value in step(iterator).items()} for _ in range(num_steps)
    ]
    return logs, {
        name: variable.numpy()
        for name, variable in model_variables(step.model).items()
        if "seed" not in name
    }


def assert_weights_equal(first, second, tolerance=1e-5):
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=tolerance, err_msg=name)


def test_learning_rate_at_the_corners_of_the_schedule():
    """Check steps 0, 1, W - 1, W, W + 1, N - 1, N, N + 1; the released schedule jumps at W."""
    schedule = WarmupLinearDecay(1.0, num_train_steps=100, warmup_steps=10)
    steps = [0, 1, 9, 10, 11, 99, 100, 101]
    np.testing.assert_allclose(
        [float(schedule(step)) for step in steps], [0, 0.1, 0.9, 0.9, 0.89, 0.01, 0, 0], atol=1e-7
    )
    assert float(WarmupLinearDecay(1.0, 100)(0)) == 1.0


def test_a_continuous_schedule_reaches_its_peak():
    schedule = WarmupLinearDecay(1.0, num_train_steps=100, warmup_steps=10, continuous=True)
    expected = {0: 0, 1: 0.1, 9: 0.9, 10: 1.0, 11: 89 / 90, 99: 1 / 90, 100: 0, 101: 0}
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-7), step
    assert WarmupLinearDecay(**schedule.get_config())(11) == schedule(11)


@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
@pytest.mark.parametrize(("bias_correction", "decay"), [(False, 0.01), (True, 0.01), (False, 0.0)])
def test_optimizers_equal_numpy_over_100_steps(optimizer_class, bias_correction, decay):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (5, 4), "bias": (4,), "gamma": (4,)}
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [
        {
            name: rng.normal(size=shape).astype(np.float32) * (0.05 if step % 2 else 3)
            for name, shape in shapes.items()
        }
        for step in range(100)
    ]
    variables = [keras.Variable(array, name=name) for name, array in start.items()]
    schedule = WarmupLinearDecay(1e-2, 100, 10)
    optimizer = optimizer_class(schedule, decay, bias_correction=bias_correction)
    for grads in gradients:
        norm = optimizer.apply([tf.constant(grads[name]) for name in shapes], variables)
    rates = [1e-2 * (step / 10 if step < 10 else 1 - step / 100) for step in range(100)]
    expected = reference.adamw(
        start,
        gradients,
        rates,
        decayed={"kernel"},
        bias_correction=bias_correction,
        decay=decay,
        lamb=optimizer_class is Lamb,
    )
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), expected[variable.name], rtol=0, atol=1e-5)
    assert math.isclose(
        float(norm),
        math.sqrt(sum((array**2).sum() for array in gradients[-1].values())),
        rel_tol=1e-5,
    )
    assert int(optimizer.iterations.numpy()) == 100


def test_exactly_these_variables_have_weight_decay():
    step = make_step(tiny_config(num_hidden_layers=1), make_strategy("none"))
    decayed = {
        name
        for name, variable in model_variables(step.model).items()
        if "seed" not in name and step.optimizer.decays(variable)
    }
    layer = "bert/layer_0/"
    assert decayed == {
        "bert/embeddings/word_embeddings",
        "bert/embeddings/position_embeddings",
        "bert/embeddings/token_type_embeddings",
        f"{layer}attention/query/kernel",
        f"{layer}attention/key/kernel",
        f"{layer}attention/value/kernel",
        f"{layer}attention/output/kernel",
        f"{layer}intermediate/kernel",
        f"{layer}output/kernel",
        "bert/pooler/kernel",
        "classifier/kernel",
    }


def test_sparse_gradients_are_clipped_by_their_true_norm():
    """Use two slices of one row: the norm of their sum is 2, not sqrt(2)."""
    table = keras.Variable(np.zeros((3, 1), np.float32), name="table")
    optimizer = AdamW(1e-3)
    norm = optimizer.apply(
        [tf.IndexedSlices(tf.ones((2, 1)), tf.constant([1, 1]), tf.constant([3, 1]))], [table]
    )
    assert float(norm) == 2.0


def test_a_gradient_that_is_not_finite_causes_no_update():
    variable = keras.Variable(np.ones(2, np.float32), name="kernel")
    optimizer = AdamW(1e-1)
    optimizer.build([variable])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        tf.function(lambda grad: optimizer.apply([grad], [variable]))(tf.constant([1.0, np.nan]))
    np.testing.assert_array_equal(variable, [1, 1])


def test_losses_by_hand():
    np.testing.assert_allclose(
        softmax_cross_entropy(np.array([0, 1]), np.log([[0.25, 0.75], [0.5, 0.5]])),
        [math.log(4), math.log(2)],
        rtol=1e-6,
    )
    logit = math.log(0.8 / 0.2)
    np.testing.assert_allclose(
        sigmoid_cross_entropy(np.array([1, 0]), np.array([[logit], [logit]])),
        [-math.log(0.8), -math.log(0.2)],
        rtol=1e-6,
    )
    mean = WeightedMean(softmax_cross_entropy)(
        np.array([0, 1]), np.log([[0.25, 0.75], [0.5, 0.5]]), sample_weight=np.array([1.0, 0.0])
    )
    assert math.isclose(float(mean), math.log(4), rel_tol=1e-6)


@pytest.mark.medium
def test_rows_of_weight_zero_change_nothing():
    config = tiny_config(**NO_DROPOUT)
    with_filler = small.batches(rows=8, replica_rows=8, weights=[1] * 5 + [0] * 3)
    without = with_filler.map(lambda *parts: tf.nest.map_structure(lambda part: part[:5], parts))
    results = [
        train(make_step(config, make_strategy("none")), dataset, 3)
        for dataset in (with_filler, without)
    ]
    assert results[0][0][0]["examples"] == 5
    np.testing.assert_allclose(results[0][0][-1]["loss"], results[1][0][-1]["loss"], rtol=1e-6)
    assert_weights_equal(results[0][1], results[1][1])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("labels", "hidden_size", "rate"),
    [
        (("a", "b", "c"), 12, 1e-3),
        pytest.param(("no", "yes"), 12, 1e-3, marks=pytest.mark.slow),
        # This width uses compiled kernels. At 1e-3 the gradient norm falls from 23 to 0.03
        # in 10 steps, in which rounding alone makes a difference of 3e-4.
        pytest.param(("a", "b", "c"), 129, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_two_replicas_equal_one_with_uneven_weights_and_clipping(
    mirrored, labels, hidden_size, rate
):
    """Run 10 steps with 8 and 3 real rows per replica; every step clips the norm."""
    config = tiny_config(hidden_size=hidden_size, num_hidden_layers=1, **NO_DROPOUT)
    weights = [1] * 8 + [1, 0, 1, 0, 1, 0, 0, 0]
    arguments = {"rows": 16, "weights": weights, "num_labels": len(labels)}
    one, two = (
        train(
            make_step(config, strategy, labels=labels, rate=rate),
            small.batches(replica_rows=rows, **arguments),
            10,
        )
        for strategy, rows in ((make_strategy("none"), 16), (mirrored, 8))
    )
    assert min(log["gradient_norm"] for log in one[0]) > CLIP_NORM
    for name in ("loss", "gradient_norm", "examples"):
        values = ([log[name] for log in logs] for logs, _ in (one, two))
        np.testing.assert_allclose(*values, rtol=2e-5, err_msg=name)
    assert_weights_equal(one[1], two[1], rate / 100)


@pytest.mark.slow
def test_clipping_each_replica_before_the_sum_is_noticed(mirrored):
    """Clip per replica first, as Keras does, as a negative control: the weights must differ."""

    class ClipsFirst(AdamW):
        def apply(self, grads, trainable_variables=None):
            grads, _ = tf.clip_by_global_norm(
                [tf.convert_to_tensor(grad) for grad in grads], CLIP_NORM
            )
            self.clip_norm = None
            return super().apply(grads, trainable_variables)

    config = tiny_config(**NO_DROPOUT)
    arguments = {"rows": 16, "weights": [1] * 8 + [1, 0, 1, 0, 1, 0, 0, 0]}
    one = train(
        make_step(config, make_strategy("none")), small.batches(replica_rows=16, **arguments), 10
    )
    with mirrored.scope():
        optimizer = ClipsFirst(1e-3)
    two = train(
        make_step(config, mirrored, optimizer), small.batches(replica_rows=8, **arguments), 10
    )
    with pytest.raises(AssertionError):
        assert_weights_equal(one[1], two[1])


def replica_copies(step):
    """Return {(name, replica): array} of all that training changes."""
    variables = model_variables(step.model)
    names = {variable.path: name for name, variable in variables.items()}
    return {
        (name, replica): copy.numpy()
        for name, variable in {**variables, **step.optimizer.state(names)}.items()
        for replica, copy in enumerate(step.strategy.experimental_local_results(variable.value))
    }


def without_gradient_on(replica, loss):
    """Return a loss that is finite everywhere, but whose gradient on one replica is not."""

    def total(labels, outputs):
        here = tf.distribute.get_replica_context().replica_id_in_sync_group == replica
        # The slope of a square root at 0: inf, times 0.
        return loss(labels, outputs) + tf.sqrt(tf.where(here, 0.0, 1.0) + 0.0 * outputs[:, 0])

    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "replica"), [("gradient", 0), ("weight", 1), ("weight", 0), ("gradient", 1)]
)
def test_a_value_that_is_not_finite_prevents_the_update_on_all_replicas(mirrored, cause, replica):
    step, weights = make_step(tiny_config(), mirrored), np.ones(16, np.float32)
    if cause == "weight":
        weights[8 * replica + 3] = np.inf
    else:
        step.losses = {"label": without_gradient_on(replica, step.losses["label"])}
    before = replica_copies(step)
    assert {number for _, number in before} == {0, 1}
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        train(step, small.batches(rows=16, replica_rows=8, weights=weights), 1)
    for copy, array in replica_copies(step).items():
        np.testing.assert_array_equal(array, before[copy], err_msg=str(copy))


@pytest.mark.slow
def test_dropout_differs_between_replicas_and_steps_and_repeats_with_the_seed(mirrored):
    config = tiny_config()
    step = make_step(config, mirrored)
    seen = set()

    def seed_of_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return dropout_seed(step.seed, batch_counter(step.optimizer), replica)

    for number in range(3):
        step.optimizer.iterations.assign(number)
        for seed in mirrored.experimental_local_results(mirrored.run(seed_of_replica)):
            seen.add(tuple(seed.numpy().tolist()))
    assert len(seen) == 6
    runs = [
        train(make_step(config, make_strategy("none"), seed=seed), small.batches(rows=8), 3)[0]
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.medium
def test_every_trainable_variable_moves():
    config = tiny_config(**NO_DROPOUT)
    step = make_step(config, make_strategy("none"), AdamW(1e-2, weight_decay_rate=0.0))
    before = {name: variable.numpy() for name, variable in model_variables(step.model).items()}
    _, after = train(step, small.batches(rows=24), 3)
    assert {name for name in after if np.array_equal(before[name], after[name])} == set()


@pytest.mark.slow
def test_keras_fit_has_the_same_losses_and_weights():
    """Train 20 steps without dropout in our loop and in `fit`, with the same model and data."""
    config = tiny_config(**NO_DROPOUT)
    dataset = small.batches(rows=24, weights=[1] * 20 + [0] * 4)
    schedule = {"peak": 1e-2, "num_train_steps": 20, "warmup_steps": 4}
    ours = make_step(config, make_strategy("none"), AdamW(WarmupLinearDecay(**schedule)))
    logs, weights = train(ours, dataset, 20)

    theirs = make_step(config, make_strategy("none"), AdamW(WarmupLinearDecay(**schedule)))
    losses = []
    theirs.model.compile(
        optimizer=theirs.optimizer,
        loss={name: WeightedMean(loss) for name, loss in theirs.losses.items()},
    )
    # Keras reports a running mean over the epoch; one step per epoch shows each loss.
    history = theirs.model.fit(dataset, epochs=20, steps_per_epoch=1, verbose=0)
    losses = history.history["loss"]
    np.testing.assert_allclose(losses, [log["loss"] for log in logs], rtol=1e-5)
    assert_weights_equal(
        weights,
        {
            name: variable.numpy()
            for name, variable in model_variables(theirs.model).items()
            if "seed" not in name
        },
    )


@pytest.mark.slow
def test_fit_has_the_same_weights_on_one_and_two_replicas(mirrored):
    config = tiny_config(**NO_DROPOUT)
    results = []
    for strategy in (make_strategy("none"), mirrored):
        step = make_step(config, strategy)
        with strategy.scope():
            losses = {name: WeightedMean(loss) for name, loss in step.losses.items()}
            step.model.compile(optimizer=step.optimizer, loss=losses)
        dataset = small.batches(rows=16, replica_rows=16).take(5)
        step.model.fit(dataset, epochs=1, verbose=0)
        results.append(
            {n: v.numpy() for n, v in model_variables(step.model).items() if "seed" not in n}
        )
    assert_weights_equal(*results)


def test_a_variable_without_gradient_is_kept_by_apply_and_reported_by_the_step():
    variables = [keras.Variable(np.ones(2, np.float32), name=name) for name in ("kernel", "other")]
    optimizer = AdamW(1e-1)
    optimizer.apply([tf.ones(2), None], variables)
    assert variables[0].numpy()[0] < 1
    np.testing.assert_array_equal(variables[1], [1, 1])
    with pytest.raises(ValueError, match="this optimizer was built with: more"):
        optimizer.apply([tf.ones(2)], [keras.Variable(np.ones(2, np.float32), name="more")])
    step = make_step(tiny_config(), make_strategy("none"))
    step.losses = {
        "label": lambda labels, outputs: (
            tf.zeros_like(labels, tf.float32) + tf.reduce_sum(step.model.head.bias)
        )
    }
    with pytest.raises(ValueError, match="no gradient reaches .*word_embeddings"):
        train(step, small.batches(rows=8), 1)


def test_float16_requires_an_optimizer_that_scales_the_loss():
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=8)
    model = task.build_model(tiny_config(num_hidden_layers=1), "mixed_float16")
    with pytest.raises(ValueError, match="float16: expected an optimizer with scales_loss"):
        TrainStep(model, task.losses, AdamW(1e-3), make_strategy("none"), 0)


def own_model(**options):
    """Return a Keras model of one layer in float16, trained for two epochs on 32 rows."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile(AdamW(1e-2, scales_loss=True), "mse", jit_compile=False, **options)
    x = np.random.default_rng(0).normal(0, 0.1, (32, 4)).astype(np.float32)  # None overflows.
    losses = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
    return model, x, losses


def test_a_keras_model_scales_the_loss(tmp_path):
    """Keras scales the first loss before it builds the optimizer."""
    model, x, losses = own_model()
    assert losses[1] < losses[0] and int(model.optimizer.iterations) == 8
    assert int(model.optimizer.finite_steps) == 8 and not model.optimizer.loss_scale.trainable
    model.optimizer.loss_scale.assign(4.0)
    model.save(tmp_path / "own.keras")
    loaded = keras.saving.load_model(tmp_path / "own.keras").optimizer
    assert [of.path.split("/")[-1] for of in loaded.variables[-2:]] == [
        "loss_scale",
        "finite_steps",
    ]
    assert (float(loaded.loss_scale), int(loaded.finite_steps)) == (4.0, 8)
    model.fit(np.inf * x[:8], x[:8, :1], batch_size=8, verbose=0)
    assert float(model.optimizer.loss_scale) == 2.0 and int(model.optimizer.iterations) == 8


def test_a_loss_is_not_scaled_twice():
    """Under a global policy of float16, Keras wraps the optimizer in its own."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match=r"with Keras compile\(..., auto_scale_loss=False"):
            own_model()
        model, _, _ = own_model(auto_scale_loss=False)
    finally:
        keras.config.set_dtype_policy(policy)
    assert int(model.optimizer.finite_steps) == 8


class Penalized(keras.Model):
    """Model with a regularizer and a loss of its own, the mean of the squared inputs of a layer."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, activation="tanh")
        self.last = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.3))
        self.first.build((None, 4))
        self.last.build((None, 3))
        self.built = True

    def call(self, inputs, training=False, seed=None):
        hidden = self.first(inputs["x"])
        self.add_loss(tf.reduce_mean(tf.square(hidden)))
        return {"y": self.last(hidden)}


def penalized(strategy=None, optimizer=None):
    with (strategy or make_strategy("none")).scope():
        keras.utils.set_random_seed(0)
        model, optimizer = Penalized(), optimizer or keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.fixture(scope="module")
def penalized_by_keras():
    """Return rows, and the loss and the weights of an update of Keras with them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)).astype(np.float32), np.arange(8, dtype=np.float32)
    model, optimizer = penalized()
    model.compile(optimizer, {"y": "mean_squared_error"})
    (loss,) = model.fit({"x": x}, {"y": y[:, np.newaxis]}, batch_size=8, verbose=0).history["loss"]
    return x, y, loss, [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize(
    ("replicas", "parts", "compares_rows", "is_compiled"),
    [
        (1, 1, False, False),
        pytest.param(1, 2, False, True, marks=pytest.mark.medium),
        pytest.param(1, 2, True, False, marks=pytest.mark.medium),
        pytest.param(2, 2, False, False, marks=pytest.mark.medium),
        pytest.param(2, 1, False, True, marks=pytest.mark.medium),
    ],
)
def test_losses_of_the_model_itself_are_added_as_in_keras(
    penalized_by_keras, mirrored, replicas, parts, compares_rows, is_compiled
):
    x, y, expected_loss, expected = penalized_by_keras
    strategy = make_strategy("none") if replicas == 1 else mirrored
    model, optimizer = penalized(strategy)
    loss = squared_error
    if compares_rows:
        loss = BatchLoss(lambda labels, output, weights: squared_error(labels, output))
    step = TrainStep(
        *(model, {"y": loss}, optimizer, strategy, 0),
        accumulation_steps=parts,
        is_compiled=is_compiled,
    )
    size = 8 // replicas // parts
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, {"y": y}, {"y": np.ones_like(y)}))
    data = data.batch(size, drop_remainder=True)
    data = data.batch(parts, drop_remainder=True) if parts > 1 else data
    logs = step(iter(distribute(lambda local: data, strategy)))
    assert float(logs["loss"]) == pytest.approx(expected_loss, rel=1e-5)
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-6)
