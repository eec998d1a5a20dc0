"""Readers of labelled text: each form, and one clear line for each way a file can be wrong."""

import pytest

from bert_tf import UserError
from tasks.rows import read_rows


def read(path, columns=("text", "label")):
    return [tuple(row.values.values()) for row in read_rows(path, columns)]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.csv", 'text,label\n"a, ""b""\nc",x\nd,y\n', [('a, "b"\nc', "x"), ("d", "y")]),
        ("a.csv", "\ufefftext,label\r\na,x\r\n", [("a", "x")]),
        ("a.csv", "id,label,text\n1,x,a\n", [("a", "x")]),
        ("a.tsv", 'text\tlabel\na "b\tx\n"c"\ty\n', [('a "b', "x"), ('"c"', "y")]),
        (
            "a.jsonl",
            '{"text": "a\\u00e9", "label": 1, "more": [2]}\n\n{"label": "y", "text": "b"}\n',
            [("aé", "1"), ("b", "y")],
        ),
    ],
)
def test_each_form_is_read_by_column_name(tmp_path, name, content, wanted):
    (tmp_path / name).write_bytes(content.encode())
    assert read(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv: no rows in it"),
        ("a.csv", b"text,label\n", "a.csv: no rows in it"),
        ("a.csv", b"words,label\na,x\n", "a.csv:2: no column 'text', there are: words, label"),
        ("a.csv", b"text,label\na,x\nb\n", "a.csv:3: column 'label' holds None"),
        ("a.csv", b"text,label\na,x,z\n", "a.csv:2: 1 more fields than the header's 2"),
        ("a.csv", b'text,label\n"a,x\n', "a.csv: in the row after line 1: unexpected end of data"),
        ("a.csv", b"text,label\n\xff,x\n", "a.csv: not UTF-8"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: holds a JSON list, wanted an object"),
        ("a.jsonl", b'{"text": ["a"], "label": "x"}\n', r"a.jsonl:1: column 'text' holds \['a'\]"),
        (
            "a.csv",
            b"text,label,text\na,x,b\n",
            "a.csv: two columns have one name: text, label, text",
        ),
        (
            "a.jsonl",
            b'{"text": "\\ud83d", "label": "x"}\n',
            "a.jsonl:1: column 'text' holds half of a surr",
        ),
        ("a.txt", b"a\n", "wanted a file that ends in .csv, .tsv, .jsonl"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="absent.csv: no such file"):
        read(tmp_path / "absent.csv")


def test_a_field_may_hold_a_megabyte(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\n{'a ' * 500_000},x\n")
    assert len(read(tmp_path / "a.csv")[0][0]) == 1_000_000
