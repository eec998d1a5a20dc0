"""Labels given in Python, which mean the same in lists and in the batches of a dataset."""

import enum

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from tasks.model import streaming
from tasks.model.labelled_rows import class_factors, examples_of
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.regression import RegressionTask
from tasks.types.tagging import TaggingTask

ABC = ("a", "b", "c")
NUMBERS = ("1", "2", "3")
TWO = ("a", "b")


def classes(labels, **options):
    return ClassificationTask(max_seq_length=8, labels=labels, **options)


def targets_of_rows(task, y, sample_weight=None):
    """Return labels and weights of rows in memory."""
    examples = examples_of(task, ["text"] * len(y), y, sample_weight)
    (labels,) = task.targets(examples, None)[0].values()
    return labels.tolist(), list(examples.weights)


def targets_of_batches(task, y, sample_weight=None):
    """Return labels and weights of a dataset with one batch."""
    columns = (["text"] * len(y), y, *([] if sample_weight is None else [sample_weight]))
    dataset = tf.data.Dataset.from_tensor_slices(columns).batch(len(y))
    dataset = dataset.map(
        lambda text, y, *weight: streaming.targets(task, {"text": text}, y, *weight)
    )
    with streaming.raising_row_errors():
        labels, weights = next(iter(dataset))
    (labels,), (weights,) = labels.values(), weights.values()
    return labels.numpy().tolist(), [] if sample_weight is None else weights.numpy().tolist()


BOTH = pytest.mark.parametrize("targets_of", [targets_of_rows, targets_of_batches])


@BOTH
@pytest.mark.parametrize("name", ["int8", "int16", "uint8", "uint16", "uint32", "int64"])
def test_ids_are_integers_of_any_size(targets_of, name):
    assert targets_of(classes(ABC), np.array([2, 0, 1], name))[0] == [2, 0, 1]


@BOTH
def test_white_space_around_names_is_stripped(targets_of):
    y = ["\u00a0a", "b\u3000", "\u2028c", "a\u0085", " b\t"]
    assert targets_of(classes(ABC), y)[0] == [0, 1, 2, 0, 1]


@BOTH
def test_names_may_be_booleans(targets_of):
    assert targets_of(classes(("False", "True")), np.array([True, False]))[0] == [1, 0]


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), ""])
def test_a_missing_value_is_no_label(missing):
    for of_kind in (ClassificationTask, TaggingTask):
        with pytest.raises(UserError, match=r"^labels\[1\]: expected a name, received .*drop rows"):
            of_kind.from_options(max_seq_length=8, labels=["a", missing, "b"])
    task = classes(("None", "nan", "b"))
    assert examples_of(task, ["x"] * 2, ["nan", "None"]).labels == [1, 0]
    with pytest.raises(UserError, match=r"y\[1\]: label .*: expected one of None, nan, b"):
        examples_of(task, ["x"] * 2, ["b", missing])


@BOTH
def test_an_axis_of_size_1_is_no_list(targets_of):
    assert targets_of(classes(ABC), np.array([[2], [0]]))[0] == [2, 0]
    assert targets_of(RegressionTask(max_seq_length=8), np.array([[0.5], [1]]))[0] == [0.5, 1]
    assert targets_of(classes(ABC), [2, 0], np.array([[0.5], [2]], np.float32))[1] == [0.5, 2]


@BOTH
def test_labels_by_the_name_of_the_output(targets_of):
    task, y = classes(ABC), np.array([2, 0])
    found = {
        targets_of_rows: lambda: examples_of(task, ["x", "y"], {"label": y}).labels,
        targets_of_batches: lambda: streaming.targets(
            task, {"text": tf.constant(["x", "y"])}, {"label": tf.constant(y)}
        )[0]["label"].numpy(),
    }[targets_of]()
    assert list(found) == [2, 0]


@BOTH
@pytest.mark.parametrize("number", ["1e3", "-0.5", " 7 ", "1_000", "\uff11\uff12"])
def test_numbers_are_those_of_python(targets_of, number):
    assert targets_of(RegressionTask(max_seq_length=8), [number])[0] == [float(number)]


@BOTH
@pytest.mark.parametrize("number", ["0x10", "inf", "nan", "1e39", "", "1,5"])
def test_other_numbers_are_refused(targets_of, number):
    with pytest.raises(UserError, match=r"^y(\[0\])?: label .*: expected a number"):
        targets_of(RegressionTask(max_seq_length=8), [number])


@BOTH
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_are_numbers_of_at_least_0(targets_of, weight):
    with pytest.raises(UserError, match=r"sample_weight\[1\]: expected a number >= 0, received"):
        targets_of(classes(ABC), [0, 1], np.array([1, weight], np.float32))


@BOTH
@pytest.mark.parametrize("name", ["int64", "int8", "bool", "float32"])
def test_rows_of_0_and_1_per_label_are_multi_hot(targets_of, name):
    y = np.array([[0, 0, 1], [1, 1, 0], [0, 0, 0]], name)
    assert targets_of(classes(ABC, multi_label=True), y)[0] == y.astype(int).tolist()


@BOTH
def test_padded_rows_are_ids(targets_of):
    y = [[0, 1, 2], [1, -1, -1], [-1, -1, -1]]
    expected = [[1, 1, 1], [0, 1, 0], [0, 0, 0]]
    assert targets_of(classes(ABC, multi_label=True), y)[0] == expected


def test_lists_of_ids_and_names():
    task = classes(ABC, multi_label=True)
    assert examples_of(task, ["x"] * 3, [[0], [], [2, 1]]).labels == [(0,), (), (2, 1)]
    assert examples_of(task, ["x"] * 3, [["a"], None, ["c", "b"]]).labels == [(0,), (), (2, 1)]
    assert examples_of(task, ["x"], [np.array([2, 1])]).labels == [(2, 1)]
    batch = streaming.targets(task, {"text": tf.constant(["x"] * 2)}, tf.ragged.constant([[2], []]))
    assert batch[0]["label"].numpy().tolist() == [[0, 0, 1], [0, 0, 0]]


@BOTH
def test_multi_hot_rows_of_two_labels_must_not_be_ids_too(targets_of):
    task = classes(TWO, multi_label=True)
    with pytest.raises(UserError, match=r"y: rows such as \[0, 1\] may be ids or multi-hot; pass"):
        targets_of(task, [[0, 1], [1, 0]])
    assert targets_of(task, np.array([[0, 1], [1, 0]], bool))[0] == [[0, 1], [1, 0]]


def test_one_row_of_two_labels_gives_the_others_their_meaning():
    task = classes(TWO, multi_label=True)
    # No row has an id twice.
    assert targets_of_rows(task, [[0, 1], [0, 0]])[0] == [[0, 1], [0, 0]]
    assert targets_of_rows(task, [[1, -1], [0, 1]])[0] == [[0, 1], [1, 1]]


@pytest.mark.parametrize("y", [[[0, 1], [0, 0]], [[1, -1], [0, 1]], [[1], [0]]])
def test_a_batch_does_not_know_the_rows_of_others(y):
    with pytest.raises(UserError, match=r"y: rows such as .* may be ids or multi-hot; pass names"):
        targets_of_batches(classes(TWO, multi_label=True), y)


@BOTH
@pytest.mark.parametrize("y", [[[0.5, 0, 1]], [[True, False]], [[0.0, 1.0, 2.0]]])
def test_multi_hot_rows_have_0_or_1_per_label(targets_of, y):
    with pytest.raises(UserError, match="y: expected names, ids, or 3 values per row that are 0"):
        targets_of(classes(ABC, multi_label=True), y)


@BOTH
def test_a_row_has_no_id_twice(targets_of):
    with pytest.raises(UserError, match=r"labels \[0, 0, 2\]: expected each id once"):
        targets_of(classes(ABC, multi_label=True), [[0, 0, 2], [0, 0, 1]])


@pytest.mark.parametrize(
    ("labels", "y", "expected"),
    [
        (NUMBERS, [0, 1, 2], [0, 1, 2]),  # 0 is no name.
        (NUMBERS, [3, 1, 2], [2, 0, 1]),  # 3 is no id.
        (NUMBERS, ["3", "1"], [2, 0]),
        (("0", "1", "2"), [2, 0], [2, 0]),  # Names and ids are the same.
        (("0", "1", "5"), [1, 0], [1, 0]),
        (ABC, ["c", 1], [2, 1]),
        (("-1", "1"), [-1, 1], [0, 1]),
    ],
)
def test_integers_have_one_meaning(labels, y, expected):
    assert targets_of_rows(classes(labels), y)[0] == expected
    rows = [[value] for value in y]
    labels_of_rows = examples_of(classes(labels, multi_label=True), ["x"] * len(y), rows).labels
    if -1 not in y:  # Which is padding.
        assert labels_of_rows == [(value,) for value in expected]


@pytest.mark.parametrize("y", [[1, 2], [[1], [2]]])
def test_integers_that_may_be_ids_and_names_are_refused(y):
    message = "y: integers may be ids or names of the labels 1, 2, 3; pass names as strings"
    with pytest.raises(UserError, match=message):
        targets_of_rows(classes(NUMBERS, multi_label=isinstance(y[0], list)), y)


def test_a_batch_does_not_know_the_integers_of_others():
    with pytest.raises(UserError, match="y: integers may be ids or names of the labels 1, 2, 3"):
        targets_of_batches(classes(NUMBERS), [0, 1])
    assert targets_of_batches(classes(NUMBERS), ["1", "3"])[0] == [0, 2]
    assert targets_of_batches(classes(("0", "1", "2")), [2, 0])[0] == [2, 0]


def test_scalars_of_numpy_are_those_of_python():
    class Label(enum.IntEnum):
        C = 2

    task = classes(ABC)
    y = list(np.array([2, 0, 1]))
    assert examples_of(task, list(np.array(["x"] * 3)), y).labels == [2, 0, 1]
    assert examples_of(task, ["x"], [Label.C]).labels == [2]
    assert class_factors(task, {np.int64(0): np.float32(2), np.str_("c"): 3}) == {0: 2.0, 2: 3.0}
    regression = RegressionTask(max_seq_length=8)
    assert examples_of(regression, ["x"], [np.float32(0.5)]).labels == [0.5]


def test_class_weights_have_one_meaning():
    assert class_factors(classes(NUMBERS), {3: 2.0, 1: 1.0}) == {2: 2.0, 0: 1.0}
    with pytest.raises(UserError, match="class_weight: integers may be ids or names of the labels"):
        class_factors(classes(NUMBERS), {1: 2.0})
