"""Readers of labelled text: each format, and one-line errors for every kind of damage."""

import csv
import json
import random
import subprocess
import sys

import pytest

from bert_tf import UserError
from tasks.data.readers.glue import read_glue
from tasks.data.readers.pairs import read_pairs
from tasks.data.readers.rows import BadRow, Example, raise_bad_rows, read_rows, read_texts
from tests.conftest import ROOT
from tests.rows import as_others_write


def read(path, columns=("text", "label"), **options):
    return [
        tuple(row.texts.values()) for row in raise_bad_rows(read_rows(path, columns, **options))
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'text,label\n"a, ""b""\nc",x\nd,y\n', [('a, "b"\nc', "x"), ("d", "y")]),
        ("a.csv", "\ufefftext,label\r\na,x\r\n", [("a", "x")]),
        ("a.csv", "id,label,text\n1,x,a\n", [("a", "x")]),
        ("a.csv", "text,label\ra,x\rb,y", [("a", "x"), ("b", "y")]),
        ("a.tsv", 'text\tlabel\na "b\tx\n"c"\ty\n', [('a "b', "x"), ('"c"', "y")]),
        (
            "a.jsonl",
            '{"text": "a\\u00e9", "label": 1, "more": [2]}\n\n{"label": "y", "text": "b"}\n',
            [("aé", "1"), ("b", "y")],
        ),
    ],
)
def test_each_format_is_read_by_column_name(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content.encode())
    assert read(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv: expected at least one row"),
        ("a.csv", b"text,label\n", "a.csv: expected at least one row"),
        (
            "a.csv",
            b"words,label\na,x\n",
            "a.csv:2: no column 'text'; the columns are 'words', 'lab",
        ),
        ("a.csv", b"text , label\na,x\n", "no column 'text'; the columns are 'text ', ' label'$"),
        ("a.csv", b"text\tlabel\na\tx\n", r"are 'text\\tlabel'; .* by tabs: name the file .tsv"),
        ("a.csv", b"text;label\na;x\n", "'text;label'; they seem to be separated by semicolons: "),
        ("a.csv", b"text|label\na|x\n", "separated by vertical bars: save the file with commas"),
        ("a.tsv", b"text,label\na,x\n", "separated by commas: name the file .csv"),
        ("a.csv", b"sep=;\ntext;label\na;x\n", "the first line names a separator: remove it"),
        ("a.csv", b"sep=,\ntext,label\n", "the first line names a separator: remove it"),
        ("a.csv", b'"text";"label"\n"a";"x"\n', "a.csv:1: expected column names, separated by com"),
        ("a.csv", b"text,label,,\na,x,,\n", "a.csv:1: columns 3 and 4 have no name; name them, or"),
        (
            "a.csv",
            b"text,label\na,x\nb\n",
            "a.csv:3: expected 2 fields as in the header, received 1",
        ),
        (
            "a.csv",
            b"text,label\na,x,z\n",
            "a.csv:2: expected 2 fields as in the header, received 3",
        ),
        ("a.csv", b'text,label\n"a,x\n', "a.csv: in the row after line 1: unexpected end of data"),
        ("a.csv", b"text,label\n\xff,x\n", "a.csv: not UTF-8"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: expected a JSON object, received a list"),
        (
            "a.jsonl",
            b'{"text": ["a"], "label": "x"}\n',
            r"a.jsonl:1: column 'text': expected text, received \['a'\]",
        ),
        (
            "a.csv",
            b"text,label,text\na,x,b\n",
            "a.csv:1: columns 1 and 3 are named 'text'; expected distinct names",
        ),
        (
            "a.jsonl",
            b'{"text": "\\ud83d", "label": "x"}\n',
            "a.jsonl:1: column 'text': expected text, received half of a surr",
        ),
        ("a.txt", b"a\n", "expected a file that ends in .csv, .tsv, .jsonl"),
    ],
)
def test_bad_rows_are_reported_with_their_location(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_quotes_after_a_blank_are_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        'label,text\nx, "my bill"\nx,\t"a, b"\nx," ""said"" c"\n"x, ""y"""," d"\n"x", e "f"\n'
    )
    rows = list(read_rows(path, ("label", "text")))
    assert [getattr(row, "texts", row.location) for row in rows if row.location] == [
        f"{path}:2",
        f"{path}:3",
        {"label": "x", "text": ' "said" c'},
        {"label": 'x, "y"', "text": " d"},
        {"label": "x", "text": ' e "f"'},
    ]
    assert rows[0].message.startswith("a blank before the quote in ' \"my bill\"'")
    path.write_text('label, "text"\nx,a\n')
    with pytest.raises(UserError, match="a.csv:1: expected column names, .* a blank before the"):
        list(read_rows(path, ("label", "text")))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'text,label\n"é a",x\nb,y\n'),
        ("a.tsv", "text\tlabel\né a\tx\nb\ty\n"),
        ("a.jsonl", '{"text": "é a", "label": "x"}\n{"text": "b", "label": "y"}\n'),
    ],
)
def test_mark_and_line_ends_do_not_change_rows(tmp_path, name, text):
    for form, data in as_others_write(text).items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == [("é a", "x"), ("b", "y")], form


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(UserError, match="absent.csv: no such file"):
        read(tmp_path / "absent.csv")


def test_a_field_may_hold_a_megabyte(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\n{'a ' * 500_000},x\n")
    assert len(read(tmp_path / "a.csv")[0][0]) == 1_000_000


def test_a_row_has_the_line_of_its_start_and_a_bad_one_does_not_stop_the_others(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,label\r\n"two\r\nlines",x\r\n\r\na,x,more\r\nb\r\n"c"d,x\r\nno\0text,x\r\n'
        b'"e ""f""",y'
    )
    assert list(read_rows(path, ("label", "text"))) == [
        Example({"label": "x", "text": "two\r\nlines"}, None, f"{path}:2"),
        BadRow(f"{path}:5", "expected 2 fields as in the header, received 3"),
        BadRow(
            f"{path}:6",
            "expected 2 fields as in the header, received 1; the first missing column is 'label'",
        ),
        BadRow(f"{path}:7", "',' expected after '\"'; a quote in a quoted field has to be doubled"),
        BadRow(f"{path}:8", "column 'text': expected text, received a NUL character"),
        Example({"label": "y", "text": 'e "f"'}, None, f"{path}:9"),
    ]


def test_a_short_row_is_bad_although_its_missing_column_is_not_requested(tmp_path):
    path = tmp_path / "a.tsv"
    # In a format other than .tsv, this would be one row.
    path.write_text("text\tlabel\na text with\na line end\tx\n")
    assert [str(row) for row in read_rows(path, ("text",))] == [
        f"{path}:2: expected 2 fields as in the header, received 1; the first missing column is "
        "'label'",
        str(Example({"text": "a line end"}, None, f"{path}:3")),
    ]


@pytest.mark.parametrize("ending", ["", "\n", "\n\n"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_blank_line_is_an_empty_text_if_the_text_is_the_only_column(tmp_path, suffix, ending):
    path = tmp_path / f"a{suffix}"
    path.write_text(f"\ntext\n\na\n\n\nb{ending}")
    rows = [
        (row.texts["text"], row.location.rpartition(":")[2]) for row in read_rows(path, ["text"])
    ]
    expected = [("", "3"), ("a", "4"), ("", "5"), ("", "6"), ("b", "7"), ("", "8")]
    assert rows == expected[: 6 if ending == "\n\n" else 5]
    # With other columns it is skipped, as it would be a bad row.
    path.write_text("text,label\n\na,x\n\n".replace(",", "," if suffix == ".csv" else "\t"))
    assert [row.location for row in read_rows(path, ["text"])] == [f"{path}:3"]


def test_tsv_ends_lines_at_line_feeds_only_and_jsonl_allows_blank_lines(tmp_path):
    (tmp_path / "a.tsv").write_bytes("text\tlabel\r\na\rb\u2028c\x85\tx\r\n\r\nd\ty".encode())
    assert read(tmp_path / "a.tsv") == [("a\rb\u2028c\x85", "x"), ("d", "y")]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n \r\n{"text": "b"}')
    rows = list(read_rows(tmp_path / "a.jsonl", ("text",)))
    assert [(row.texts["text"], row.location[-2:]) for row in rows] == [("a", ":1"), ("b", ":3")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"a"', "a"),
        ("1", "1"),
        ("1.50", "1.50"),
        ("-2e400", "-2e400"),
        ("9" * 5000, "9" * 5000),
        ("true", "column 'text': expected text, received True"),
        ("null", "column 'text': expected text, received None"),
        ("{}", "column 'text': expected text, received {}"),
        ("NaN", "not JSON: NaN is not a JSON number"),
        ("[" * 100_000, "not JSON: "),
        (r'"\u0000"', "column 'text': expected text, received a NUL character"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\ude00\ud83d"', "column 'text': expected text, received half of a surrogate pair"),
    ],
)
def test_json_values_are_converted_or_rejected(tmp_path, value, expected):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": {value}}}\n')
    (row,) = read_rows(path, ("text",))
    if isinstance(row, Example):
        assert row.texts["text"] == expected
    else:
        assert row.location == f"{path}:1" and row.message.startswith(expected)


def test_lists_of_labels_and_optional_columns_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a &amp; b &#8220;", "label": ["x", "&amp;"], "id": 7}\n'
        '{"text": "c", "label": []}\n{"text": "d", "label": "&lt;", "id": null}\n'
        '{"text": "e", "label": ["x", null]}\n'
    )
    rows = list(read_rows(path, ("text", "label"), lists=("label",), optional=("id", "no")))
    assert [row.texts for row in rows[:3]] == [
        {"text": "a &amp; b &#8220;", "label": ["x", "&amp;"], "id": "7"},
        {"text": "c", "label": []},
        {"text": "d", "label": "&lt;"},
    ]
    assert rows[3] == BadRow(
        f"{path}:4", "column 'label': expected text or a list of texts, received ['x', None]"
    )


def test_texts_are_those_that_a_request_with_them_has(tmp_path):
    """Whatever is done to a text is done in the served graph; here two blanks and an entity."""
    text, (path, qqp) = " AT&amp;T  Ça ", (tmp_path / "a.csv", tmp_path / "test.tsv")
    path.write_text(f"text,label,anchor,positive,negative\n{text},x{f',{text}' * 3}\n")
    qqp.write_text(f"id\tquestion1\tquestion2\n1\t{text}\t{text}\n")
    assert [row.texts for row in read_texts(path)] == [{"text": text}]
    assert [row.texts for row in read_pairs(path)] == [{"text": [text] * 3}]
    (row,) = read_glue(qqp, labelled=False, file_format="qqp")
    assert row.texts == {"text_a": text, "text_b": text}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_numbers_in_lists_of_labels_are_text(tmp_path, suffix):
    path, rows = tmp_path / f"a{suffix}", [{"text": "a", "label": [0, 12]}]
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows[0]))
    (row,) = read_rows(path, ("text", "label"), lists=("label",))
    assert row.texts["label"] == ["0", "12"]


def test_bytes_that_are_no_utf_8_are_reported_with_their_line(tmp_path):
    for content in (b"text\na\n\xc3\xa9 \xff\n", b"text\na\n\xff", b"text\na\nb \xff\xc3"):
        for name in ("a.csv", "a.tsv"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match=f"{name}: not UTF-8: byte 0xff in line 3"):
                read(tmp_path / name, ("text",))
    (tmp_path / "a.csv").write_bytes("text\na\n".encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8: byte 0xff in line 1"):
        read(tmp_path / "a.csv", ("text",))


def test_a_file_without_line_ends_is_not_loaded_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.data.readers.rows.MAX_LINE_LENGTH", 100)
    (tmp_path / "a.tsv").write_text("text\n" + "a" * 101)
    with pytest.raises(UserError, match="a.tsv:2: expected a line of at most 100 characters"):
        read(tmp_path / "a.tsv", ("text",))
    (tmp_path / "a.csv").write_text('text\n"open\n' + "a\n" * 100)
    with pytest.raises(UserError, match="in the row after line 1: field larger than field limit"):
        read(tmp_path / "a.csv", ("text",))


def test_rows_are_read_lazily(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 20_000 + "{")
    rows = read_rows(tmp_path / "a.jsonl", ("text",))
    assert next(rows).location.endswith(":1") and next(rows).location.endswith(":2")
    *_, last = rows
    assert last.location.endswith(":20001") and last.message.startswith("not JSON")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_random_tables_are_read_back_with_their_lines(tmp_path, line_end):
    rng = random.Random(0)
    alphabet = ['"', ",", "\n", "\r\n", "\t", " ", "a", "é", "\u2028", "\U0001f600", "'"]
    table = [
        ["".join(rng.choices(alphabet, k=rng.randrange(6))) for _ in "abc"] for _ in range(500)
    ]
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=line_end)
        writer.writerow("abc")
        lines = []
        for row in table:
            file.flush()
            lines.append(path.read_bytes().count(b"\n") + 1)
            writer.writerow(row)
    found = list(raise_bad_rows(read_rows(path, ("a", "b", "c"))))
    assert [list(row.texts.values()) for row in found] == table
    assert [row.location for row in found] == [f"{path}:{line}" for line in lines]


def test_the_readers_import_no_tensorflow():
    code = (
        "import sys, tasks.data.readers.rows, tasks.data.readers.glue, "
        "tasks.data.readers.tagged, tasks.data.readers.squad, "
        "tasks.data.readers.choices; print('tensorflow' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "columns", "count"),
    [
        ("banking77/train.csv", ("text", "category"), 10_003),
        ("banking77/test.csv", ("text", "category"), 3_080),
        ("hate_speech/train.csv", ("tweet", "class"), 17_348),
        ("hate_speech/dev.csv", ("tweet", "class"), 3_717),
    ],
)
def test_published_rows_are_all_read(data_dir, name, columns, count):
    rows = list(raise_bad_rows(read_rows(data_dir / name, columns)))
    assert len(rows) == count
