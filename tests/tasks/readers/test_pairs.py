"""Labelled rows of embedders: which columns a file has, and texts without labels."""

import json

import pytest

from bert_tf import UserError
from tasks.data.readers.pairs import PAIR_COLUMNS, read_pairs
from tasks.data.readers.rows import raise_bad_rows

TEACHER = {"has_teacher": True}


def read(task, path):
    return [(row.texts["text"], row.label) for row in raise_bad_rows(read_pairs(path, **task))]


@pytest.fixture
def write(tmp_path):
    def write(text, name="rows.csv"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_texts_need_no_labels_if_there_is_a_teacher(write):
    assert read(TEACHER, write("text\na\nb\n")) == [(["a"], None), (["b"], None)]
    assert read(TEACHER, write("text,label\na,x\n")) == [(["a"], "x")]
    assert read({**TEACHER, "text_columns": ("body",)}, write("body\na\n")) == [(["a"], None)]
    with pytest.raises(UserError, match="expected the columns anchor and positive"):
        read({}, write("text\na\n"))


def test_a_label_column_that_is_named_has_to_be_there(write):
    path = write("text,topic\na,x\n")
    assert read({**TEACHER, "label_column": "topic"}, path) == [(["a"], "x")]
    with pytest.raises(UserError, match=r"rows\.csv:2: no column 'tpoic'"):
        read({**TEACHER, "label_column": "tpoic"}, path)


def test_labels_after_a_first_row_without_one_are_errors(write):
    for name in ("label", "score"):
        lines = json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b", name: "x"}) + "\n"
        with pytest.raises(UserError, match=rf"rows\.jsonl:2: column '{name}': expected none"):
            read(TEACHER, write(lines, "rows.jsonl"))


def test_a_teacher_does_not_turn_pairs_into_texts(write):
    assert read(TEACHER, write("text,anchor,positive\na,b,c\n")) == [(["b", "c"], None)]


def test_a_bad_first_row_is_named_and_the_columns_are_those_of_the_next(write):
    """Otherwise the message would say that the file has no columns."""
    path = write("anchor,positive\na,b,c\nd,e\n")
    bad, good = read_pairs(path)
    assert bad.location == f"{path}:2" and "expected 2 fields" in bad.message
    assert good.texts == {"text": ["d", "e"]}
    bad, good = read_pairs(write('{"anchor": \n{"anchor": "d", "positive": "e"}\n', "rows.jsonl"))
    assert bad.location.endswith("rows.jsonl:1") and good.texts == {"text": ["d", "e"]}
    with pytest.raises(UserError, match=r"rows\.csv:2: expected 2 fields"):
        list(read_pairs(write("anchor,positive\na,b,c\n")))


def test_rows_of_json_may_have_more_negatives_than_the_first_one(write):
    rows = [{}, {"negative_1": "c"}, {"negative_1": "d", "negative_2": "e"}]
    lines = "".join(json.dumps({"anchor": "a", "positive": "b", **row}) + "\n" for row in rows)
    texts = [row for row, _ in read({}, write(lines, "rows.jsonl"))]
    assert texts == [["a", "b"], ["a", "b", "c"], ["a", "b", "d", "e"]]


def test_names_of_columns_do_not_change_what_is_learned(write):
    scored, named = write("s1,s2,score\na,b,0.5\n"), {"text_columns": ("s1", "s2")}
    assert read(named, scored) == [(["a", "b"], "0.5")]
    assert read(named, write("s1,s2,label\na,b,1\n", "label.csv")) == [(["a", "b"], "1")]
    assert read(named, write("s1,s2,negative\na,b,c\n", "n.csv")) == [(["a", "b", "c"], None)]
    with_negatives = write("s1,s2,n,score\na,b,c,1\n", "both.csv")
    assert read({**named, "negatives_column": "n"}, with_negatives) == [(["a", "b", "c"], None)]
    anchors = write("anchor,positive,score\na,b,0.5\n", "anchors.csv")
    columns = {"text_columns": PAIR_COLUMNS}
    assert read({**columns, "label_column": "score"}, anchors) == [(["a", "b"], "0.5")]


@pytest.mark.parametrize("task", [{}, TEACHER, {"text_columns": PAIR_COLUMNS}, {"loss": "cosent"}])
@pytest.mark.parametrize("name", ["label", "score"])
def test_labels_of_anchors_and_positives_are_not_ignored(write, task, name):
    """Pairs that were mined with labels have negatives among their positives."""
    path = write(f"anchor,positive,{name}\nq,a,1\nq,b,0\n")
    with pytest.raises(UserError, match=rf"without '{name}'.* --label_column={name}; otherwise"):
        read(task, path)


def test_labels_of_rows_with_negatives_are_ignored(write):
    """Files of sentence-transformers have the scores of all texts of a row."""
    path = write("anchor,positive,negative_1,score\na,b,c,0.5\n")
    assert read({}, path) == [(["a", "b", "c"], None)]
    path = write("anchor,positive,other,score\na,b,c,0.5\n", "other.csv")
    assert read({"negatives_column": "other"}, path) == [(["a", "b", "c"], None)]


def test_the_loss_of_a_run_says_whether_its_pairs_have_scores(write):
    scored, run = write("s1,s2,score\na,b,0.5\n"), {"pair_columns": ["s1", "s2"]}
    # Those that do not fit each other may be no positives.
    with pytest.raises(UserError, match="columns s1 and s2 without 'score'. The loss contrastive"):
        read({**run, "loss": "contrastive"}, scored)
    with pytest.raises(UserError, match="no column 's1'; the columns are 'text_a', 'text_b'"):
        read({**run, "loss": "contrastive"}, write("text_a,text_b,score\na,b,0.5\n", "other.csv"))
    negative = write("s1,s2,score,negative\na,b,0.5,c\n", "negative.csv")
    assert read({**run, "loss": "triplet"}, negative) == [(["a", "b", "c"], None)]
    assert read({**run, "loss": "cosine"}, scored) == [(["a", "b"], "0.5")]
    with pytest.raises(UserError, match=r"pairs\.csv:2: no column 'score'"):
        read({**run, "loss": "cosent"}, write("s1,s2\na,b\n", "pairs.csv"))
    anchors, run = write("anchor,positive,score\na,b,0.5\n", "anchors.csv"), {"pair_columns": []}
    with pytest.raises(UserError, match="anchor and positive without 'score'. The loss triplet"):
        read({**run, "loss": "triplet"}, anchors)
