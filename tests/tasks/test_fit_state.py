"""State that a `fit` changes: steps, schedules, heads, tuned values and the origin."""

import copy
import gc
import json
import pickle
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf import AdamW, Encoder, FitSchedule, UserError
from bert_tf.errors import DivergenceError
from bert_tf.train import step
from bert_tf.train.losses import FunctionLoss, weighted_sum
from tasks import AnomalyDetector, TextClassifier, TextRegressor, load_model
from tasks.model import task_model
from tasks.model.task_model import TaskModel
from tests import small
from tests.tasks.test_task_model import CASES, LABELS, NAMES, ROWS
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of

TEXTS, IDS = (ROWS * 4)[:32], ([LABELS.index(name) for name in NAMES] * 4)[:32]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, config, vocabulary):
    path = tmp_path_factory.mktemp("state") / "huggingface"
    return small.write_huggingface(path, config, vocabulary)


@pytest.fixture(scope="module")
def no_dropout(tmp_path_factory, config, vocabulary):
    path = tmp_path_factory.mktemp("state") / "huggingface"
    return small.write_huggingface(path, config, vocabulary, **NO_DROPOUT)


def create(path, labels=LABELS, **options):
    return TextClassifier.from_pretrained(path, labels=labels, max_seq_length=12, **options)


def create_case(name, path):
    options, *_ = CASES[name]
    return getattr(tasks, name).from_pretrained(path, max_seq_length=12, **options)


def token_ids(model):
    return {name: value.numpy() for name, value in model.preprocessor(ROWS).items()}


def rates_of(schedule, counts):
    return [float(schedule(count)) for count in counts]


@pytest.mark.medium
def test_accumulated_batches_equal_one_batch(no_dropout):
    """Train twice, because a second schedule has to start where the first one has ended."""
    together, apart = create(no_dropout), create(no_dropout)
    together.compile(keras.optimizers.Adam(FitSchedule(1e-3, 0.25), epsilon=1e-3))
    apart.compile(
        keras.optimizers.Adam(FitSchedule(1e-3, 0.25), epsilon=1e-3, gradient_accumulation_steps=4)
    )
    for _ in range(2):
        before = weights_of(apart)
        together.fit(TEXTS, IDS, batch_size=32, epochs=4, verbose=0)
        apart.fit(TEXTS, IDS, batch_size=8, epochs=4, verbose=0)
        assert_equal_weights(weights_of(together), weights_of(apart), rtol=0, atol=1e-6)
        assert not np.array_equal(
            before["classifier/kernel"], weights_of(apart)["classifier/kernel"]
        )
    assert int(apart.optimizer.iterations) == int(together.optimizer.iterations) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.medium),
        (1, {"jit_compile": True}),
        (2, {"jit_compile": True}),
    ],
)
def test_losses_of_the_network_itself_are_added(no_dropout, mirrored, replicas, options):
    """As in Keras: to the loss and, of regularizers, to that of validation rows."""
    strategy = mirrored if replicas > 1 else tf.distribute.get_strategy()
    plain = create(no_dropout)
    with strategy.scope():
        own = create(no_dropout)
    kernel_HC = own.network.head.kernel.numpy()
    own.network.head.kernel.regularizer = keras.regularizers.L2(0.5)
    for model, given in ((plain, {}), (own, options)):
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), **given)
        model.fit(TEXTS, IDS, batch_size=32, epochs=1, verbose=0)
    difference_HC = plain.network.head.kernel.numpy() - own.network.head.kernel.numpy()
    np.testing.assert_allclose(difference_HC, 0.1 * kernel_HC, rtol=1e-4, atol=1e-6)

    plain.network.set_weights(own.network.get_weights())
    of_kernel = 0.5 * np.sum(own.network.head.kernel.numpy() ** 2)
    of_logits = 7 * np.mean(plain.predict(token_ids(plain), verbose=0)["label"] ** 2)
    network, call = own.network, own.network.call

    def call_with_loss(*args, **kwargs):
        outputs = call(*args, **kwargs)
        network.add_loss(7 * tf.reduce_mean(tf.square(outputs["label"])))
        return outputs

    network.call = call_with_loss
    losses = []
    for model, given in ((plain, {}), (own, options)):
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.SGD(0.0), **given)
        history = model.fit(
            *(ROWS * 4, NAMES * 4),
            batch_size=12,
            epochs=1,
            validation_data=(ROWS, NAMES),
            verbose=0,
        ).history
        ids = {name: values[:8] for name, values in token_ids(model).items()}
        of_ids = model.evaluate(ids, np.array(IDS[:8]), verbose=0)["loss"]
        losses.append([history["loss"][0], history["val_loss"][0], of_ids])
    of_eight = 7 * np.mean(plain.predict(ids, verbose=0)["label"] ** 2)
    expected = [of_kernel + of_logits, of_kernel, of_kernel + of_eight]
    np.testing.assert_allclose(np.subtract(*losses[::-1]), expected, rtol=1e-4)


class OwnLoss(TextClassifier):
    def compute_loss(self, *args, **kwargs):
        return 100.0 * super().compute_loss(*args, **kwargs)


class OwnStep(OwnLoss):
    def train_step(self, data):
        raise NotImplementedError


def test_an_overridden_loss_that_is_never_called_is_refused(directory, tmp_path):
    model = OwnLoss.from_pretrained(directory, labels=LABELS, max_seq_length=12)
    for method, call in {
        "compile": model.compile,
        "fit": lambda: model.fit(ROWS, NAMES),
        "train": lambda: model.train(ROWS, NAMES, output_dir=tmp_path),
    }.items():
        with pytest.raises(UserError) as raised:
            call()
        assert str(raised.value) == (
            f"{method}: OwnLoss.compute_loss would never be called; pass a loss to compile, or "
            "call add_loss in a layer of the network"
        )
    OwnStep.from_pretrained(directory, labels=LABELS, max_seq_length=12).compile()


@pytest.mark.medium
def test_accumulated_batches_have_masks_of_their_own(no_dropout, monkeypatch):
    """Dropout masks are a function of the seed, which is one of each batch."""
    model, steps = create(no_dropout), []
    model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=3), run_eagerly=True)
    seed = step.dropout_seed
    monkeypatch.setattr(
        step,
        "dropout_seed",
        lambda own, count, *rest: steps.append(int(count.numpy())) or seed(own, count, *rest),
    )
    model.fit(ROWS, NAMES, batch_size=3, epochs=1, verbose=0)
    assert steps == [0, 1, 2]


# The step that `fit` shares with `train`.


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(["TextClassifier", "TextRegressor"], "TextRegressor"))
def test_fit_and_train_have_the_same_losses(directory, tmp_path, name):
    """With dropout over 21 steps: the orders of rows and the seeds of masks are equal, too."""
    _, x, y = CASES[name]
    by_fit, by_train = (create_case(name, directory) for _ in range(2))
    by_fit.compile(learning_rate=1e-3, warmup_proportion=0.0)
    means = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: means.append(logs["loss"])
    )
    by_fit.fit(x, y, batch_size=4, epochs=7, callbacks=log, verbose=0)
    by_train.train(
        *(x, y),
        output_dir=tmp_path / "run",
        global_batch_size=4,
        epochs=7,
        learning_rate=1e-3,
        warmup_proportion=0.0,
        log_every=1,
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    rows = np.array([4, 4, 1])  # Logs of Keras are means of the epoch so far.
    totals = np.cumsum(rows * np.reshape(losses, (7, 3)), axis=1)
    np.testing.assert_allclose(np.reshape(means, (7, 3)), totals / np.cumsum(rows), rtol=1e-6)
    assert len(set(means)) == 21
    assert_equal_weights(weights_of(by_train), weights_of(by_fit), rtol=0, atol=1e-6)


@pytest.mark.medium
def test_several_steps_per_execution_end_with_the_epoch(no_dropout):
    """Three batches in six epochs; 2 and 20 do not divide them."""
    weights = []
    for count in (1, 2, 20):
        model = create(no_dropout)
        model.compile(keras.optimizers.SGD(0.1), steps_per_execution=count)
        model.fit(ROWS, NAMES, batch_size=4, epochs=6, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 18
        weights.append(weights_of(model))
    for other in weights[1:]:
        assert_equal_weights(weights[0], other, rtol=0, atol=1e-6)


def test_several_steps_per_execution_on_replicas_are_an_error(no_dropout, mirrored):
    with mirrored.scope():
        model = create(no_dropout)
    message = "steps_per_execution=2: expected 1 on several replicas"
    with pytest.raises(UserError, match=message):
        model.compile(keras.optimizers.SGD(0.1), steps_per_execution=2)


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["auto", lambda labels, logits: _cross_entropy(labels, logits)])
@pytest.mark.parametrize(
    "options",
    small.fast([{}, {"jit_compile": True}], {}),
)
def test_the_loss_of_an_epoch_is_exact(no_dropout, loss, options):
    """The last batch has one row, and rows have weights; the model does not learn."""
    model, weights = create(no_dropout), np.linspace(0.5, 2.0, 9)
    model.compile(keras.optimizers.SGD(0.0), loss, **options)
    ids = IDS[: len(ROWS)]
    logs = model.fit(ROWS, ids, batch_size=4, epochs=1, sample_weight=weights, verbose=0).history
    logits = model(model.preprocessor(ROWS))["label"]
    losses = _cross_entropy(tf.constant(ids), logits).numpy()
    # Losses of Keras are divided by the number of rows.
    divisor = weights.sum() if loss == "auto" else len(ROWS)
    assert logs["loss"] == [pytest.approx(np.sum(weights * losses) / divisor, rel=1e-5)]
    inputs = {name: value.numpy() for name, value in model.preprocessor(ROWS).items()}
    found = model.evaluate(inputs, {"label": np.array(ids)}, 4, 0, weights)
    assert found["loss"] == pytest.approx(logs["loss"][0], rel=1e-5)


def test_a_mean_of_keras_counts_no_padding():
    loss = keras.losses.MeanSquaredError()
    labels, output = tf.constant([1.0, 2.0, 5.0]), tf.constant([[0.0], [0.0], [0.0]])
    total, divisor = weighted_sum(loss, labels[:, None], output, tf.constant([1.0, 0.5, 0.0]))
    assert (float(total), float(divisor)) == (1.0 + 2.0, 2.0)
    of_tokens = (tf.constant([[1.0, 2.0]]), tf.constant([[0.0, 0.0]]), tf.constant([[1.0, 0.0]]))
    total, divisor = weighted_sum(FunctionLoss(lambda y, x: (y - x) ** 2), *of_tokens)
    assert (float(total), float(divisor)) == (1.0, 1.0)


def test_each_replica_adds_its_fraction_of_the_divisor_of_a_sum(mirrored):
    def divisor():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return weighted_sum(loss, tf.constant([1.0]), tf.constant([[0.0]]))[1]

    of_replicas = mirrored.run(tf.function(divisor, autograph=False))
    assert [*map(float, mirrored.experimental_local_results(of_replicas))] == [0.5, 0.5]
    with mirrored.scope():  # An evaluation has the rows of all replicas at once.
        assert float(divisor()) == 1.0


def _cross_entropy(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)


@pytest.mark.parametrize(
    "options",
    small.fast(
        [
            {"optimizer": keras.optimizers.Adam(1e-3)},
            {},
            {"optimizer": keras.optimizers.SGD(1e-3), "jit_compile": True},
            {"jit_compile": True},
        ],
        {"optimizer": keras.optimizers.Adam(1e-3)},
    ),
)
def test_fit_stops_where_a_loss_is_not_finite(no_dropout, options):
    model = create(no_dropout)
    model.compile(**options)
    model.network.head.bias.assign([np.inf, 0.0, 0.0])
    before = weights_of(model)
    with pytest.raises(DivergenceError, match="step 0: the loss or its gradient is not finite"):
        model.fit(ROWS, NAMES, batch_size=9, epochs=2, verbose=0)
    assert_equal_weights(before, weights_of(model), rtol=0, atol=0)
    assert model.has_new_head


# Schedules.


def test_the_schedule_counts_updates():
    schedule = FitSchedule(1.0, 0.0)
    schedule.set_steps(2, 4, batches_per_update=3)
    assert rates_of(schedule, range(6, 19, 3)) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates_of(schedule, (6, 7, 8)) == [1.0] * 3
    copy = FitSchedule.from_config(schedule.get_config())
    assert rates_of(copy, range(6, 19)) == rates_of(schedule, range(6, 19))


def test_a_schedule_that_was_never_set_is_an_error():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(FitSchedule(1e-3)), "mse")
    with pytest.raises(UserError, match="FitSchedule: the number of steps is not set; expected"):
        model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)


def test_a_fit_without_an_update_is_refused(no_dropout):
    model = create(no_dropout)
    model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=4))
    with pytest.raises(UserError, match="fit: 3 batches are less than an update with gradient_acc"):
        model.fit(ROWS, NAMES, batch_size=3, epochs=1, verbose=0)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", small.fast(["mixed_float16", "float32"], "float32"))
def test_the_schedule_of_a_wrapped_optimizer_is_set(directory, dtype):
    model = create(directory, dtype=dtype)
    optimizer = AdamW(FitSchedule(1e-2))
    # Keras wraps the optimizer of a model in mixed_float16 by itself.
    wrap = keras.optimizers.LossScaleOptimizer if dtype == "float32" else lambda inner: inner
    model.compile(wrap(optimizer))
    before = weights_of(model)
    model.fit(ROWS, NAMES, batch_size=4, epochs=2, verbose=0)
    assert optimizer._learning_rate.get_config()["num_train_steps"] == 6
    after = weights_of(model)
    assert np.abs(after["classifier/kernel"] - before["classifier/kernel"]).max() > 1e-3
    assert all(np.isfinite(value).all() for value in after.values())


@pytest.mark.medium
def test_replicas_skip_an_update_together(no_dropout, mirrored):
    """Only the loss of the second replica overflows."""

    def loss(labels, logits):
        return tf.where(labels == 1, float("inf"), 1.0) * _cross_entropy(labels, logits)

    rows = [IDS.index(0), IDS.index(1)]
    with mirrored.scope():
        model = create(no_dropout)
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss)
    before = weights_of(model)
    model.fit(
        [TEXTS[row] for row in rows], [0, 1], batch_size=2, epochs=1, shuffle=False, verbose=0
    )
    assert_equal_weights(before, weights_of(model), rtol=0, atol=0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14


@pytest.mark.medium
def test_replicas_evaluate_token_ids_like_strings(no_dropout, mirrored):
    with mirrored.scope():
        model = create(no_dropout)
    model.compile()
    found = model.evaluate(token_ids(model), np.array(IDS[: len(ROWS)]), 4, verbose=0)
    expected = model.evaluate(ROWS, NAMES)
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5)


@pytest.mark.parametrize("gpus", [[], ["a GPU"]])
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_float16_on_a_cpu_is_warned_of(directory, monkeypatch, dtype, gpus):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: gpus)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        create(directory, dtype=dtype)
    lines = [str(one.message) for one in found if "float16" in str(one.message)]
    expected = "float16 on a CPU is many times slower than float32; choose float32, or use a GPU"
    assert lines == [expected] * (dtype == "mixed_float16" and not gpus)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8"])
def test_other_dtypes_are_refused_in_one_line(directory, dtype):
    with pytest.raises(UserError, match="dtype=.*: expected float32, mixed_bfloat16 or mixed_fl"):
        create(directory, dtype=dtype)


def test_the_global_policy_of_keras_is_the_default(directory):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, encoder = create(directory), Encoder.from_pretrained(directory)
        other = create(directory, dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.network.encoder.compute_dtype == encoder.compute_dtype == "bfloat16"
    assert model(token_ids(model))["label"].dtype == tf.float32
    assert other.network.encoder.compute_dtype == "float32"


# Heads.


def bias_of(model):
    return weights_of(model)["classifier/bias"]


@pytest.mark.medium
def test_training_continues_with_the_head_it_has(directory, tmp_path):
    model = create(directory)
    model.fit(ROWS[:5], NAMES[:5], epochs=1, verbose=0)
    trained = bias_of(model)
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run")
    model.freeze(1)
    for one in (model, load_model(tmp_path / "run"), load_model(tmp_path / "model.keras")):
        assert not one.has_new_head
        one.compile(keras.optimizers.SGD(0.0))
        one.fit(ROWS, NAMES, epochs=1, verbose=0)
        np.testing.assert_array_equal(bias_of(one), trained)


def test_a_new_head_of_a_file_is_still_new(directory, tmp_path):
    model = create(directory)
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run")
    assert load_model(tmp_path / "model.keras").has_new_head
    assert load_model(tmp_path / "run").has_new_head
    again = create(tmp_path / "run")
    assert again.has_new_head
    np.testing.assert_array_equal(bias_of(again), bias_of(model))


@pytest.mark.medium
def test_a_head_is_trained_after_the_first_update(directory):
    """As callbacks save it, before `fit` has returned."""
    model, found = create(directory), []

    def note(batch, logs):
        found.append((model.get_config()["has_new_head"], model.origin.partition(", ")[2]))

    log = keras.callbacks.LambdaCallback(on_train_batch_begin=note, on_train_batch_end=note)
    model.fit(ROWS, NAMES, batch_size=9, epochs=1, callbacks=log, verbose=0)
    assert found == [(True, ""), (False, "trained with fit")]


@pytest.mark.medium
def test_a_checkpoint_of_keras_has_a_trained_head(directory, tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    create(directory).fit(ROWS, NAMES, epochs=1, callbacks=[checkpoint], verbose=0)
    assert not load_model(tmp_path / "model.keras").has_new_head


@pytest.mark.slow
def test_an_autoencoder_is_not_reset(directory, tmp_path):
    def mean_score(labels, scores):
        return scores

    detector = AnomalyDetector.from_pretrained(directory, max_seq_length=12, latent_dim=3)
    detector.fit(ROWS, epochs=1, verbose=0)
    detector.save_run(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    before = weights_of(loaded)
    loaded.compile(keras.optimizers.SGD(0.0), metrics=[mean_score])
    history = loaded.fit(ROWS[:4], epochs=1, verbose=0).history
    assert history["mean_score"] == [pytest.approx(history["loss"][0], rel=1e-5)]
    assert_equal_weights(before, weights_of(loaded), rtol=0, atol=0)


@pytest.mark.medium
def test_an_autoencoder_starts_with_the_rows_of_the_fit_that_trains_it(directory):
    detector, other = (
        AnomalyDetector.from_pretrained(directory, max_seq_length=12, latent_dim=3)
        for _ in range(2)
    )

    class Stop(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        detector.fit(ROWS[:4], epochs=1, callbacks=[Stop()], verbose=0)
    for model in (detector, other):
        model.fit(ROWS[4:], epochs=1, verbose=0)
    assert_equal_weights(weights_of(other), weights_of(detector), rtol=0, atol=0)


@pytest.mark.medium
def test_other_labels_than_those_of_the_weights_warn_with_both_lists(directory, tmp_path):
    model = create(directory)
    model.has_new_head = False
    run = model.save_run(tmp_path / "run").path
    other = [label.upper() for label in LABELS]
    with pytest.warns(UserWarning, match="billing, hardware, software") as raised:
        new = TextClassifier.from_pretrained(run, labels=other, max_seq_length=12)
    assert ", ".join(other) in str(raised[0].message) and new.has_new_head
    with pytest.warns(UserWarning, match="predictions of an untrained head are random"):
        new.predict_rows(ROWS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kept = TextClassifier.from_pretrained(run, labels=LABELS[::-1], max_seq_length=12)
        assert not kept.has_new_head
        TextClassifier.from_pretrained(run, labels=other, max_seq_length=12, keep_head=False)


# A fit that fails, and one that trains.


@pytest.mark.medium
def test_a_fit_that_fails_leaves_the_model_as_it_was(directory):
    model = create(directory, calibrate=True)
    model.fit(ROWS, NAMES, epochs=1, validation_data=(ROWS, NAMES), verbose=0)
    assert model.origin == "Hugging Face directory huggingface, trained with fit"
    tuned, before = model.task, weights_of(model)
    assert not tuned.untuned_fields
    for options in (
        {"batch_size": 0},
        {"y": ["nothing"] * len(ROWS)},
        {"validation_data": (ROWS, NAMES[:2])},
        {"validation_split": 2.0},
        {"callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch: 1.0)]},
        {"initial_epoch": "1"},
    ):
        with pytest.raises((UserError, TypeError, ValueError)):
            model.fit(ROWS, **{"y": NAMES, "epochs": 1, "verbose": 0, **options})
        assert model.task == tuned
    assert_equal_weights(before, weights_of(model), rtol=0, atol=0)


@pytest.mark.medium
def test_token_ids_end_what_was_tuned_too(directory):
    model = create(directory, calibrate=True)
    model.tune(ROWS, NAMES)
    labels = np.array([LABELS.index(name) for name in NAMES], np.int32)
    model.fit(token_ids(model), {"label": labels}, epochs=1, verbose=0)
    assert model.task.untuned_fields and not model.has_new_head


@pytest.mark.medium
def test_the_schedule_of_token_ids_counts_the_rows_that_are_trained_on(directory):
    model = create(directory)
    rows = token_ids(model), np.array(IDS[: len(ROWS)])
    for options in ({"validation_split": 0.5}, {"validation_split": 0.5, "validation_data": rows}):
        model.fit(*rows, batch_size=2, epochs=2, verbose=0, **options)
        assert float(model.optimizer.learning_rate.numpy()) == 0.0


def test_each_fit_draws_the_orders_of_its_epochs(directory, monkeypatch):
    """A function of seed and epoch alone, whatever was trained before."""
    model = TextRegressor.from_pretrained(directory, max_seq_length=12)

    def keras_fit(model, x, callbacks, initial_epoch, epochs, **options):
        for epoch in range(initial_epoch, epochs):
            callbacks[0].epoch.assign(epoch)
            orders.append(np.concatenate([y["value"] for _, y, _ in x]).tolist())

    monkeypatch.setattr(keras.Model, "fit", keras_fit)
    orders = []
    model.fit(ROWS, np.arange(9.0), batch_size=4, epochs=3)
    model.fit(ROWS, np.arange(9.0), batch_size=4, epochs=3, initial_epoch=1)
    assert orders[3:] == orders[1:3]
    assert all(sorted(order) == [*range(9)] for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    # An epoch of other steps begins where the one before has ended.
    model.fit(ROWS, np.arange(9.0), batch_size=3, epochs=3, steps_per_epoch=2)
    assert orders[5] + orders[6] + orders[7] == [*orders[0], *orders[1]]


def test_a_fit_after_a_resumed_one_starts_at_its_own_epoch(directory, monkeypatch):
    """BackupAndRestore sets the epoch to resume at, which Keras never resets."""
    epochs, model = [], create(directory)

    def keras_fit(model, **options):
        epochs.append(model._initial_epoch)
        model._initial_epoch = 2

    monkeypatch.setattr(keras.Model, "fit", keras_fit)
    for x, y in ((ROWS, NAMES), (token_ids(model), np.array(IDS[: len(ROWS)])), (ROWS, NAMES)):
        model.fit(x, y, epochs=1)
    assert epochs == [None, None, None]


@pytest.mark.medium
def test_labels_and_weights_of_token_ids_may_have_an_axis(no_dropout):
    """As in Keras: broadcast with the errors (B,), they would pair all rows with all others."""
    values, weights = np.arange(9.0), np.linspace(0.5, 2, 9)
    found = []
    for as_column in (lambda array: array, lambda array: array[:, np.newaxis]):
        model = TextRegressor.from_pretrained(no_dropout, max_seq_length=12)
        model.compile(keras.optimizers.SGD(1e-2), metrics=keras.metrics.MeanSquaredError())
        rows, y = token_ids(model), as_column(values)
        history = model.fit(
            *(rows, y), sample_weight=as_column(weights), shuffle=False, batch_size=4, verbose=0
        ).history
        found.append([*history.values(), model.evaluate(rows, y, verbose=0)["loss"]])
    np.testing.assert_allclose(np.hstack(found[0]), np.hstack(found[1]), rtol=1e-5)


@pytest.mark.medium
def test_class_weights_of_token_ids_are_those_of_keras(no_dropout):
    model, ids = create(no_dropout), np.array(IDS[: len(ROWS)])
    model.compile(keras.optimizers.SGD(0.0))
    rows = token_ids(model)
    weights = np.where(ids == 0, 5.0, 1.0)
    (expected,) = model.fit(rows, ids, sample_weight=weights, verbose=0).history["loss"]
    dataset = tf.data.Dataset.from_tensor_slices((rows, ids)).batch(9)
    for x, y in ((rows, ids), (dataset, None)):
        history = model.fit(x, y, class_weight={0: 5.0, 1: 1.0, 2: 1.0}, verbose=0).history
        assert history["loss"] == [pytest.approx(expected, rel=1e-5)]


# Labels of token ids.


BINARY_IDS = np.array([0, 1, 0, 1, 1, 0, 1, 0, 1])


@pytest.fixture(scope="module")
def binary(no_dropout):
    model = create(no_dropout, labels=["0", "1"])
    model.compile(keras.optimizers.SGD(0.0))
    return model


@pytest.mark.medium
@pytest.mark.parametrize("label", [-1, 2, 7])
def test_labels_of_token_ids_that_are_no_ids_are_refused(binary, label):
    """GLUE's files of test rows have the label -1, which a single logit would learn."""
    rows, wrong = token_ids(binary), BINARY_IDS.copy()
    wrong[-1] = label

    def dataset(y, *weights):
        return tf.data.Dataset.from_tensor_slices((rows, y, *weights)).batch(3)

    right = dataset(BINARY_IDS)
    for call in (
        lambda: binary.fit(dataset(wrong), verbose=0),
        lambda: binary.fit(rows, wrong, verbose=0),
        lambda: binary.evaluate(dataset(wrong), verbose=0),
        lambda: binary.evaluate(rows, {"label": wrong}, verbose=0),
        lambda: binary.fit(right, validation_data=dataset(wrong), verbose=0),
        lambda: binary.fit(right, validation_data=(rows, wrong), verbose=0),
        lambda: binary.fit(dataset({"label": wrong}, {"label": np.ones(9)}), verbose=0),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert str(raised.value) == (
            f"a label of token ids is {label}; expected ids from 0 to 1; remove rows without a "
            "label"
        )


def test_labels_of_rows_without_weight_are_not_checked(binary):
    """Padding has any label."""
    rows, y = token_ids(binary), BINARY_IDS.copy()
    y[-1] = -1
    weights = np.ones(9, np.float32)
    weights[-1] = 0.0
    expected = binary.evaluate({name: of[:8] for name, of in rows.items()}, y[:8], verbose=0)
    found = binary.evaluate(rows, y, sample_weight=weights, verbose=0)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    dataset = tf.data.Dataset.from_tensor_slices((rows, y, weights)).batch(9)
    assert binary.evaluate(dataset, verbose=0)["loss"] == pytest.approx(found["loss"], rel=1e-5)
    with pytest.raises(UserError, match="^y: expected ids as labels of token ids, received str"):
        binary.fit(rows, np.array(["0", "1", "1"] * 3))


@pytest.mark.medium
def test_a_head_that_was_set_or_trained_batch_by_batch_is_not_new(directory):
    model, other = (create(directory, calibrate=True) for _ in range(2))
    model.tune(ROWS, NAMES)
    batch = token_ids(model), np.array(IDS[: len(ROWS)])
    with pytest.raises(UserError, match="^FitSchedule: the number of steps is not set"):
        model.compile()
        model.train_on_batch(*batch)
    assert model.has_new_head and not model.task.untuned_fields
    model.compile(AdamW(1e-3))
    model.train_on_batch(*batch)
    other.tune(ROWS, NAMES)
    other.set_weights(model.get_weights())
    assert not model.has_new_head and not other.has_new_head
    assert model.task.untuned_fields and other.task.untuned_fields


def test_rows_that_cannot_tune_the_temperature_cause_a_warning(directory):
    model = create(directory, calibrate=True)
    logits = 9 * np.eye(len(LABELS), dtype=np.float32)[IDS[: len(ROWS)]]
    model.evaluator().outputs = lambda encoded: {"label": logits}
    with pytest.warns(UserWarning, match="^calibrate: file with too few errors .* temperature 1$"):
        model.tune(ROWS, NAMES)
    assert model.task.temperature == 1.0


def test_what_was_tuned_travels_with_the_weights(directory, tmp_path):
    model, other = (create(directory, calibrate=True) for _ in range(2))
    model.save_weights(tmp_path / "first.weights.h5")
    model.has_new_head = False
    model.tune(ROWS, NAMES).save_weights(tmp_path / "tuned.weights.h5")
    assert model.task.temperature is not None
    other.load_weights(tmp_path / "tuned.weights.h5")
    assert other.task == model.task and not other.has_new_head
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.task == model.task and not copied.has_new_head
    model.load_weights(tmp_path / "first.weights.h5")
    assert model.task.temperature is None and model.has_new_head
    model.set_weights(other.get_weights())
    assert model.task == other.task and not model.has_new_head


@pytest.mark.parametrize("options", [{"calibrate": True}, {}])
def test_weights_that_are_loaded_in_part_end_what_was_tuned(directory, tmp_path, options):
    """The file has a head of four labels, or no temperature."""
    model, path = create(directory, calibrate=True), tmp_path / "other.weights.h5"
    labels = [*LABELS, "other"] if options else LABELS
    create(directory, labels, **options).save_weights(path)
    model.tune(ROWS, NAMES)
    with pytest.raises(ValueError, match="could not be loaded|shape"):
        model.load_weights(path)
    assert model.task.temperature is None


@pytest.mark.medium
def test_weights_that_a_callback_restores_are_those_of_the_fit(directory):
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    model = create(directory)
    model.fit(ROWS, NAMES, epochs=1, callbacks=[stop], verbose=0)
    assert model.origin == "Hugging Face directory huggingface, trained with fit"


def test_predictions_of_an_untuned_model_cause_a_warning(directory):
    model = create(directory, calibrate=True, threshold_objective="f1", rare_label=LABELS[0])
    model.has_new_head = False
    message = r"^temperature, thresholds: never tuned; call tune\(x, y\)$"
    for predict in (model.predict, model.predict_rows):
        with pytest.warns(UserWarning, match=message):
            predict(ROWS[:1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message)
        model.evaluate(ROWS, NAMES)
        model.tune(ROWS, NAMES).predict_rows(ROWS[:1])


@pytest.mark.medium
def test_all_batches_of_validation_have_its_size(directory, monkeypatch):
    """Those of tuning, and those of the features of a frozen encoder, too."""
    sizes, evaluator = set(), TaskModel.evaluator

    def counted(model, batch_size=64):
        sizes.add(batch_size)
        return evaluator(model, batch_size)

    monkeypatch.setattr(TaskModel, "evaluator", counted)
    options = {"epochs": 1, "validation_batch_size": 2, "verbose": 0}
    model = create(directory, calibrate=True)
    model.fit(ROWS, NAMES, validation_data=(ROWS, NAMES), **options)
    detector = AnomalyDetector.from_pretrained(directory, max_seq_length=12, latent_dim=3)
    detector.fit(ROWS, validation_data=(ROWS, [False] * len(ROWS)), **options)
    assert sizes == {2}


def test_a_file_is_compiled_for_the_devices_where_it_is_loaded(directory, tmp_path, monkeypatch):
    model = create(directory)
    model.compile()
    config = model.get_compile_config()
    assert config["jit_compile"] == "auto" and not model._is_compiled
    model.save(tmp_path / "model.keras")
    monkeypatch.setattr(task_model, "is_accelerated", lambda strategy: True)
    assert load_model(tmp_path / "model.keras")._is_compiled
    model.compile_from_config({**config, "jit_compile": False})
    assert not model._is_compiled


# Layers that are not trained.


def moved(model):
    """Return the names of the variables that a fit changes."""
    before = weights_of(model)
    model.compile(keras.optimizers.SGD(1e-1))
    model.fit(ROWS, NAMES, epochs=1, verbose=0)
    return {name for name, value in weights_of(model).items() if (value != before[name]).any()}


@pytest.mark.medium
def test_a_file_keeps_which_layers_are_trained(directory, tmp_path):
    model = create(directory)
    model.encoder.trainable = False
    model.compile()
    model.fit(ROWS, NAMES, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) > 0
    assert moved(loaded) == {"classifier/kernel", "classifier/bias"}


@pytest.mark.medium
def test_frozen_layers_are_trained_again(directory, tmp_path):
    model, other = (create(directory, frozen_layers=1) for _ in range(2))
    model.freeze(None)
    other.encoder.trainable = False
    other.encoder.trainable = True  # As Keras does it; the layers below get their gradient again.
    other.save(tmp_path / "model.keras")
    for one in (model, other, load_model(tmp_path / "model.keras")):
        assert "bert/embeddings/word_embeddings" in moved(one)


@pytest.mark.parametrize("name", ["TokenClassifier", "QuestionAnswerer", "TextEmbedder"])
def test_a_pooler_that_is_not_used_is_left_to_other_models(directory, name):
    options, *_ = CASES.get(name, ({},))
    model = getattr(tasks, name).from_pretrained(directory, max_seq_length=12, **options)
    expected = [weight.path for weight in model.network.weights if "pooler" not in weight.path]
    model.encoder.trainable = False
    model.encoder.trainable = True  # As Keras does it.
    for one in (model, model.network):
        assert [weight.path for weight in one.trainable_weights] == expected
        assert [variable.path for variable in one.trainable_variables] == expected
        assert len(one.non_trainable_weights) == len(one.weights) - len(expected)
        assert len(one.non_trainable_variables) == len(one.variables) - len(expected)
    ids = keras.Input((4,), dtype="int32")
    own = keras.Model(ids, model.encoder(ids)["pooled"])
    assert any("pooler/kernel" in weight.path for weight in own.trainable_weights)


@pytest.mark.medium
def test_an_encoder_that_is_trained_again_is_trained_without_its_pooler(directory, tmp_path):
    model = tasks.TokenClassifier.from_pretrained(directory, labels=["THING"], max_seq_length=12)
    model.encoder.trainable = False
    model.encoder.trainable = True
    before, (_, rows, labels) = weights_of(model), CASES["TokenClassifier"]
    model.train(rows, labels, output_dir=tmp_path / "run", epochs=1, global_batch_size=3)
    kept = {name for name, value in weights_of(model).items() if np.all(value == before[name])}
    assert kept == {"bert/pooler/kernel", "bert/pooler/bias", *(n for n in before if "seed" in n)}


def test_features_that_are_floats_are_not_rounded_in_mixed_precision(directory):
    options = {"max_seq_length": 12, "latent_dim": 3, "dtype": "mixed_bfloat16"}
    model = AnomalyDetector.from_pretrained(directory, **options)
    vectors = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    np.testing.assert_array_equal(model({"vector": tf.constant(vectors)})["vector"], vectors)


@pytest.mark.parametrize("optimizer_class", [AdamW, keras.optimizers.AdamW])
def test_a_frozen_model_decays_no_more_variables_than_before(directory, optimizer_class):
    model, optimizer = create(directory), optimizer_class(1e-3)
    optimizer.exclude_from_weight_decay([model.network.head.kernel], var_names=["embeddings"])
    model.compile(optimizer)
    model.freeze(0)
    variables = model.network.head.kernel, model.network.head.bias
    assert [model.optimizer._use_weight_decay(variable) for variable in variables] == [False, True]
    assert model.optimizer._exclude_from_weight_decay_pattern.pattern == "embeddings"


def test_a_model_without_weights_to_train_is_refused_in_one_line(directory):
    model = create(directory)
    model.trainable = False
    with pytest.raises(UserError, match="^the loss depends on no weight that is trained; freeze"):
        model.fit(ROWS, NAMES, epochs=1, verbose=0)


@pytest.mark.medium
def test_a_model_that_is_not_used_any_more_is_freed(directory):
    def use():
        model = create(directory)
        model.fit(ROWS, NAMES, epochs=1, verbose=0)
        return weakref.ref(model.network.trainable_variables[0].value)

    variable = use()
    gc.collect()
    assert variable() is None
