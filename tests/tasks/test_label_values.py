"""Labels given in Python, which mean the same in lists and in the batches of a dataset."""

import enum
import re

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from bert_tf import UserError
from tasks.data.labels import LabelSpace
from tasks.model.fit_callback import training_errors
from tasks.model.labelled_rows import class_factors, examples_of
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.regression import RegressionTask
from tasks.types.tagging import TaggingTask

ABC = ("a", "b", "c")
NUMBERS = ("1", "2", "3")


def classes(labels, **options):
    return ClassificationTask(max_seq_length=8, labels=labels, **options)


def labels_of_rows(task, y):
    """Return the labels of rows in memory, as batches have them."""
    examples = examples_of(task, ["text"] * len(y), y)
    (labels,) = task.targets(examples, None)[0].values()
    return labels.tolist()


def labels_of_batch(task, y):
    """Return the labels of a dataset with one batch, in its graph."""
    batch_labels = tf.autograph.experimental.do_not_convert(task.batch_labels)
    dataset = tf.data.Dataset.from_tensors(y).map(batch_labels)
    with training_errors(None):
        return next(iter(dataset)).numpy().tolist()


BOTH = pytest.mark.parametrize("labels_of", [labels_of_rows, labels_of_batch])


@BOTH
@pytest.mark.parametrize(
    ("labels", "y", "expected"),
    [
        (ABC, np.array([2, 0, 1], "uint8"), [2, 0, 1]),
        (ABC, np.array([2, 0, 1], "int64"), [2, 0, 1]),
        (ABC, [2.0, 0.0], [2, 0]),
        (ABC, [True, False], [1, 0]),
        (ABC, np.array([[2], [0]]), [2, 0]),
        (ABC, ["\u00a0a", "b\u3000", "\u2028c", "a\u0085", " b\t"], [0, 1, 2, 0, 1]),
        # Labels that are integers: an integer is a name.
        (NUMBERS, [3, 1, 2], [2, 0, 1]),
        (NUMBERS, [1, 1], [0, 0]),
        (NUMBERS, [3.0], [2]),
        (NUMBERS, [True], [0]),
        (NUMBERS, ["3", "1"], [2, 0]),
        (("0", "1", "5"), [1, 5], [1, 2]),
        (("-1", "1"), [-1, 1], [0, 1]),
        (("1.0", "0.0"), [1, 0], [0, 1]),
        (("True", "False"), [True, False], [0, 1]),
        (("False", "True"), ["True", "False"], [1, 0]),
        # One label that is none, and an integer is an id.
        (("1", "2", "x"), [1, 2], [1, 2]),
        # One-hot.
        (ABC, np.array([[0, 0, 1], [0, 1, 0]]), [2, 1]),
        (ABC, np.array([[0, 0, 1], [0, 1, 0]], "float32"), [2, 1]),
        (("x", "y"), np.array([[0, 1], [1, 0]], bool), [1, 0]),
    ],
)
def test_a_label_is_a_name_or_an_id(labels_of, labels, y, expected):
    assert labels_of(classes(labels), y) == expected


@BOTH
@pytest.mark.parametrize(
    ("labels", "y", "bad", "message"),
    [
        (ABC, [0, 3], "3", "expected one of a, b, c, or an id from 0 to 2"),
        (ABC, [-1], "-1", "expected one of a, b, c, or an id from 0 to 2"),
        (ABC, ["c", "1"], "1", "expected one of a, b, c, or an id from 0 to 2"),
        (ABC, [0.5], "0.5", "expected one of a, b, c, or"),
        (ABC, [0.0, float("nan")], "nan", "expected"),
        (NUMBERS, [1, 0], "0", "expected one of 1, 2, 3"),
        (("1", "01"), [1], "1", "expected one of 1, 01"),
        (ABC, np.array([[0, 1, 1]]), "", "expected"),
        (ABC, np.array([[0.0, 0.5, 0.5]]), "0.5", "expected"),
    ],
)
def test_what_is_neither_is_refused(labels_of, labels, y, bad, message):
    with pytest.raises(UserError, match=rf"^y.*{re.escape(bad)}.*{message}[^\n]*$") as error:
        labels_of(classes(labels), y)
    if labels_of is labels_of_rows:
        assert str(error.value).startswith(f"y[{len(y) - 1}]: ")


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), "", pd.NA, pd.NaT])
def test_a_missing_value_is_no_label(missing):
    for of_kind in (ClassificationTask, TaggingTask):
        with pytest.raises(UserError, match=r"^labels\[1\]: expected a name, received .*drop rows"):
            of_kind.from_options(max_seq_length=8, labels=["a", missing, "b"])
    for options in ({}, {"multi_label": True}):
        task, y = classes(("None", "nan", "b"), **options), ["nan", missing]
        with pytest.raises(UserError, match=r"^y\[1\]: label "):
            examples_of(task, ["x"] * 2, [["nan"], missing] if options else y)
    with pytest.raises(UserError, match=r"^y\[0\]: row .*: expected 3 values, one per label, 0 or"):
        examples_of(task, ["x"], [[missing, 1, 0]])
    assert examples_of(classes(("None", "nan", "b")), ["x"] * 2, ["nan", "None"]).labels == [1, 0]


@BOTH
@pytest.mark.parametrize("name", ["int64", "int8", "bool", "float32"])
def test_rows_of_0_and_1_per_label_are_multi_hot(labels_of, name):
    y = np.array([[0, 0, 1], [1, 1, 0], [0, 0, 0]], name)
    for labels in (ABC, NUMBERS):
        assert labels_of(classes(labels, multi_label=True), y) == y.astype(int).tolist()
    assert labels_of(classes(("a", "b"), multi_label=True), [[0, 1], [1, 0]]) == [[0, 1], [1, 0]]


def test_lists_of_names_may_be_padded_and_ragged():
    task, expected = classes(NUMBERS, multi_label=True), [[1, 0, 0], [0, 0, 0], [0, 1, 1]]
    padded = [["1", ""], ["", ""], ["3", " 2"]]
    assert labels_of_rows(task, padded) == labels_of_batch(task, padded) == expected
    assert labels_of_rows(task, [["1"], [], ["3", "2"]]) == expected
    ragged = tf.ragged.constant([["1"], [], ["3", "2"]], tf.string)
    assert labels_of_batch(task, ragged) == expected


@BOTH
@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([[0, 2, 1]], "expected .*0 or 1"),
        ([[0.5, 0.0, 1.0]], "expected .*0 or 1"),
        ([[True, False]], "expected .*3"),
        ([["a", "x"]], "expected one of a, b, c"),
        (["a|b"], "expected .*list.* of names"),
        ([0, 1], "expected .*lists? of names"),
    ],
)
def test_other_rows_of_labels_are_refused(labels_of, y, message):
    with pytest.raises(UserError, match=rf"^y.*{message}"):
        labels_of(classes(ABC, multi_label=True), y)


def test_a_table_has_the_labels_as_columns():
    task = classes(ABC, multi_label=True)
    table = pd.DataFrame({"b": [0, 1], "c": [1, 0], "a": [True, False]})
    assert examples_of(task, ["x"] * 2, table).labels == [(0, 2), (1,)]
    with pytest.raises(
        UserError, match=r"^y: expected a table with the columns a, b, c, received b"
    ):
        examples_of(task, ["x"] * 2, table.drop(columns="a"))
    with pytest.raises(UserError, match=r"^y\[1\]: row \[0, 2, 0\]: expected 3 values"):
        examples_of(task, ["x"] * 2, table.assign(b=[0, 2], a=[1, 0]))


def test_labels_by_the_name_of_the_output():
    assert examples_of(classes(ABC), ["x", "y"], {"label": np.array([2, 0])}).labels == [2, 0]


@pytest.mark.parametrize("number", ["1e3", "-0.5", " 7 ", "1_000", "\uff11\uff12"])
def test_numbers_are_those_of_python(number):
    assert labels_of_rows(RegressionTask(max_seq_length=8), [number]) == [float(number)]


@BOTH
def test_numbers_of_regression(labels_of):
    task = RegressionTask(max_seq_length=8)
    assert labels_of(task, np.array([[0.5], [1]])) == [0.5, 1.0]
    assert labels_of(task, ["1e3", "-.5", " 7. "]) == [1000.0, -0.5, 7.0]
    assert labels_of(task, [True, False]) == [1.0, 0.0] if labels_of is labels_of_batch else True
    for bad in ("0x10", "inf", "nan", "1e39", "", "1,5", float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"^y.*: .*expected a number"):
            labels_of(task, [bad])
    with pytest.raises(UserError, match="from 0 to 1"):
        labels_of_batch(RegressionTask(max_seq_length=8, activation="sigmoid"), [0.5, 1.5])


def test_choices_in_a_batch_are_indices():
    task = MultipleChoiceTask(max_seq_length=8)
    assert labels_of_batch(task, np.array([2, 0], "int64")) == [2, 0]
    with pytest.raises(UserError, match="^y: received -1, expected the index of a choice$"):
        labels_of_batch(task, [0, -1])
    with pytest.raises(UserError, match="y: expected integers"):
        labels_of_batch(task, [0.0])


def test_labels_that_need_tokens_have_no_batches():
    task = TaggingTask.from_options(max_seq_length=8, labels=["PER"])
    with pytest.raises(
        UserError, match="x: a dataset of strings: expected lists, since labels of t"
    ):
        task.batch_labels(tf.constant(["O"]))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_are_numbers_of_at_least_0(weight):
    with pytest.raises(UserError, match=r"sample_weight\[1\]: expected a number >= 0, received"):
        examples_of(classes(ABC), ["x"] * 2, [0, 1], np.array([1, weight], np.float32))


def test_scalars_of_numpy_are_those_of_python():
    class Label(enum.IntEnum):
        C = 2

    task = classes(ABC)
    y = list(np.array([2, 0, 1]))
    assert examples_of(task, list(np.array(["x"] * 3)), y).labels == [2, 0, 1]
    assert examples_of(task, ["x"], [Label.C]).labels == [2]
    weights = class_factors(task, {np.int64(0): np.float32(2), np.str_("c"): 3})
    assert weights.tolist() == [2.0, 1.0, 3.0] and weights.dtype == np.float64
    regression = RegressionTask(max_seq_length=8)
    assert examples_of(regression, ["x"], [np.float32(0.5)]).labels == [0.5]


def test_class_weights_are_by_name_or_id():
    assert LabelSpace(NUMBERS).factors({3: 2.0, 1: 0.5}).tolist() == [0.5, 1.0, 2.0]
    assert LabelSpace(ABC).factors({2: 2.0, "a": 0}).tolist() == [0.0, 1.0, 2.0]
    given = {"class_weights": {"c": 2.5, 0: 0.1}}
    task = ClassificationTask.from_options(max_seq_length=8, labels=ABC, **given)
    assert task.class_weights == (0.1, 1.0, 2.5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, 0: 2.0}, "'a' and 0 are the same label; expected each once"),
        ({"x": 1.0}, "label 'x': expected one of a, b, c"),
        ({None: 1.0}, "label None: expected no missing value"),
        ({"a": float("nan")}, "'a': expected a number >= 0, received nan"),
        ({"a": None}, "'a': expected a number >= 0, received None"),
        ({"a": pd.NA}, "'a': expected a number >= 0, received <NA>"),
        ({"a": True}, "'a': expected a number >= 0, received True"),
        ([1.0, 2.0, 3.0], "expected a dict of label and weight, received"),
    ],
)
def test_other_class_weights_are_refused(weights, message):
    with pytest.raises(UserError, match=f"^class_weight: {re.escape(message)}"):
        LabelSpace(ABC).factors(weights)


def test_labels_of_all_rows_name_the_remedy():
    for of_kind in (ClassificationTask, TaggingTask):
        message = (
            r"^labels: expected each label once, received 3 .* 2 differ; pass sorted\(set\(y\)\)"
        )
        with pytest.raises(UserError, match=message):
            of_kind.from_options(max_seq_length=8, labels=["a", "b", "a"])
