"""Multiple choice in its three formats; answers as letters and numbers."""

import dataclasses
import json
import tracemalloc

import pytest

from bert_tf import UserError
from tasks.base.task_types import read_rows_of
from tasks.data.readers.choices import read_choices
from tasks.data.readers.rows import BadRow, Example, raise_bad_rows


def choice(prompt, choices, label, location):
    return Example({"prompt": prompt, "choices": choices}, label, location)


def read_json(path, *values, labelled=True):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(read_choices(path, labelled))


def test_swag_is_read(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(
        ",sent1,sent2,ending0,ending1,ending2,ending3,label\n"
        '0,She sits.,She,"plays, then rests.",b,c,d,0\n1,He.,,a,b,c,d,3\n2,He.,He,a,b,c,d,4\n'
        "3,He.,He,a,,c,d,1\n4,He.,He,a,b,c,d,\n"
    )
    first, second, *bad = read_choices(path, file_format="swag")
    choices = ["She plays, then rests.", "She b", "She c", "She d"]
    assert first == choice("She sits.", choices, 0, f"{path}:2")
    assert second == choice("He.", ["a", "b", "c", "d"], 3, f"{path}:3")
    assert [(row.location, row.message.partition(",")[0]) for row in bad] == [
        (f"{path}:4", "the answer '4': expected one of the 4 choices"),
        (f"{path}:5", "column 'ending1': expected a choice"),
        (f"{path}:6", "the answer '': expected one of the 4 choices"),
    ]
    test = tmp_path / "test.csv"
    test.write_text("sent1,sent2,ending0,ending1,ending2,ending3\nHe.,He,a,b,c,d\n")
    (row,) = read_choices(test, labelled=False, file_format="swag")
    assert row == choice("He.", ["He a", "He b", "He c", "He d"], None, f"{test}:2")
    with pytest.raises(UserError, match="test.csv:2: no column 'label'"):
        list(read_choices(test, file_format="swag"))


def test_arc_counts_from_one_and_takes_letters(tmp_path):
    path = tmp_path / "arc.csv"
    path.write_text(
        '"What, then?",a,"b\nb",c,d,C\nQ,a,b,2\nQ,a,b,c,a\nQ,a,b,c,E\nQ,a,b,c,0\nQ,a,b,c,4\n'
        "Q,,,,,1\nQ,a,A\nQ,a,b,,,B\nQ,a,b,,,C\nQ,a,,c,d,A\nQ,a,b,c,Ⅲ\n"
    )
    rows = list(read_choices(path, file_format="arc"))
    assert rows[:3] == [
        choice("What, then?", ["a", "b\nb", "c", "d"], 2, f"{path}:1"),
        choice("Q", ["a", "b"], 1, f"{path}:3"),
        choice("Q", ["a", "b", "c"], 0, f"{path}:4"),
    ]
    expected = "expected one of the 3 choices, as a letter from A or a number from 1"
    assert rows[3:] == [
        BadRow(f"{path}:5", f"the answer 'E': {expected}", is_known=True),
        BadRow(f"{path}:6", f"the answer '0': {expected}"),
        BadRow(f"{path}:7", f"the answer '4': {expected}"),
        BadRow(f"{path}:8", "expected at least two choices, received none", is_known=True),
        BadRow(
            f"{path}:9", "expected a question, at least 2 choices and the answer, received 3 fields"
        ),
        choice("Q", ["a", "b"], 1, f"{path}:10"),
        BadRow(f"{path}:11", f"the answer 'C': {expected.replace('3', '2')}", is_known=True),
        BadRow(f"{path}:12", "choice 2: expected text, received an empty string"),
        BadRow(f"{path}:13", f"the answer 'Ⅲ': {expected}"),
    ]
    unlabelled = list(read_choices(path, labelled=False, file_format="arc"))
    assert unlabelled[3] == choice("Q", ["a", "b", "c"], None, f"{path}:5")
    bad = BadRow(f"{path}:8", "expected at least two choices, received none", is_known=True)
    assert unlabelled[6] == bad
    task = {"kind": "multiple_choice", "file_format": "arc"}
    assert bad in read_rows_of({**task, "for_training": True}, path, labelled=False)
    assert dataclasses.replace(bad, is_known=False) in read_rows_of(task, path, labelled=False)


def test_the_same_mark_in_all_rows_of_arc_is_no_choice(tmp_path):
    path = tmp_path / "arc.csv"
    for mark, count in (("?", 3), ("-1", 3), ("d", 3)):
        path.write_text(f"Q,a,b,c,{mark}\nR,a,b,c,{mark}\n")
        rows = list(read_choices(path, labelled=False, file_format="arc"))
        assert [len(row.texts["choices"]) for row in rows] == [count, count]
    path.write_text("Q,a,b,c,ant\nR,a,b,c,bee\n")
    rows = list(read_choices(path, labelled=False, file_format="arc"))
    assert [len(row.texts["choices"]) for row in rows] == [4, 4]


def test_rows_of_arc_to_predict_are_not_kept(tmp_path):
    (tmp_path / "arc.csv").write_text("Q,ant,bee,cat\n" * 20_000)
    rows = read_choices(tmp_path / "arc.csv", labelled=False, file_format="arc")
    tracemalloc.start()
    try:
        next(rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # The fields of all rows have 7 MB.


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ({"label": 0}, 0),
        ({"label": 2}, 2),
        ({"label": "2"}, 2),
        ({"label": "B"}, 1),
        ({"answerKey": "B"}, 1),
        ({"answerKey": "1"}, 0),
        ({"answerKey": 3}, 2),
        ({"label": 3}, None),
        ({"label": -1}, None),
        ({"label": "D"}, None),
        ({"label": ""}, None),
        ({"label": True}, None),
        ({"label": 1.0}, None),
        ({"label": None}, None),
        ({"label": "9" * 5000}, None),
        ({"answerKey": 0}, None),
        ({"answerKey": "4"}, None),
        ({}, None),
        ({"label": 0, "answerKey": "A"}, None),
    ],
)
def test_answers_in_json_are_read(tmp_path, answer, label):
    path = tmp_path / "a.jsonl"
    (row,) = read_json(path, {"prompt": "Q", "choices": ["a", "b", "c"], **answer})
    if label is None:
        assert isinstance(row, BadRow) and row.location == f"{path}:1"
    else:
        assert row == choice("Q", ["a", "b", "c"], label, f"{path}:1")


def test_rows_may_differ_in_their_number_of_choices(tmp_path):
    arc = {
        "question": {
            "stem": "Q?",
            "choices": [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}],
        },
        "answerKey": "2",
    }
    path = tmp_path / "a.jsonl"
    rows = read_json(
        path,
        {"prompt": "P", "choices": ["a", "b"], "label": 0},
        {"question": "P", "choices": list("abcdefg"), "label": "G"},
        arc,
        {"prompt": "P", "choices": ["a"], "label": 0},
        {"prompt": "P", "choices": ["a", ""], "label": 0},
        {"prompt": "P", "choices": ["a", 1], "label": 0},
        {"prompt": "P", "choices": "ab", "label": 0},
        {"prompt": " ", "choices": ["a", "b"], "label": 0},
        {"prompt": 1, "choices": ["a", "b"], "label": 0},
        {"choices": ["a", "b"], "label": 0},
        {"prompt": "P", "choices": ["a", "\ud800"], "label": 0},
        {**arc, "question": {"stem": "Q?", "choices": arc["question"]["choices"][::-1]}},
    )
    assert rows[:3] == [
        choice("P", ["a", "b"], 0, f"{path}:1"),
        choice("P", list("abcdefg"), 6, f"{path}:2"),
        choice("Q?", ["a", "b"], 1, f"{path}:3"),
    ]
    assert [row.message for row in rows[3:]] == [
        "expected at least two choices, received 1",
        "choice 2: expected text, received an empty string",
        "choice 2: expected text, received 1",
        "'choices': expected a list of texts, received 'ab'",
        "the prompt: expected text, received an empty string",
        "the prompt: expected text, received 1",
        "expected 'prompt' or 'question', received 'choices', 'label'",
        "choice 2: expected text, received half of a surrogate pair",
        "choice 1: expected the labels A, B, ... in order, received '2'",
    ]
    (row,) = read_json(path, {"prompt": "P", "choices": ["a", "b"]}, labelled=False)
    assert row.label is None
    (row,) = read_json(path, {"prompt": "P", "choices": ["a"] * 4097}, labelled=False)
    assert row == BadRow(f"{path}:1", "expected at most 4,096 choices, received 4,097")


def test_missing_files_and_unknown_formats_are_reported(tmp_path):
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "a.jsonl").write_text("\n")
    for name, form, message in (
        ("a.csv", "race", "multiple choice file format 'race': expected one of swag, arc, rows"),
        ("b.csv", "arc", "b.csv: no such file"),
        ("a.csv", "rows", "a.csv: expected a file that ends in .jsonl"),
        ("a.jsonl", "arc", "a.jsonl: expected a file that ends in .csv"),
        ("a.csv", "arc", "a.csv: expected at least one row"),
        ("a.jsonl", "rows", "a.jsonl: expected at least one row"),
        ("a.csv", "swag", "a.csv: expected at least one row"),
    ):
        with pytest.raises(UserError, match=message):
            list(read_choices(tmp_path / name, file_format=form))


@pytest.mark.parametrize(
    ("name", "good", "of_three", "without_choices", "answer_is_none"),
    [("arc_easy_dev.csv", 2_147, 5, 102, 2), ("arc_challenge_dev.csv", 1_096, 1, 23, 0)],
)
def test_arc_is_read_completely(data_dir, name, good, of_three, without_choices, answer_is_none):
    """Count rows and errors; rows answered 1 to 4 have no choices here, so none is mapped."""
    rows = list(read_choices(data_dir / "multiple_choice" / name, file_format="arc"))
    messages = [row.message for row in rows if isinstance(row, BadRow)]
    assert len(rows) - len(messages) == good
    assert (
        sum(len(row.texts["choices"]) == 3 for row in rows if isinstance(row, Example)) == of_three
    )
    assert messages.count("expected at least two choices, received none") == without_choices
    assert sum(message.startswith("the answer 'E'") for message in messages) == answer_is_none
    assert len(messages) == without_choices + answer_is_none
    assert len(list(raise_bad_rows(rows))) == good


def test_a_bad_first_line_does_not_choose_the_format_of_rows_to_predict(tmp_path):
    path = tmp_path / "test.jsonl"
    row = {"sent1": "He.", "sent2": "He", **{f"ending{n}": "abcd"[n] for n in range(4)}}
    path.write_text(f'{{"sent1": \n{json.dumps(row)}\n')
    bad, good = read_choices(path, labelled=False, file_format="swag")
    assert bad.location == f"{path}:1"
    assert good == choice("He.", ["He a", "He b", "He c", "He d"], None, f"{path}:2")


def test_rows_of_arc_need_no_answers_to_be_predicted(tmp_path):
    path = tmp_path / "arc.csv"

    def choices_of(text):
        path.write_text(text)
        rows = read_choices(path, labelled=False, file_format="arc")
        return [row if isinstance(row, BadRow) else row.texts["choices"] for row in rows]

    assert choices_of("Q,ant,bee,cat\nQ,ant,bee,,\nQ,1,2,3\n") == [
        ["ant", "bee", "cat"],
        ["ant", "bee"],
        ["1", "2", "3"],
    ]
    assert choices_of("Q,7,8,9\nQ,ant,bee\n") == [["7", "8", "9"], ["ant", "bee"]]
    # The last choice may be the same in all rows.
    assert choices_of("Q,yes,no\nR,yes,no\n") == [["yes", "no"]] * 2
    assert choices_of("Q,-1,1\nR,x,y\n") == [["-1", "1"], ["x", "y"]]
    of_all = "none of them"
    assert choices_of(f"Q,a b,c d,{of_all}\nR,e f,g h,{of_all}\nS,i j,k l,,\n") == [
        *(["a b", "c d", of_all], ["e f", "g h", of_all], ["i j", "k l"]),
    ]
    # Answers may be missing, and a letter may be that of no choice, as in published rows.
    answered = "Q,ant,bee,cat,B\nQ,ant,bee,,2\nQ,ant,bee,cat,E\nQ,ant,bee,cat,\n"
    of_three = ["ant", "bee", "cat"]
    assert choices_of(answered) == [of_three, ["ant", "bee"], of_three, of_three]
    *_, bad = choices_of(f"{answered}Q,ant,bee,cat,dog\n")
    assert bad.location == f"{path}:5"
    assert bad.message.startswith("the last field 'dog': expected the answer, as in other rows")
    assert choices_of("Q,ant\n") == [
        BadRow(f"{path}:1", "expected at least two choices, received 1")
    ]
