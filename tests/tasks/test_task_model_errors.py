"""Errors of the model classes: one line that names the argument and what is expected."""

import inspect
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW, UserError
from tasks import (
    AnomalyDetector,
    MultipleChoice,
    QuestionAnswerer,
    TextClassifier,
    TextRegressor,
    TokenClassifier,
)
from tasks.base.task import task_class
from tasks.data.examples import Examples
from tests import small
from tests.small import TEXTS

LABELS = list(TEXTS)
ROWS = [text for texts in TEXTS.values() for text in texts]
NAMES = [label for label, texts in TEXTS.items() for _ in texts]


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    return small.write_huggingface(tmp_path_factory.mktemp("errors") / "hf", config, vocabulary)


@pytest.fixture(scope="module")
def model(weights):
    return TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12, calibrate=True)


def check(message, call, *args, **kwargs):
    """Expect a UserError of one line that contains a message and names no flag."""
    with pytest.raises(UserError) as raised:
        call(*args, **kwargs)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
    assert "--" not in str(raised.value)


class Frame:
    """A table with the attributes by which a pandas DataFrame is recognized."""

    def __init__(self, columns):
        self.values, self.columns = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.values.values())))

    def __getitem__(self, name):
        return self.values[name]

    def to_dict(self):
        return self.values


WRONG_TEXTS = {
    "wrong column": ({"body": ROWS}, "x: expected the columns text, received body"),
    "wrong column of a table": (Frame({"body": ROWS}), "x: expected the columns text, received"),
    "single string": ("my bill", "text: expected a list, received the string 'my bill'; put it"),
    "single bytes": (b"bill", "text: expected a list, received the string b'bill'; put it into"),
    "empty": ([], "x: expected at least one row, received none"),
    "empty column": ({"text": []}, "x: expected at least one row, received none"),
    "number": ([*ROWS, 3], "x: text[9]: expected a string, received int 3"),
    "missing value": ([float("nan")], "x: text[0]: expected a string, received float nan"),
    "list of lists": ([ROWS], "x: text[0]: expected a string, received list"),
    "none": (None, "text: expected a list, a NumPy array or a pandas column, received NoneType"),
    "iterator": (iter(ROWS), "text: expected a list, a NumPy array or a pandas column, received"),
    "array of one": (np.array("bill"), "text: expected a list, received the string 'bill'; put"),
    "surrogate": (["a\ud800"], "text[0]"),
}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_wrong_texts(model, name):
    x, message = WRONG_TEXTS[name]
    check(message, model.predict, x)
    check(message, model.predict_rows, x)
    check(message, model.preprocessor, x)
    if name != "iterator":
        check(message, model.fit, x, NAMES)


WRONG_LABELS = {
    "unknown": ([*NAMES[:8], "spam"], "y[8]: label 'spam': expected one of billing, hardware, so"),
    "unknown id": (
        [*range(9)],
        "y[3]: label 3: expected one of billing, hardware, software, or an",
    ),
    "missing": (None, "y: expected one label per row, received none"),
    "too few": (NAMES[:8], "y: expected 9 labels, one per row of x, received 8"),
    "one string": ("billing", "y: expected a list, received the string 'billing'; put it into"),
    "missing value": (
        [None] * 9,
        "y[0]: label None: expected no missing value; drop rows wi",
    ),
    "list": ([["billing"]] * 9, "y[0]: row ['billing']: expected 3 values, one per label, 0 or 1"),
    "set": (set(LABELS), "y: expected a list, a NumPy array or a pandas column, received set"),
    "table": (Frame({"y": NAMES}), "y: expected a list, a NumPy array or a pandas column"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_wrong_labels(model, name):
    y, message = WRONG_LABELS[name]
    for method in (model.fit, model.evaluate, model.report, model.tune):
        check(message, method, ROWS, y)
    if y is not None:
        check(f"validation_data: {message}", model.fit, ROWS, NAMES, validation_data=(ROWS, y))


WRONG_ARGUMENTS = {
    "batch_size=0: expected an integer > 0": {"batch_size": 0},
    "batch_size='32': expected an integer > 0": {"batch_size": "32"},
    "validation_split=1.5: expected a number > 0 and < 1": {"validation_split": 1.5},
    "validation_split=-0.5: expected a number > 0 and < 1": {"validation_split": -0.5},
    "validation_split='0.1': expected a number > 0 and < 1": {"validation_split": "0.1"},
    "validation_split=0.99: of 9 rows, one part would be empty": {"validation_split": 0.99},
    "validation_data: expected (x, y) or (x, y, sample_weight), received 1 entries": {
        "validation_data": (ROWS,)
    },
    "sample_weight: expected 9 weights, one per row, received 2": {"sample_weight": [1, 2]},
    "sample_weight[0]: expected a number >= 0, received -1": {"sample_weight": [-1] * 9},
    "sample_weight[0]: expected a number >= 0, received 'a'": {"sample_weight": ["a"] * 9},
    "validation_batch_size=0: expected an integer > 0": {"validation_batch_size": 0},
    "steps_per_epoch=0: expected an integer > 0": {"steps_per_epoch": 0},
    "validation_freq=0: expected an integer > 0": {"validation_freq": 0},
    "validation_freq='1': expected an integer > 0": {"validation_freq": "1"},
    "validation_steps: expected with a dataset only; pass the rows that are to be read": {
        "validation_data": (ROWS, NAMES),
        "validation_steps": 1,
    },
    "validation_data: sample_weight: expected none in an evaluation, whose metrics count every": {
        "validation_data": (ROWS, NAMES, [2.0] * 9),
    },
    "class_weight: label 'spam': expected one of billing": {"class_weight": {"spam": 2.0}},
    "class_weight: 'billing': expected a number >= 0": {"class_weight": {"billing": "high"}},
    "class_weight: expected a dict of label and weight": {"class_weight": [1.0, 2.0, 3.0]},
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_wrong_arguments_of_fit(model, message):
    check(message, model.fit, ROWS, NAMES, **WRONG_ARGUMENTS[message])


def test_rows_that_cannot_tune_a_threshold_are_refused_before_training(weights):
    options = {"labels": LABELS[:2], "threshold_objective": "f1", "max_seq_length": 12}
    model = TextClassifier.from_pretrained(weights, rare_label=LABELS[1], **options)
    message = "has no row with label 'hardware' to tune threshold_objective on; choose other rows"
    only = (ROWS[:3], NAMES[:3])
    check(f"x {message}", model.tune, *only)
    check(f"validation_data {message}", model.fit, ROWS[:6], NAMES[:6], validation_data=only)
    x, y = ROWS[5::-1], NAMES[5::-1]  # The last half has the first label.
    check(f"validation_split {message}", model.fit, x, y, validation_split=0.5)
    detector = AnomalyDetector.from_pretrained(weights, max_seq_length=12, latent_dim=3)
    message = "validation_data has no normal row to tune the threshold on"
    check(message, detector.fit, ROWS, validation_data=(ROWS, [True] * 9))
    several = TextClassifier.from_pretrained(weights, multi_label=True, **options)
    with pytest.warns(UserWarning, match="x: no row has label 'hardware': it will never be pred"):
        several._check_dev(Examples({"text": ROWS[:1]}, [(0,)]), "x")


def test_wrong_datasets(model):
    pairs = tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(4)
    check("x: expected a finite dataset, received one that repeats", model.evaluate, pairs.repeat())
    check("y: expected none, since the dataset x contains the labels", model.fit, pairs, NAMES)
    check("x: expected at least one batch", model.fit, pairs.take(0))
    check("x: expected a finite dataset, received one that repeats", model.predict, pairs.repeat())


def test_wrong_batch_sizes_of_other_methods(model):
    check("batch_size=0: expected an integer > 0", model.predict, ROWS, batch_size=0)
    check("batch_size=0: expected an integer > 0", model.evaluate, ROWS, NAMES, batch_size=0)


def test_arguments_of_keras_that_strings_do_not_support(model):
    weights = "sample_weight: expected none in an evaluation, whose metrics count every row once"
    check(weights, model.evaluate, ROWS, NAMES, sample_weight=np.full(9, 2.0))
    weighted = tf.data.Dataset.from_tensor_slices((ROWS, NAMES, [2.0] * 9)).batch(4)
    check(weights, model.evaluate, weighted)
    check("callbacks: expected with token ids only", model.evaluate, ROWS, NAMES, callbacks=[1])
    check("callbacks: expected with token ids only", model.predict, ROWS, callbacks=[1])
    check("return_dict=False: expected True", model.evaluate, ROWS, NAMES, return_dict=False)
    check("steps: expected with a dataset only", model.evaluate, ROWS, NAMES, steps=1)
    check("steps: expected with a dataset only", model.predict, ROWS, steps=1)
    for method in (model.fit, model.evaluate, model.predict):
        with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
            method(ROWS, batchsize=3)


def test_names_of_arguments_are_those_of_keras(model):
    for name in ("fit", "evaluate", "predict"):
        ours = set(inspect.signature(getattr(model, name)).parameters)
        keras_method = inspect.signature(getattr(keras.Model, name))
        assert set(keras_method.parameters) - {"self", "kwargs"} <= ours


WRONG_OPTIONS = {
    "lables: unknown option of TextClassifier; expected one of labels, pairs,": {"lables": LABELS},
    "text_columns: unknown option": {"labels": LABELS, "text_columns": ("a", "b")},
    "labels: expected a list, received the string 'billing'": {"labels": "billing"},
    "labels: expected a list, a NumPy array or a pandas column, received set": {"labels": {"a"}},
    "labels: expected names, in a list, or weights with a classification head to keep": {},
    "labels: expected each label once, received 2 values": {"labels": ["a", "a"]},
    "max_seq_length=999: expected 4 to 16": {"labels": LABELS, "max_seq_length": 999},
    "seed='1': expected an integer >= 0 and < 2**32": {"labels": LABELS, "seed": "1"},
    "seed=-1: expected an integer >= 0": {"labels": LABELS, "seed": -1},
    "max_seq_length='9': expected 4 to 16": {"labels": LABELS, "max_seq_length": "9"},
    "num_layers=7: expected 0 to 1, the number of encoder layers": {
        "labels": LABELS,
        "frozen_layers": 7,
    },
    "truncation='middle': expected one of head, tail, head_tail": {
        "labels": LABELS,
        "truncation": "middle",
    },
    "class_weights: label 'spam': expected one of billing": {
        "labels": LABELS,
        "class_weights": {"spam": 2.0},
    },
    "class_weights='balanced': expected a number per label; use balanced_sampling=True": {
        "labels": LABELS,
        "class_weights": "balanced",
    },
    "class_weights=1.0: 1 weights; expected 3": {"labels": LABELS, "class_weights": [1.0]},
    "rare_label=spam: expected one of billing": {"labels": LABELS, "rare_label": "spam"},
    "rare_label=a: of two labels, the second is the positive label; set labels=b,a": {
        "labels": ["a", "b"],
        "rare_label": "a",
    },
    "threshold_objective=f1: requires rare_label": {
        "labels": ["a", "b"],
        "threshold_objective": "f1",
    },
    "TextClassifier: calibrate: expected bool, received 1": {"labels": LABELS, "calibrate": 1},
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_wrong_options(weights, message):
    check(message, TextClassifier.from_pretrained, weights, **WRONG_OPTIONS[message])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("classification", {"labels": LABELS, "focal_gamma": -1.0}, "-1.0: expected a number >= 0"),
        ("span_qa", {"max_answer_length": 0}, "0: expected an integer > 0"),
        ("span_qa", {"max_query_length": 0}, "0: expected an integer > 0"),
        ("span_qa", {"doc_stride": 1.5}, "1.5: expected an integer > 0"),
        ("anomaly", {"latent_dim": 0}, "0: expected an integer > 0"),
        ("anomaly", {"false_alarm_rate": 1}, "1: expected a number > 0 and < 1"),
        ("ranking", {"texts_per_query": 0}, "0: expected an integer > 0"),
    ],
)
def test_options_have_the_bounds_of_their_flags(kind, options, message):
    (*_, name) = options
    options = {"max_seq_length": 128, **options}
    check(f"{name}={message}", task_class(kind).from_options, **options)


def test_unknown_options_are_named_with_those_that_exist(weights):
    check(
        "labels: unknown option of TextRegressor; expected one of activation, pairs, truncation, "
        "max_seq_length, seed, dtype, do_lower_case, frozen_layers",
        TextRegressor.from_pretrained,
        weights,
        labels=LABELS,
    )


def test_wrong_arguments_of_compile(model):
    for name, value, expected in (
        ("schedule", "cosine", "one of released, continuous"),
        ("warmup_proportion", 2, "a number >= 0 and < 1"),
        ("learning_rate", keras.optimizers.schedules.CosineDecay(2e-5, 9), "a number"),
        ("learning_rate", -1.0, "a number > 0"),
        ("layer_decay", 1.5, "a number > 0 and <= 1"),
    ):
        check(f"{name}={value!r:.80}: expected {expected}", model.compile, **{name: value})
    for name, value in (
        ("learning_rate", 1),
        ("warmup_proportion", 0.2),
        ("schedule", "continuous"),
        ("layer_decay", 0.9),
    ):
        message = f"{name}: expected with optimizer='auto'"
        check(message, model.compile, "adam", **{name: value})
    check("loss_weights: 'logits' is no output", model.compile, loss_weights={"logits": 2.0})


class NAType:
    """A missing value, which is recognized as that of pandas by the name of its class."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


CONTEXT = "my bill is high"
QUESTION = {"question": ["is the bill"], "context": [CONTEXT]}
CHOICES = {"prompt": ["the bill"], "choices": [["is high", "open"]]}
# Class, options, rows, wrong label, message.
WRONG_LABELS_OF_TASKS = (
    (TextRegressor, {}, [CONTEXT], "much", "y[0]: label 'much': expected a number"),
    (TextRegressor, {}, [CONTEXT], None, "y[0]: label 'None': expected a number"),
    (TokenClassifier, {}, [CONTEXT], "THING", "y[0]: label: expected a list, received the str"),
    (TokenClassifier, {}, [CONTEXT], ["O"], "y[0]: expected 4 tags, one per word, received 1"),
    (TokenClassifier, {}, [CONTEXT], [{"start": 0}], "y[0]: entity {'start': 0}: expected integ"),
    (
        TokenClassifier,
        {},
        [CONTEXT],
        [{"start": 0, "end": 2, "type": "PLACE"}],
        "y[0]: entity type 'PLACE': expected one of THING",
    ),
    (QuestionAnswerer, {}, QUESTION, "bill", "y[0]: answers: expected a list, received the str"),
    (QuestionAnswerer, {}, QUESTION, ["bill"], "y[0]: answer 'bill': expected"),
    (QuestionAnswerer, {}, QUESTION, [], "y[0]: expected an answer, received none; set may_be_imp"),
    (MultipleChoice, {}, CHOICES, 2, "y[0]: choice 2: expected an integer from 0 to 1"),
    (MultipleChoice, {}, CHOICES, "open", "y[0]: choice 'open': expected an integer from 0 to 1"),
    (AnomalyDetector, {}, [CONTEXT], "spam", "y[0]: label 'spam': expected True for an anomaly"),
    (AnomalyDetector, {}, [CONTEXT], NAType(), ": expected True for an anomaly, or False"),
)
OPTIONS = {
    TokenClassifier: {"labels": ["THING"]},
    QuestionAnswerer: {"max_query_length": 4},
    AnomalyDetector: {"latent_dim": 3},
}


@pytest.mark.parametrize(
    ("model_class", "changes", "x", "label", "message"),
    WRONG_LABELS_OF_TASKS,
    ids=[f"{entry[0].__name__} {entry[3]!r:.20}" for entry in WRONG_LABELS_OF_TASKS],
)
def test_wrong_labels_of_other_tasks(weights, model_class, changes, x, label, message):
    options = {"max_seq_length": 12, **OPTIONS.get(model_class, {}), **changes}
    model = model_class.from_pretrained(weights, **options)
    check(message, model.evaluate, x, [label])


def test_wrong_rows_of_two_inputs(weights):
    model = TextRegressor.from_pretrained(weights, pairs=True, max_seq_length=12)
    check("x: expected 2 columns (text_a, text_b), as a tuple, a dict or", model.predict, ROWS)
    check("received 9 of text_a, 8 of text_b", model.predict, (ROWS, ROWS[:8]))
    check("columns text_a, text_b, received text_a", model.predict, {"text_a": ROWS})
    check("labels: expected a list", TokenClassifier.from_pretrained, weights, labels="THING")


@pytest.mark.slow
def test_a_batch_is_a_multiple_of_the_replicas_and_compile_works_outside(weights, mirrored):
    with mirrored.scope():
        model = TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
    model.compile(learning_rate=1e-2)
    check("batch_size=3: expected a multiple of the 2 replicas", model.fit, ROWS, NAMES, 3)
    token_ids = tf.data.Dataset.from_tensor_slices((dict(model.preprocessor(ROWS)), [0] * 9))
    check("batch_size=3: expected a multiple of the 2 replicas", model.fit, token_ids.batch(3))
    history = model.fit(ROWS, NAMES, batch_size=4, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_layers_are_frozen_with_functions_of_the_user(weights):
    def own(labels, logits):
        return tf.reduce_sum(logits, axis=-1)

    model = TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
    model.compile(AdamW(2e-5), own, metrics=[lambda labels, logits: own(labels, logits)])
    before, metrics = model.optimizer, model._compile_arguments["metrics"]
    model.freeze(1)
    assert model._step.losses["label"].function is own
    assert model._compile_arguments["metrics"] is metrics
    assert model.optimizer is not before and model.optimizer.get_config() == before.get_config()
    assert len(model.optimizer._adam_m) == len(model.trainable_variables) < len(before._adam_m)


def test_layers_are_frozen_outside_of_a_scope(weights, mirrored):
    with mirrored.scope():
        model = TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
    model.compile(learning_rate=1e-2)
    model.freeze(1)
    for variable in (*model.optimizer.variables, *model.loss_means.variables):
        assert mirrored.extended.variable_created_in_scope(variable.value), variable.path


@pytest.mark.parametrize("optimizer", [lambda: keras.optimizers.SGD(0.5), lambda: AdamW(0.5)])
def test_an_optimizer_from_outside_of_a_scope_is_refused(weights, mirrored, optimizer):
    """Otherwise each replica would add 1 to the same step, or Keras could make no moments."""
    with mirrored.scope():
        model = TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
        inside = optimizer()
    message = "optimizer: was created outside of the scope of the replicas; create it inside"
    check(message, model.compile, optimizer())
    model.compile(inside)
    assert model.optimizer is inside
    for variable in model.optimizer.variables:
        assert mirrored.extended.variable_created_in_scope(variable.value), variable.path


def test_a_model_from_outside_of_a_scope_is_not_trained_inside(weights, mirrored):
    model = TextClassifier.from_pretrained(weights, labels=LABELS, max_seq_length=12)
    message = "the model was created outside of the scope of this MirroredStrategy; create it ins"
    with mirrored.scope():
        check(f"compile: {message}", model.compile)
        check(f"fit: {message}", model.fit, ROWS, NAMES)
    assert isinstance(model, keras.Model) and not model.compiled


def test_a_model_is_saved_as_keras_saves_it(model, tmp_path):
    model.compile()
    model.save(tmp_path / "model.keras")
    assert type(keras.saving.load_model(tmp_path / "model.keras").optimizer) is AdamW
    ids = {name: values.numpy() for name, values in model.preprocessor(ROWS).items()}
    assert model.predict_on_batch(ids)["label"].shape == (9, 3)


def test_a_forked_process_is_told_to_load_its_own_model(model, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 0)
    for call in (model.predict, model.predict_rows, model.embed, model.tokenize):
        check("before this process was forked, without TensorFlow's threads", call, ROWS)
    for call in (model.fit, model.evaluate, model.tune):
        check("load the model here, or use multiprocessing's 'spawn'", call, ROWS, NAMES)
