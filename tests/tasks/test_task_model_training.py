"""`fit` of the model classes: equal to the train step, on replicas, resumed, with callbacks."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf.runs.checkpoints import model_variables
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.distribution import make_strategy
from bert_tf.train.optimizer import AdamW, WarmupLinearDecay
from bert_tf.train.step import TrainStep
from tasks.data.examples import EncodedExamples
from tasks.graph.evaluation import Evaluator
from tasks.model.labelled_rows import Rows, examples_of
from tests import small
from tests.tasks.test_task_model import CASES, LABELS, NAMES, ROWS, compiled, create

PARTS = CASES | {
    "TextRanker": (
        {},
        {"query": ["the bill", "my app"] * 2, "texts": [["is high", "a", "b"], ["not"]] * 2},
        [[0, 1, 0], [1]] * 2,
    ),
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def no_dropout_dir(tmp_path, config, vocabulary):
    return small.write_huggingface(tmp_path / "no_dropout", config, vocabulary, **NO_DROPOUT)


def weights_of(model):
    return {name: value.numpy() for name, value in model_variables(model.network).items()}


def assert_equal_weights(first, second, **tolerance):
    for name, value in first.items():
        if "dropout_seed" not in name:
            np.testing.assert_allclose(second[name], value, err_msg=name, **tolerance)


def without_common_bias(name, weights):
    """Drop a bias that a softmax over choices or positions cancels: its gradient is rounding."""
    if name in ("MultipleChoice", "QuestionAnswerer"):
        del weights["classifier/bias"]
    return weights


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(CASES, "TextClassifier"))
def test_fit_equals_the_train_step(name, no_dropout_dir):
    """Compare 20 steps of Keras with those of the training loop, without dropout."""
    _, x, y = CASES[name]
    by_fit, by_step = (create(name, no_dropout_dir) for _ in range(2))
    by_fit.compile(learning_rate=1e-3)
    examples = examples_of(by_step.task, x, y)
    encoded = EncodedExamples.encode(examples, by_step.serving.pipeline, to_flat)
    strategy = make_strategy("none")
    evaluator = Evaluator(by_step.task, by_step.network, strategy)
    encoded = by_step.task.training_data(encoded, evaluator)
    steps_per_epoch = -(-len(encoded) // 4)
    epochs = -(-20 // steps_per_epoch)
    num_steps = steps_per_epoch * epochs
    schedule = WarmupLinearDecay(1e-3, num_steps, int(0.1 * num_steps))
    optimizer = AdamW(schedule)
    optimizer.build(by_step.network.trainable_variables)
    step = TrainStep(by_step.network, by_step.task.losses, optimizer, strategy, seed=0)
    batches = encoded.training_batches(global_batch_size=4, num_epochs=epochs, seed=0)
    iterator = iter(batches)
    for _ in range(num_steps):
        step(iterator)

    by_fit.fit(x, y, batch_size=4, epochs=epochs, verbose=0)
    assert int(by_fit.optimizer.iterations.numpy()) == num_steps >= 20
    expected = without_common_bias(name, weights_of(by_step))
    assert_equal_weights(expected, weights_of(by_fit), rtol=1e-4, atol=2e-6)


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(PARTS, "TokenClassifier"))
def test_parts_of_a_batch_train_like_the_batch(name, no_dropout_dir, tmp_path):
    """The longest text of each part has another length."""
    options, x, y = PARTS[name]
    weights = []
    for parts in (1, 2):
        model = getattr(tasks, name).from_pretrained(no_dropout_dir, max_seq_length=12, **options)
        model.train(
            *(x, y),
            output_dir=tmp_path / f"{parts}",
            global_batch_size=4,
            gradient_accumulation_steps=parts,
            epochs=2,
            learning_rate=1e-3,
        )
        weights.append(without_common_bias(name, weights_of(model)))
    assert_equal_weights(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", small.fast(CASES))
def test_two_replicas_equal_one(name, no_dropout_dir, mirrored):
    """Train with a last batch of one row, which leaves the second replica padding only.

    With SGD, because Adam hides a wrong scale of gradients, and because it amplifies the rounding
    of gradients that are 0: those of the biases of keys, and of an autoencoder that starts as PCA.
    """
    _, x, y = CASES[name]
    alone = create(name, no_dropout_dir)
    with mirrored.scope():
        together = create(name, no_dropout_dir)
    # With 0.1 the regression diverges, which amplifies the rounding tenfold in each epoch.
    rate = 0.02 if name == "TextRegressor" else 0.1
    for model in (alone, together):
        with model.distribute_strategy.scope():
            model.compile(optimizer=keras.optimizers.SGD(rate))
        initial = weights_of(model)
        model.fit(x, y, batch_size=4, epochs=3, validation_data=(x, y), verbose=0)
    expected = weights_of(alone)
    assert any(np.abs(value - initial[key]).max() > 1e-3 for key, value in expected.items())
    assert_equal_weights(expected, weights_of(together), rtol=1e-4, atol=1e-5)
    assert together.predict_rows(x)[0].keys() == alone.predict_rows(x)[0].keys()
    assert together.evaluate(x, y) == pytest.approx(alone.evaluate(x, y), abs=1e-4)


class Stop(keras.callbacks.Callback):
    """Break off training after an epoch, as a killed process."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.medium
@pytest.mark.parametrize("steps_per_epoch", small.fast([None, 2], None))
def test_a_resumed_fit_equals_an_unbroken_one(huggingface_dir, tmp_path, steps_per_epoch):
    def fit(*callbacks):
        model = compiled("TextClassifier", huggingface_dir)
        options = {"batch_size": 4, "epochs": 4, "steps_per_epoch": steps_per_epoch, "verbose": 0}
        model.fit(ROWS, NAMES, callbacks=callbacks, **options)
        return weights_of(model)

    unbroken = fit()
    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        fit(keras.callbacks.BackupAndRestore(backup), Stop())
    resumed = fit(keras.callbacks.BackupAndRestore(backup))
    assert_equal_weights(unbroken, resumed, rtol=0, atol=0)


@pytest.mark.slow
def test_a_second_fit_warms_up_anew_without_another_trace(huggingface_dir):
    model = compiled("TextClassifier", huggingface_dir)
    rates = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate.numpy())
        )
    )
    model.fit(ROWS, NAMES, batch_size=1, epochs=2, callbacks=[callback], verbose=0)
    traced = model.train_function
    model.fit(ROWS, NAMES, batch_size=1, epochs=2, callbacks=[callback], verbose=0)
    assert model.train_function is traced
    # 18 steps a fit: one of warmup, then a decay from 17/18 of the peak.
    expected = 1e-2 * np.array([0.0, *(np.arange(17, 0, -1) / 18)])
    np.testing.assert_allclose(rates, np.tile(expected, 2), rtol=1e-5)


@pytest.mark.slow
def test_thresholds_are_tuned_on_validation_rows(huggingface_dir, tmp_path):
    options = {"labels": LABELS[:2], "rare_label": LABELS[1], "calibrate": True}
    options["threshold_objective"] = "recall=1.0"
    model = compiled("TextClassifier", huggingface_dir, **options)
    rows = (ROWS[:6], NAMES[:6])
    model.fit(*rows, validation_data=rows, verbose=0)
    assert model.task.thresholds and model.task.temperature
    assert model.evaluate(*rows)["recall"] == 1.0
    model.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").task == model.task
    model.fit(*rows, verbose=0)
    assert model.task.thresholds is None  # Those of the weights before do not fit the new ones.
    assert model.tune(*rows).task.thresholds


@pytest.mark.slow
def test_callbacks_see_the_metrics_of_the_task(huggingface_dir, tmp_path):
    model = compiled("TextClassifier", huggingface_dir)
    best = str(tmp_path / "best.keras")
    history = model.fit(
        ROWS,
        NAMES,
        batch_size=4,
        epochs=6,
        validation_data=(ROWS, NAMES),
        verbose=0,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "val_macro_f1", mode="max", patience=1, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(best, "val_macro_f1", mode="max", save_best_only=True),
        ],
    ).history
    expected = pytest.approx(max(history["val_macro_f1"]))
    assert model.evaluate(ROWS, NAMES)["macro_f1"] == expected
    assert keras.saving.load_model(best).evaluate(ROWS, NAMES)["macro_f1"] == expected


@pytest.mark.slow
def test_weights_of_rows_and_classes(no_dropout_dir):
    """Weight 0 leaves a row out; weights of classes and rows are multiplied."""
    weights = [0.0 if name == LABELS[0] else 2.0 for name in NAMES]

    def fit(x, y, **options):
        model = compiled("TextClassifier", no_dropout_dir)
        model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0, **options)
        return weights_of(model)

    kept = [number for number, name in enumerate(NAMES) if name != LABELS[0]]
    alone = fit([ROWS[number] for number in kept], [NAMES[number] for number in kept])
    assert_equal_weights(alone, fit(ROWS, NAMES, sample_weight=weights), rtol=1e-4, atol=2e-6)
    by_class = fit(ROWS, NAMES, class_weight={LABELS[0]: 0.0})
    assert_equal_weights(alone, by_class, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_all_forms_of_rows_train_alike(no_dropout_dir):
    def fit(x, y=None, **options):
        model = compiled("TextClassifier", no_dropout_dir)
        if not isinstance(x, tf.data.Dataset):
            options = {"batch_size": 4, **options}
        model.fit(x, y, epochs=1, verbose=0, **options)
        return weights_of(model)

    expected = fit(ROWS, NAMES)
    ids = [LABELS.index(name) for name in NAMES]
    dataset = tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(4)
    rows = Rows({"text": ROWS}, NAMES, LABELS, "rows.csv")
    for given in (
        (tuple(ROWS), np.array(ids)),
        (np.array(ROWS), np.array(NAMES)),
        ({"text": ROWS}, NAMES),
        (rows,),
    ):
        assert_equal_weights(expected, fit(*given), rtol=0, atol=0)
    in_order = fit(ROWS, NAMES, shuffle=False)
    assert_equal_weights(in_order, fit(dataset), rtol=0, atol=0)  # It has its own order.
    split = fit([*ROWS, *ROWS[:3]], [*NAMES, *NAMES[:3]], validation_split=0.25)
    assert_equal_weights(expected, split, rtol=0, atol=0)


@pytest.mark.medium
@pytest.mark.parametrize("shuffle", small.fast([True, False], True))
def test_a_dataset_of_the_model_trains_like_its_rows(huggingface_dir, shuffle):
    """Bit for bit, with dropout."""
    rows = {"x": ROWS, "y": NAMES, "batch_size": 4, "shuffle": shuffle}
    weights = []
    for is_dataset in (False, True):
        model = compiled("TextClassifier", huggingface_dir)
        model.fit(**{"x": model.dataset(**rows)} if is_dataset else rows, epochs=2, verbose=0)
        weights.append(weights_of(model))
    assert_equal_weights(*weights, rtol=0, atol=0)


@pytest.mark.slow
def test_parts_compose_with_keras(huggingface_dir, tmp_path):
    model = create("TextClassifier", huggingface_dir)
    text = keras.Input((), dtype="string")
    pooled = model.encoder(model.preprocessor(text))["pooled"]
    own = keras.Model(text, keras.layers.Dense(3)(pooled))
    own.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.array([LABELS.index(name) for name in NAMES])
    own.fit(tf.data.Dataset.from_tensor_slices((ROWS, ids)).batch(4), verbose=0)
    own.save(tmp_path / "own.keras")
    loaded = keras.saving.load_model(tmp_path / "own.keras")
    np.testing.assert_array_equal(loaded(tf.constant(ROWS)), own(tf.constant(ROWS)))


@pytest.mark.slow
def test_frozen_layers_stay_frozen(config, vocabulary, tmp_path):
    config = dataclasses.replace(config, num_hidden_layers=2)
    weights = small.write_huggingface(tmp_path / "weights", config, vocabulary)
    model = compiled("TextClassifier", weights, frozen_layers=1)
    before = weights_of(model)
    model.fit(ROWS, NAMES, verbose=0)
    changed = {name for name, value in weights_of(model).items() if (value != before[name]).any()}
    assert changed and not [name for name in changed if "embeddings" in name or "layer_0" in name]
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    assert int(loaded.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) > 0
    model.freeze(2)
    before = weights_of(model)
    model.fit(ROWS, NAMES, verbose=0)
    changed = {name for name, value in weights_of(model).items() if (value != before[name]).any()}
    assert changed and not [name for name in changed if "layer_1" in name]
