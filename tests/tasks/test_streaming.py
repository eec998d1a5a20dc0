"""`fit`, `evaluate` and `predict` on datasets of strings."""

import itertools
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from tasks.model import task_model
from tests import small
from tests.tasks.test_task_model import CASES, LABELS, NAMES, ROWS, compiled
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of

IDS = [LABELS.index(name) for name in NAMES]
SETS = [NAMES[row : row + 1] + [LABELS[0]] * (row > 5) for row in range(9)]
PAIRS = {"text_a": ROWS, "text_b": ROWS[::-1]}
NUMBERS = [0.5 * row for row in range(9)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("streaming") / "weights"
    return small.write_huggingface(directory, config, vocabulary, **NO_DROPOUT)


def batches(*columns, size=4):
    return tf.data.Dataset.from_tensor_slices(columns).batch(size)


def batches_of_fit(model, x, y=None, **arguments):
    """Return the batches (token ids, labels, weights) that Keras receives in an epoch of `fit`."""
    found = []

    def keras_fit(model, dataset, **options):
        found.extend(itertools.islice(dataset.as_numpy_iterator(), options["steps_per_epoch"]))

    with mock.patch.object(keras.Model, "fit", keras_fit):
        model.fit(x, y, epochs=1, **arguments)
    return found


def assert_equal_batches(expected, found, **tolerance):
    assert len(expected) == len(found) > 0
    for first, second in zip(expected, found, strict=True):
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, strict=True, **tolerance), first, second
        )


# Class, options, rows and labels of both ways.
FORMS = {
    "names": ("TextClassifier", {}, ROWS, NAMES, NAMES),
    "ids": ("TextClassifier", {}, ROWS, IDS, IDS),
    "two labels": ("TextClassifier", {"labels": LABELS[:2]}, ROWS[:6], NAMES[:6], NAMES[:6]),
    "class weights": (
        "TextClassifier",
        {"class_weights": {LABELS[0]: 3.0}},
        ROWS,
        NAMES,
        [f" {name} " for name in NAMES],
    ),
    "a column of ids": ("TextClassifier", {}, ROWS, IDS, np.array(IDS, np.uint8)[:, np.newaxis]),
    "lists of names": (
        "TextClassifier",
        {"multi_label": True},
        ROWS,
        SETS,
        tf.ragged.constant(SETS),
    ),
    "lists of ids": (
        "TextClassifier",
        {"multi_label": True},
        ROWS,
        SETS,
        tf.ragged.constant([[LABELS.index(name) for name in names] for names in SETS]).to_tensor(
            -1
        ),
    ),
    "numbers of pairs": ("TextRegressor", {}, PAIRS, NUMBERS, NUMBERS),
    "strings of numbers": ("TextRegressor", {}, PAIRS, NUMBERS, list(map(str, NUMBERS))),
}


@pytest.mark.parametrize("name", small.fast(FORMS))
def test_batches_of_a_dataset_are_those_of_rows(name, weights):
    model_name, options, x, y, streamed = FORMS[name]
    model = compiled(model_name, weights, **options)
    expected = batches_of_fit(model, x, y, batch_size=4, shuffle=False)
    found = batches_of_fit(model, batches(x, streamed))
    assert_equal_batches(expected, found, rtol=0, atol=0)


@pytest.mark.slow
def test_weights_of_rows_and_classes_are_multiplied(weights):
    row_weights = np.linspace(0.5, 2.0, 9).astype(np.float32)
    options = {"class_weight": {LABELS[1]: 2.0}}
    model = compiled("TextClassifier", weights)
    rows = {"batch_size": 4, "shuffle": False, "sample_weight": row_weights}
    expected = batches_of_fit(model, ROWS, NAMES, **rows, **options)
    found = batches_of_fit(model, batches(ROWS, NAMES, row_weights), **options)
    assert_equal_batches(expected, found, rtol=1e-6)
    np.testing.assert_allclose(found[0][2]["label"][2:4], row_weights[2:4] * [1, 2], rtol=1e-6)


@pytest.mark.slow
def test_an_infinite_dataset_is_not_read_ahead(weights):
    """Six steps of 4 rows, prefetched by a few; the schedule ends with the last step."""
    drawn = []

    def draw():
        while True:
            drawn.append(len(drawn))
            yield ROWS[len(drawn) % 9], NAMES[len(drawn) % 9]

    signature = (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.string))
    dataset = tf.data.Dataset.from_generator(draw, output_signature=signature)
    model = compiled("TextClassifier", weights)
    history = model.fit(
        dataset.batch(4),
        steps_per_epoch=3,
        epochs=2,
        validation_data=batches(ROWS, NAMES),
        verbose=0,
    ).history
    assert int(model.optimizer.iterations.numpy()) == 6 <= len(drawn) / 4 < 100
    assert len(history["val_macro_f1"]) == 2
    assert float(model.optimizer.learning_rate.numpy()) == 0.0
    assert history["val_macro_f1"][-1] == model.evaluate(batches(ROWS, NAMES))["macro_f1"]


@pytest.mark.slow
def test_two_replicas_equal_one(weights, mirrored):
    """Train on batches of 5 and 4 rows, of which the first cannot be split evenly."""
    alone = compiled("TextClassifier", weights, learning_rate=1e-3)
    with mirrored.scope():
        together = compiled("TextClassifier", weights, learning_rate=1e-3)
    for model in (alone, together):
        model.fit(batches(ROWS, NAMES, size=5), epochs=3, verbose=0)
    assert_equal_weights(weights_of(alone), weights_of(together), rtol=1e-4, atol=2e-6)


@pytest.mark.medium
def test_an_epoch_of_prefetched_batches_ends_in_silence(weights, monkeypatch):
    """Batches that are prefetched to a GPU have no length."""
    distribute = task_model.distribute
    monkeypatch.setattr(task_model, "is_accelerated", lambda strategy: True)
    monkeypatch.setattr(
        task_model, "distribute", lambda *args: distribute(*args).filter(lambda *batch: True)
    )
    model = compiled("TextClassifier", weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Your input ran out of data")
        history = model.fit(batches(ROWS, NAMES), epochs=2, verbose=0)
    assert history.params["steps"] == 3 and int(model.optimizer.iterations) == 6


@pytest.mark.medium
def test_a_finite_dataset_repeats_until_all_steps_are_done(weights):
    model = compiled("TextClassifier", weights)
    model.fit(batches(ROWS, NAMES), steps_per_epoch=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert float(model.optimizer.learning_rate.numpy()) == 0.0


@pytest.mark.slow
def test_xla_takes_packed_batches_of_few_shapes(weights):
    model = compiled("TextClassifier", weights)
    model.compile(jit_compile=True)
    found = batches_of_fit(model, batches(ROWS, NAMES))
    assert [inputs["sequence_ids"].shape for inputs, *_ in found] == [(1, 64)] * 3
    assert [inputs["token_indices"].shape for inputs, *_ in found] == [(4, 12)] * 3
    assert [of["label"].tolist() for *_, of in found] == [[1.0] * 4] * 2 + [[1.0, 0.0, 0.0, 0.0]]
    expected = batches_of_fit(compiled("TextClassifier", weights), batches(ROWS, NAMES))
    for (inputs, labels, _), (flat, flat_labels, _) in zip(found, expected, strict=True):
        count = len(flat["row_splits"]) - 1
        index = inputs["token_indices"][:count]
        ids = inputs["input_ids"].reshape(-1)[index[index >= 0]]
        np.testing.assert_array_equal(ids, flat["input_ids"][: flat["row_splits"][-1]])
        np.testing.assert_array_equal(labels["label"][:count], flat_labels["label"])


@pytest.mark.slow
def test_xla_takes_padded_batches_if_a_dataset_does_not_tell_their_size(weights):
    def draw():
        yield ROWS[:4], NAMES[:4]

    signature = (tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.string))
    dataset = tf.data.Dataset.from_generator(draw, output_signature=signature)
    model = compiled("TextClassifier", weights)
    model.compile(jit_compile=True)
    ((inputs, *_),) = batches_of_fit(model, dataset, steps_per_epoch=1)
    assert inputs["input_mask"].shape == (4, 12)


def test_a_dataset_need_not_tell_its_shapes(weights):
    dataset = batches(ROWS, NAMES)
    shapeless = tf.data.Dataset.from_generator(
        dataset.as_numpy_iterator, output_types=(tf.string, tf.string)
    )
    model = compiled("TextClassifier", weights)
    found = batches_of_fit(model, shapeless, steps_per_epoch=3)
    assert_equal_batches(batches_of_fit(model, dataset), found, rtol=0, atol=0)


WRONG = {
    "x: expected a dataset of batches, received single rows; call batch": lambda data: (
        data.unbatch()
    ),
    "x: expected batches (x, y) or (x, y, sample_weight)": lambda data: data.map(lambda x, y: x),
    "x: text: expected batches of strings (B,), received int32 (None,)": lambda data: data.map(
        lambda x, y: (tf.strings.length(x), y)
    ),
    "x: expected the columns text, received body": lambda data: data.map(
        lambda x, y: ({"body": x}, y)
    ),
    "y: label ['billing', 'billing']: expected one of": lambda data: data.map(
        lambda x, y: (x, tf.stack([y, y], 1))
    ),
    "y: expected one column of labels, received {'a'": lambda data: data.map(
        lambda x, y: (x, {"a": y, "b": y})
    ),
    "sample_weight[3]: expected a number >= 0, received -1": lambda data: data.map(
        lambda x, y: (x, y, [1, 1, 1, -1])
    ),
    "y: label 0.0: expected one of billing": lambda data: data.map(lambda x, y: (x, tf.zeros([4]))),
    "y: label 'späm': expected one of billing, hardware, software": lambda data: data.map(
        lambda x, y: (x, tf.where(y == "software", "späm", y))
    ),
    "y: label 3: expected an id from 0 to 2, or a name": lambda data: data.map(
        lambda x, y: (x, tf.fill(tf.shape(x), 3))
    ),
    "steps_per_epoch: expected a number for a dataset of unknown length": lambda data: (
        data.repeat()
    ),
    "x: expected at least one batch": lambda data: data.take(0),
}


@pytest.fixture(scope="module")
def model(weights):
    return compiled("TextClassifier", weights)


@pytest.mark.medium
@pytest.mark.parametrize("message", WRONG)
def test_wrong_datasets(model, message):
    with pytest.raises(UserError) as raised:
        model.fit(WRONG[message](batches(ROWS, NAMES)), epochs=1, verbose=0)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["y", "sample_weight", "batch_size", "validation_split"])
def test_what_a_dataset_contains_is_not_given_again(model, name):
    with pytest.raises(UserError, match=f"{name}: expected none"):
        model.fit(batches(ROWS, NAMES), **{name: 0.5})


@pytest.mark.slow
def test_predictions_and_metrics_of_a_dataset(model):
    expected = model.predict(ROWS)["probabilities"]
    for given in (batches(ROWS, NAMES), batches(ROWS).map(lambda x: x)):
        np.testing.assert_array_equal(model.predict(given)["probabilities"], expected)
    assert model.evaluate(batches(ROWS, NAMES)) == model.evaluate(ROWS, NAMES)
    assert model.report(batches(ROWS, NAMES)) == model.report(ROWS, NAMES)
    with pytest.raises(UserError, match="x: expected a finite dataset, received one that repeats"):
        model.predict(batches(ROWS).repeat())


@pytest.mark.slow
def test_other_tasks_read_a_dataset_once(weights):
    x = [text.split() for text in CASES["TokenClassifier"][1]]
    y = [["O"] * len(words) for words in x]
    dataset = batches(tf.ragged.constant(x), tf.ragged.constant(y), size=2)
    model = compiled("TokenClassifier", weights)
    expected = batches_of_fit(model, x, y, batch_size=2, shuffle=False)
    found = batches_of_fit(model, dataset, shuffle=False)
    assert_equal_batches(expected, found)


@pytest.mark.medium
def test_other_tasks_read_what_training_uses_of_an_endless_dataset(weights):
    x = [text.split() for text in CASES["TokenClassifier"][1]]
    y = [["O"] * len(words) for words in x]
    endless = batches(tf.ragged.constant(x), tf.ragged.constant(y), size=2).repeat()
    model, options = compiled("TokenClassifier", weights), {"steps_per_epoch": 2, "shuffle": False}
    expected = batches_of_fit(model, endless.take(2), **options)
    for dataset in (endless, endless.filter(lambda *batch: True)):  # Of unknown length.
        assert_equal_batches(expected, batches_of_fit(model, dataset, **options))
