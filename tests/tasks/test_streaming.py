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
from tests.tasks.test_task_model import CONTEXTS, LABELS, NAMES, ROWS, compiled
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

    def keras_fit(model, x, **options):
        steps = options.get("steps_per_epoch")
        for batch in itertools.islice(x, steps):
            found.append(tf.nest.map_structure(lambda values: values.numpy(), batch))

    with mock.patch.object(keras.Model, "fit", keras_fit):
        model.fit(x, y, epochs=1, **arguments)
    return found


def tokens_of(inputs):
    """Return (token id, segment) of the tokens of each row, of flat or padded inputs."""
    pairs = np.stack([inputs["input_ids"], inputs["segment_ids"]], axis=-1)
    if "row_splits" in inputs:
        splits = inputs["row_splits"]
        return [of.tolist() for of in np.split(pairs[: splits[-1]], splits[1:-1])]
    return [of[mask == 1].tolist() for of, mask in zip(pairs, inputs["input_mask"], strict=True)]


def assert_equal_batches(expected, found, **tolerance):
    assert len(expected) == len(found) > 0
    for first, second in zip(expected, found, strict=True):
        assert tokens_of(first[0]) == tokens_of(second[0])
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, strict=True, **tolerance),
            first[1:],
            second[1:],
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
    "padded lists of names": (
        "TextClassifier",
        {"multi_label": True},
        ROWS,
        SETS,
        tf.ragged.constant(SETS).to_tensor(""),
    ),
    "multi-hot": (
        "TextClassifier",
        {"multi_label": True},
        ROWS,
        SETS,
        np.array([[float(name in names) for name in LABELS] for names in SETS], np.float32),
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
        history = model.fit(ROWS, NAMES, batch_size=4, epochs=2, verbose=0)
    assert history.params["steps"] == 3 and int(model.optimizer.iterations) == 6


@pytest.mark.medium
def test_a_repeated_dataset_has_the_steps_of_the_user(weights):
    model = compiled("TextClassifier", weights)
    model.fit(batches(ROWS, NAMES).repeat(), steps_per_epoch=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert float(model.optimizer.learning_rate.numpy()) == 0.0


def test_xla_takes_batches_of_few_shapes(weights):
    model = compiled("TextClassifier", weights)
    model.compile(jit_compile=True)
    found = batches_of_fit(model, batches(ROWS, NAMES))
    assert [inputs["input_ids"].shape for inputs, *_ in found] == [(4, 12), (4, 12), (1, 12)]
    expected = batches_of_fit(compiled("TextClassifier", weights), batches(ROWS, NAMES))
    assert_equal_batches(expected, found, rtol=0, atol=0)


def test_a_dataset_need_not_tell_its_shapes(weights):
    dataset = batches(ROWS, NAMES)
    shapeless = tf.data.Dataset.from_generator(
        dataset.as_numpy_iterator, output_types=(tf.string, tf.string)
    )
    model = compiled("TextClassifier", weights)
    found = batches_of_fit(model, shapeless, steps_per_epoch=3)
    assert_equal_batches(batches_of_fit(model, dataset), found, rtol=0, atol=0)


def test_a_dataset_of_equal_batches_has_an_accuracy(weights):
    """Its labels tell their number, and the token ids do not."""
    dataset = tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(3, drop_remainder=True)
    history = compiled("TextClassifier", weights).fit(dataset, epochs=1, verbose=0).history
    assert 0 <= history["accuracy"][0] <= 1


WRONG = {
    "x: expected a dataset of batches, received single rows; call batch": lambda data: (
        data.unbatch()
    ),
    "x: expected batches (x, y) or (x, y, sample_weight)": lambda data: data.map(lambda x, y: x),
    "x: text: expected batches of strings of rank 1, received int32 (None,)": lambda data: data.map(
        lambda x, y: (tf.strings.length(x), y)
    ),
    "x: expected the columns text, received body": lambda data: data.map(
        lambda x, y: ({"body": x}, y)
    ),
    "y: expected labels (B,), or one-hot rows (B, 3), received (None, 2)": lambda data: data.map(
        lambda x, y: (x, tf.stack([y, y], 1))
    ),
    "y: expected one column of labels, received a, b": lambda data: data.map(
        lambda x, y: (x, {"a": y, "b": y})
    ),
    "sample_weight: expected numbers >= 0": lambda data: data.map(
        lambda x, y: (x, y, [1, 1, 1, -1])
    ),
    "y: received 0.500000, expected one of billing": lambda data: data.map(
        lambda x, y: (x, tf.fill(tf.shape(x), 0.5))
    ),
    "y: received spam, expected one of billing, hardware, software": lambda data: data.map(
        lambda x, y: (x, tf.where(y == "software", "spam", y))
    ),
    "y: received 3, expected one of billing, hardware, software, or an id": lambda data: data.map(
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


@pytest.mark.parametrize("name", ["TokenClassifier", "QuestionAnswerer"])
def test_labels_that_need_the_tokens_are_refused_in_one_line(weights, name):
    columns = {"question": CONTEXTS, "context": CONTEXTS}
    x = CONTEXTS if name == "TokenClassifier" else columns
    with pytest.raises(UserError, match=r"^x: .*expected lists.*dataset of strings[^\n]*\Z"):
        compiled(name, weights).fit(batches(x, ["O"] * 3))


@pytest.mark.medium
def test_the_preprocessing_of_a_model_is_that_of_its_fit(weights):
    dataset = batches(ROWS, NAMES)
    model = compiled("TextClassifier", weights)
    expected = batches_of_fit(model, dataset)
    found = [
        tf.nest.map_structure(lambda values: values.numpy(), batch)
        for batch in dataset.map(model.preprocess)
    ]
    assert_equal_batches(expected, found, rtol=0, atol=0)
    texts = batches(ROWS).map(lambda x: x).map(model.preprocess)
    assert tokens_of(next(texts.as_numpy_iterator())) == tokens_of(found[0][0])
