"""Words and tags of tagging given in Python; rows may be empty."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.model.labelled_rows import examples_of
from tasks.types.tagging import TaggingTask

TASK = TaggingTask(max_seq_length=8, labels=("O", "B-X", "I-X"), doc_stride=2)
ENTITY = {"start": 0, "end": 4, "type": "X"}


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([["Anna"], []], [["B-X"], []]),
        ([[], ["Anna"]], [[], ["B-X"]]),
        ((["Anna"], []), (["B-X"], [])),
        ([np.array(["Anna"]), np.array([])], [np.array(["B-X"]), np.array([])]),
        (np.array([["Anna"], ["Rome"]]), np.array([["B-X"], ["O"]])),
        ({"text": [["Anna", "left"], "Rome"]}, [["B-X", "O"], ["B-X"]]),
    ],
)
def test_words_and_tags(x, y):
    examples = examples_of(TASK, x, y)
    rows = x["text"] if isinstance(x, dict) else x
    words = [[row] if isinstance(row, str) else list(row) for row in rows]
    if not isinstance(x, np.ndarray):
        assert examples.texts["text"] == [" ".join(row) for row in words]
    assert [label.tags for label in examples.labels] == [list(tags) for tags in y]


def test_entities_of_empty_texts():
    labels = examples_of(TASK, ["Anna", ""], [[ENTITY], []]).labels
    assert labels == [[(0, 4, "X")], []]
    assert examples_of(TASK, ["", ""], [[], []]).labels == [[], []]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (["Anna", "Rome"], [["O"], []], r"y\[1\]: expected a tag per word, as in other rows, rec"),
        (["Anna", "Rome"], [["O"], [ENTITY]], r"y\[1\]: expected a tag per word, as in other"),
        ([["Anna"], [3]], [["O"], ["O"]], r"x: text\[1\]: word: expected text, received 3"),
        ([["Anna"], 3], [["O"], ["O"]], r"x: text\[1\]: expected a string, received int 3"),
        ([["Anna"], []], [[3], []], r"y\[0\]: label 3: expected one of O, B-X, I-X"),
        ([["a", "b"]], [["O", None]], r"y\[0\]: label None: expected no missing value"),
        (
            ["Anna"],
            [(0, 4, "X")],
            r"y\[0\]: expected 1 tags, one per word, received 3",
        ),
        (
            [["Anna Lee", "left"]],
            [["B-X", "O"]],
            r"x: text\[0\]: word 'Anna Lee': expected words that are not empty and have no blank",
        ),
    ],
)
def test_rows_of_another_kind_are_refused(x, y, message):
    with pytest.raises(UserError, match=message):
        examples_of(TASK, x, y)
