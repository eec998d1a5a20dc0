"""Reader of rankings: its three forms of rows, groups of pairs, and bad rows."""

import json

import pytest

from bert_tf import UserError
from tasks.data.readers.ranking import read_rankings
from tasks.data.readers.rows import MAX_CHOICES, BadRow


def read(path, labelled=True):
    rows = list(read_rankings(path, labelled))
    assert not any(isinstance(row, BadRow) for row in rows), rows
    return [(row.texts["query"], row.texts["texts"], row.label, row.location) for row in rows]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_of_a_query_are_one_example(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("query,text,relevance\nq,a,1\nr,b,0\nq,c,0\nr,d,2\nq,a,1\n")
    assert read(path) == [
        ("q", ["a", "c", "a"], ["1", "0", "1"], f"{path}:2"),
        ("r", ["b", "d"], ["0", "2"], f"{path}:3"),
    ]
    path.write_text("query,text\nq,a\nr,b\nq,c\n")
    rows = [("q", ["a", "c"], None, f"{path}:2"), ("r", ["b"], None, f"{path}:3")]
    assert read(path, labelled=False) == rows


def test_a_row_may_have_all_texts(tmp_path):
    rows = [
        {"query": "q", "texts": ["a", "b"], "relevances": [1, 0.5]},
        {"anchor": "q", "positive": "c", "negatives": ["d", "e"]},
        {"query": "r", "text": "f", "relevance": 1},
        {"query": "s", "texts": ["g", "h"], "relevances": ["0", 1]},
        {"query": "r", "text": "i", "relevance": 0},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    assert [row[:3] for row in read(path)] == [
        ("q", ["a", "b"], ["1", "0.5"]),
        ("q", ["c", "d", "e"], ["1", "0", "0"]),
        ("r", ["f", "i"], ["1", "0"]),
        ("s", ["g", "h"], ["0", "1"]),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q"}, "received 'query'"),
        ({"query": "q", "text": "a"}, "relevance: expected a number, received None"),
        ({"query": " ", "text": "a", "relevance": 1}, "'query': expected text"),
        ({"query": "q", "texts": ["a", ""], "relevances": [1, 0]}, "text 2: expected text"),
        ({"query": "q", "texts": [], "relevances": []}, "'texts': expected a list of texts"),
        ({"query": "q", "texts": ["a"], "relevances": [1, 0]}, "expected a list of 1 numbers"),
        ({"query": "q", "texts": ["a"], "relevances": [True]}, "expected a number, received True"),
        ({"query": "q", "positive": "a", "negatives": "b"}, "'negatives': expected a list"),
    ],
)
def test_bad_rows_are_returned_with_their_line(tmp_path, row, message):
    good = {"query": "q", "texts": ["a", "b"], "relevances": [1, 0]}
    path = write(tmp_path / "a.jsonl", [good, row, good])
    _, bad, _ = read_rankings(path)
    assert isinstance(bad, BadRow) and bad.location == f"{path}:2" and message in bad.message


@pytest.mark.parametrize("relevance", ["yes", "", "nan"])
def test_a_relevance_that_is_no_number_is_an_error_of_its_own_row(tmp_path, relevance):
    """Not of the first row of the query."""
    path = tmp_path / "a.csv"
    path.write_text(f"query,text,relevance\nq,a,1\nr,b,0\nq,c,{relevance}\nq,d,0\n")
    *rows, bad = read_rankings(path)
    assert [row.texts["texts"] for row in rows] == [["a", "d"], ["b"]]
    assert str(bad) == f"{path}:4: relevance: expected a number, received {relevance!r}"


def test_a_table_without_a_column_is_rejected(tmp_path):
    (tmp_path / "a.tsv").write_text("query\ttext\nq\ta\n")
    with pytest.raises(UserError, match="no column 'relevance'"):
        read(tmp_path / "a.tsv")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="expected at least one row"):
        read(tmp_path / "a.jsonl")


def test_lists_of_one_text_are_rows_of_their_own(tmp_path):
    rows = [
        {"query": "q", "texts": ["a"], "relevances": [1]},
        {"query": "q", "texts": ["b"], "relevances": [0]},
        {"anchor": "q", "positive": "c", "negatives": []},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    assert [row.texts["texts"] for row in read_rankings(path)] == [["a"], ["b"], ["c"]]
    assert [row.label for row in read_rankings(path, labelled=False)] == [None] * 3


@pytest.mark.parametrize("name", ["pairs.csv", "lists.jsonl"])
def test_a_query_has_a_maximum_of_texts_but_in_training(tmp_path, name):
    path, count = tmp_path / name, MAX_CHOICES + 1
    if name == "pairs.csv":
        rows = ["r,b,1", *["q,a,0"] * count]
        path.write_text("\n".join(["query,text,relevance", *rows]) + "\n")
    else:
        lists = {"query": "q", "texts": ["a"] * count, "relevances": [0] * count}
        write(path, [{"query": "r", "text": "b", "relevance": 1}, lists])
    for labelled in (True, False):
        good, bad = read_rankings(path, labelled)
        assert good.texts == {"query": "r", "texts": ["b"]} and bad.location[-2:] in (":2", ":3")
        assert bad.message == "expected at most 4,096 texts per query, received 4,097"
    rows = read_rankings(path, for_training=True)
    assert [len(row.texts["texts"]) for row in rows] == [1, count]
