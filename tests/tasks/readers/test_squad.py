"""Questions: both versions of SQuAD's JSON, rows, and one-line errors with the location."""

import copy
import json

import pytest

from bert_tf import UserError
from tasks.data.readers.rows import BadRow, Example, raise_bad_rows
from tasks.data.readers.squad import read_questions

CONTEXT = "caf\u00e9 \U0001f600 opened in 1997"
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Cafe",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "q0",
                            "question": "When?",
                            "answers": [
                                {"text": "1997", "answer_start": 17},
                                {"text": "in 1997", "answer_start": 14},
                            ],
                            "is_impossible": False,
                        },
                        {"id": "q1", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def is_exact(example):
    """Return whether the context contains each answer at its start."""
    context = example.texts["context"]
    return all(
        start >= 0 and context[start : start + len(text)] == text for text, start in example.label
    )


def test_both_versions_are_read(tmp_path):
    path = write(tmp_path / "dev.json", "\ufeff" + json.dumps(SQUAD))
    first, second = read_questions(path)
    answers = (("1997", 17), ("in 1997", 14))
    texts = {"question": "When?", "context": CONTEXT}
    assert first == Example(texts, answers, f"{path}: question q0", "q0")
    assert is_exact(first) and second.label == ()

    version1 = copy.deepcopy(SQUAD)
    qas = version1["data"][0]["paragraphs"][0]["qas"]
    del qas[1], qas[0]["is_impossible"]
    assert list(read_questions(write(path, version1))) == [first]
    del qas[0]["answers"]
    (unlabelled,) = read_questions(write(path, version1), labelled=False)
    assert unlabelled.label is None


def test_an_answer_at_another_position_is_kept_with_a_warning(tmp_path):
    path = tmp_path / "dev.json"
    for start in (16, -1, 1000):
        data = copy.deepcopy(SQUAD)
        data["data"][0]["paragraphs"][0]["qas"][0]["answers"][1]["answer_start"] = start
        first, _ = read_questions(write(path, data))
        assert first.label[1] == ("in 1997", start) and not is_exact(first)

    data["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "1", "answer_start": -4}]
    assert CONTEXT[-4:-3] == "1" and not is_exact(next(read_questions(write(path, data))))


# Path of the change, the new value (None removes it), and the error.
BROKEN = [
    ("data", None, 'dev.json: no "data"'),
    ("data", {}, 'dev.json: "data" is {}; expected a list'),
    ("data", [], "dev.json: expected at least one question"),
    ("data 0", "x", "dev.json: data[0]: expected an object, received 'x'"),
    ("data 0 paragraphs 0 context", None, 'data[0].paragraphs[0]: no "context"'),
    ("data 0 paragraphs 0 qas", None, 'dev.json: data[0].paragraphs[0]: no "qas"'),
    ("data 0 paragraphs 0 qas 1 question", None, 'data[0].paragraphs[0].qas[1]: no "question"'),
    ("data 0 paragraphs 0 qas 1 id", 5.5, '.qas[1]: "id" is 5.5; expected a string'),
    ("data 0 paragraphs 0 qas 0 answers", None, '.qas[0]: no "answers"'),
    ("data 0 paragraphs 0 qas 0 answers 1 text", None, '.qas[0].answers[1]: no "text"'),
    (
        "data 0 paragraphs 0 qas 0 answers 1 answer_start",
        "14",
        ".qas[0].answers[1]: \"answer_start\" is '14'; expected an integer",
    ),
    (
        "data 0 paragraphs 0 qas 0 answers 0 answer_start",
        True,
        'answers[0]: "answer_start" is True; expected an integer',
    ),
    ("data 0 paragraphs 0 qas 1 is_impossible", "yes", "is 'yes'; expected true or false"),
    (
        "data 0 paragraphs 0 qas 1 id",
        "q0",
        "question q0: expected a unique id, received 'q0' again",
    ),
]


@pytest.mark.parametrize(("position", "value", "message"), BROKEN)
def test_a_broken_file_is_reported_with_the_path_in_its_json(tmp_path, position, value, message):
    data = copy.deepcopy(SQUAD)
    *way, last = (int(key) if key.isdecimal() else key for key in position.split())
    node = data
    for key in way:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    with pytest.raises(UserError) as raised:
        list(read_questions(write(tmp_path / "dev.json", data)))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_files_of_other_formats_are_rejected(tmp_path):
    for content, message in (
        (b'{"data":\n [}', "dev.json:2: not JSON: Expecting value"),
        (b'{"data": "\xff"}', "dev.json: not UTF-8"),
        (b"[]", "dev.json: expected a JSON object, received list"),
        (b"[" * 100_000, "dev.json: not JSON"),
    ):
        (tmp_path / "dev.json").write_bytes(content)
        with pytest.raises(UserError, match=message):
            list(read_questions(tmp_path / "dev.json"))
    with pytest.raises(UserError, match="absent.json: no such file"):
        list(read_questions(tmp_path / "absent.json"))
    with pytest.raises(UserError, match=r"dev.txt: expected a file that ends in .json, .csv"):
        list(read_questions(write(tmp_path / "dev.txt", "")))


def test_a_bad_question_does_not_stop_the_others(tmp_path):
    data = copy.deepcopy(SQUAD)
    qas = data["data"][0]["paragraphs"][0]["qas"]
    qas[0]["question"] = "\ud83d"
    qas[1]["is_impossible"] = False
    qas.append({"id": "q2", "question": "\0", "answers": [], "is_impossible": True})
    qas.append({"id": "q4", "question": "?", "answers": [{"text": "", "answer_start": 0}]})
    qas.append({"id": "q5", "question": "?", "answers": qas[0]["answers"], "is_impossible": True})
    qas.append({"id": "q3", "question": "Who?", "answers": [], "is_impossible": True})
    path = write(tmp_path / "dev.json", data)
    *bad, good = read_questions(path)
    assert [str(row)[len(str(path)) :] for row in bad] == [
        ': question q0: "question": expected text, received half of a surrogate pair',
        ': question q1: expected an answer, or "is_impossible": true',
        ': question q2: "question": expected text, received a NUL character',
        ": question q4: an answer: expected text, received an empty string",
        ': question q5: expected no answers, since "is_impossible" is true',
    ]
    assert good.id == "q3"


def test_rows_are_read(tmp_path):
    path = write(
        tmp_path / "a.csv",
        'id,question,context,answer,answer_start\nx,When?,"in 1997, 1997",1997,9.0\n'
        ",When?,in 1997,1997,\n,Why?,in 1997,,\n,Who?,in 1997,Ann,\n,Who?,in 1997,Ann,first\n"
        ",Who?,in 1997,Ann,3.5\n",
    )
    *questions, bad, fraction = read_questions(path)
    assert [(question.id, question.label, is_exact(question)) for question in questions] == [
        ("x", (("1997", 9),), True),
        ("3", (("1997", 3),), True),
        ("4", (), True),
        ("5", (("Ann", -1),), False),
    ]
    assert questions[0].location == f"{path}:2"
    assert questions[0].texts["context"] == "in 1997, 1997"
    assert bad == BadRow(
        f"{path}:6", "column 'answer_start': expected an integer, received 'first'"
    )
    assert "expected an integer, received '3.5'" in fraction.message
    row = {"question": "Why?", "context": "in 1997", "answer_start": None}
    rows = "\n".join(json.dumps({**row, "answer": answer}) for answer in (None, "", []))
    null, empty, bad = read_questions(write(tmp_path / "null.jsonl", rows))
    assert null.label == empty.label == ()
    assert bad.message.startswith("column 'answer': expected")
    path = write(
        tmp_path / "a.jsonl", '{"question": "When?", "context": "in 1997"}\n{"context": 1}'
    )
    question, bad = read_questions(path, labelled=False)
    assert question.label is None
    assert bad == BadRow(f"{path}:2", "no column 'question'; the columns are 'context'")
    with pytest.raises(UserError, match="a.jsonl:1: no column 'answer'"):
        list(raise_bad_rows(read_questions(path)))


def test_questions_of_annotation_tools_are_read(tmp_path):
    data = copy.deepcopy(SQUAD)
    data["data"][0]["title"] = None
    qas = data["data"][0]["paragraphs"][0]["qas"]
    qas[0]["id"] = 7
    del qas[1]["answers"]
    path = write(tmp_path / "dev.json", data)
    first, second = read_questions(path)
    assert (first.id, first.location) == ("7", f"{path}: question 7")
    assert second.label == ()
    assert [question.id for question in read_questions(path, labelled=False)] == ["7", "q1"]


ROWS = [
    {
        "id": "q0",
        "title": "Cafe",
        "context": CONTEXT,
        "question": "When?",
        "answers": {"text": ["1997", "in 1997"], "answer_start": [17, 14]},
    },
    {"context": CONTEXT, "question": "Why?", "answers": {"text": [], "answer_start": []}},
    {"id": 5, "context": CONTEXT, "question": "?", "answers": {"text": ["1"]}},
    {"context": CONTEXT, "answers": {}},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_rows_of_datasets_are_read(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        import pyarrow

        answers = [{"answer_start": [], **row["answers"]} for row in ROWS]
        rows = [{**row, "answers": given} for row, given in zip(ROWS, answers, strict=True)]
        rows[2]["id"] = "5"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name == "a.json":
        write(path, {"version": "0.1", "data": ROWS})
    else:
        write(path, "\n".join(map(json.dumps, ROWS)))
    first, second, unequal, missing = read_questions(path)
    assert first.label == (("1997", 17), ("in 1997", 14)) and is_exact(first)
    assert first.id == "q0"
    assert second.label == ()
    assert second.id == ("data[1]" if name == "a.json" else "2")
    assert 'column \'answers\': expected {"text": [...], "answer_start": [...]}' in unequal.message
    expected = "expected text, received None" if name == "a.parquet" else "no column 'question'"
    assert expected in missing.message
    assert [getattr(item, "id", None) for item in read_questions(path, labelled=False)] == [
        *("q0", second.id, "5", None),
    ]


def test_json_lines_with_another_suffix_are_named(tmp_path):
    write(tmp_path / "a.json", "\n".join(map(json.dumps, ROWS)))
    with pytest.raises(UserError, match="a.json:2: not JSON: Extra data; .* the file .jsonl"):
        list(read_questions(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("name", "count", "has_impossible"),
    [
        ("train-v1.1.json", 7_539, False),
        ("dev-v1.1.json", 1_770, False),
        ("train-v2.0.json", 8_506, True),
        ("dev-v2.0.json", 1_389, True),
    ],
)
def test_squad_is_read_completely(data_dir, name, count, has_impossible):
    questions = list(raise_bad_rows(read_questions(data_dir / "squad" / name)))
    assert len(questions) == count
    assert any(question.label == () for question in questions) == has_impossible
    assert all(map(is_exact, questions))
