"""GLUE's published files: lines of each format, with labels, without labels, for testing."""

import pytest

from bert_tf import UserError
from tasks import read_examples
from tasks.base.task_types import read_rows_of
from tasks.data.readers.glue import GLUE, read_glue, submission_lines
from tasks.data.readers.rows import BadRow, raise_bad_rows

NLI = "index\tpromptID\tpairID\tgenre\tp1\tp2\tq1\tq2\tsentence1\tsentence2"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
PAIR = "index\tsentence1\tsentence2"

# Per task: a train or dev file, its rows, a test file, and its rows.
FILES = {
    "cola": (
        'gj04\t1\t\t"Our friends.\ncj99\t0\t*\tThe more.\n',
        [{"text": '"Our friends.', "label": "1"}, {"text": "The more.", "label": "0"}],
        "index\tsentence\n0\tBill.\n",
        [{"text": "Bill.", "index": "0"}],
    ),
    "sst2": (
        "sentence\tlabel\nhide new \t0\n",
        [{"text": "hide new ", "label": "0"}],
        "index\tsentence\n0\tuneasy .\n",
        [{"text": "uneasy .", "index": "0"}],
    ),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t70\t71\tAmrozi "x\tReferring\r\n',
        [{"text_a": 'Amrozi "x', "text_b": "Referring", "label": "1"}],
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t10\t11\tPCCW\tCurrent\n",
        [{"text_a": "PCCW", "text_b": "Current", "index": "0"}],
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n13\t21\t22\tHow?\tWhy?\t0\n",
        [{"text_a": "How?", "text_b": "Why?", "label": "0"}],
        "id\tquestion1\tquestion2\n7\tWould?\tHas?\n",
        [{"text_a": "Would?", "text_b": "Has?", "index": "7"}],
    ),
    "stsb": (
        f"{STSB}\tscore\n0\tg\tf\t12\t1\tnone\tnone\tA plane.\tAn air plane.\t4.750\n",
        [{"text_a": "A plane.", "text_b": "An air plane.", "label": "4.750"}],
        f"{STSB}\n0\tg\tf\t12\t1\tnone\tnone\tA girl.\tA boy.\n",
        [{"text_a": "A girl.", "text_b": "A boy.", "index": "0"}],
    ),
    "mnli": (
        f"{NLI}\tlabel1\tgold_label\n0\t1\t1n\tg\t(\t(\tq\tq\tSkims.\tProducts.\tentailment\tneutral\n",
        [{"text_a": "Skims.", "text_b": "Products.", "label": "neutral"}],
        f"{NLI}\n0\t1\t1n\tg\t(\t(\tq\tq\tHe.\tShe.\n",
        [{"text_a": "He.", "text_b": "She.", "index": "0"}],
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWhen?\tSoon.\tnot_entailment\n",
        [{"text_a": "When?", "text_b": "Soon.", "label": "not_entailment"}],
        "index\tquestion\tsentence\n0\tWhat?\tThat.\n",
        [{"text_a": "What?", "text_b": "That.", "index": "0"}],
    ),
    "rte": (
        f"{PAIR}\tlabel\n0\tNo weapons.\tWeapons.\tentailment\n",
        [{"text_a": "No weapons.", "text_b": "Weapons.", "label": "entailment"}],
        f"{PAIR}\n0\ta\tb\n",
        [{"text_a": "a", "text_b": "b", "index": "0"}],
    ),
    "wnli": (
        f"{PAIR}\tlabel\n0\tI stuck a pin.\tIt had a hole.\t1\n",
        [{"text_a": "I stuck a pin.", "text_b": "It had a hole.", "label": "1"}],
        f"{PAIR}\n0\ta\tb\n",
        [{"text_a": "a", "text_b": "b", "index": "0"}],
    ),
}


def values_of(row):
    """Return the texts, the label and the id of a row by name."""
    others = {"label": row.label, "index": row.id}
    return row.texts | {name: value for name, value in others.items() if value is not None}


@pytest.mark.parametrize("name", FILES)
def test_each_task_is_read_with_labels_without_labels_and_for_testing(tmp_path, name):
    labelled, expected, unlabelled, expected_of_test = FILES[name]
    dev, test = tmp_path / "dev.tsv", tmp_path / "test.tsv"
    dev.write_bytes(labelled.encode())
    test.write_bytes(unlabelled.encode())
    rows = list(read_glue(dev, file_format=name))
    assert [values_of(row) for row in rows] == expected
    assert rows[0].location == f"{dev}:{1 if name == 'cola' else 2}"
    without = [{k: v for k, v in values.items() if k != "label"} for values in expected]
    assert [values_of(row) for row in read_glue(dev, labelled=False, file_format=name)] == without
    assert [
        values_of(row) for row in read_glue(test, labelled=False, file_format=name)
    ] == expected_of_test
    with pytest.raises(UserError, match=f"test.tsv:1: no column '{GLUE[name].label_column}' of"):
        list(read_glue(test, file_format=name))


def test_malformed_lines_of_qqp_are_known_errors_in_training(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = tmp_path / "train.tsv"
    path.write_text(f"{header}\n1\t1\t2\ta\n b\tc\t0\n2\t3\t4\td\te\t1\n3\t4\t5\tf\tg\th\t1\n")
    rows = list(read_glue(path, file_format="qqp"))
    assert [row.location for row in raise_bad_rows(rows)] == [f"{path}:4"]
    assert [isinstance(row, BadRow) and row.is_known for row in rows] == [True, True, False, True]
    task = {"kind": "classification", "file_format": "qqp"}
    rows = list(read_rows_of({**task, "for_training": True}, path, labelled=False))
    assert [row.location for row in raise_bad_rows(rows)] == [f"{path}:4"]
    rows = list(read_rows_of(task, path, labelled=False))  # Every row needs a prediction.
    assert [isinstance(row, BadRow) for row in rows] == [True, True, False, True]
    assert (
        rows[0].message.startswith("expected 6 fields, received 4. Columns: 'id', 'qid1'")
        and not rows[0].is_known
    )


@pytest.mark.parametrize("task_type", ["similarity", "multiple_choice"])
def test_types_with_rows_of_their_own_read_no_glue_file(tmp_path, task_type):
    path = tmp_path / "dev.tsv"
    path.write_text("gj04\t1\t\tOne sentence.\n")
    with pytest.raises(UserError):
        read_examples(path, task_type, file_format="cola")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "mnli",
            "0\t1\t1\tg\t(\t(\tq\tq\ta\tb\tneutral\t-",
            "label '-': expected a label of mnli: contra",
        ),
        ("rte", "0\ta\tb\t1", "label '1': expected a label of rte: entailment, not_entailment"),
        ("rte", "0\ta\tentailment", "expected 4 fields, received 3. Columns: 'index', 'sentence1'"),
        ("sst2", "a\0\t1", "column 'text': expected text, received a NUL"),
        ("stsb", "a\tb", "expected 10 fields, received 2"),
        *(
            ("stsb", f"0\tg\tf\t12\t1\tn\tn\ta\tb\t{score}", f"label '{score}': expected a number")
            for score in ("5.001", "-0.1", "nan", "high", "")
        ),
    ],
)
def test_bad_lines_are_reported(tmp_path, name, line, message):
    header = FILES[name][0].splitlines()[0]
    path = tmp_path / "dev.tsv"
    path.write_text(f"{header}\n{line}\n")
    (row,) = read_glue(path, file_format=name)
    assert (
        isinstance(row, BadRow) and row.location == f"{path}:2" and row.message.startswith(message)
    )


def test_columns_of_stsb_are_counted_from_the_end(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(
        f"{STSB}\tscore\n0\tg\tf\t12\t1\ta\tb\t2.5\n1\tg\tf\t1\t2\tn\tn\tmore\tc\td\t3\n"
    )
    assert [
        tuple(values_of(row).values())
        for row in raise_bad_rows(read_glue(path, file_format="stsb"))
    ] == [
        ("a", "b", "2.5"),
        ("c", "d", "3"),
    ]


def test_wrong_names_and_files_are_reported(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n")
    (tmp_path / "a.csv").write_text("sentence,label\n")
    for name, file, message in (
        ("cola", "b.tsv", "b.tsv: no such file"),
        ("sst2", "a.csv", "a.csv: expected a file that ends in .tsv, .txt"),
        ("sst2", "a.tsv", "a.tsv: expected at least one row"),
        (
            "mnli",
            "a.tsv",
            "a.tsv:1: no column 'sentence1' of mnli; the columns are 'sentence', 'label'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            list(read_glue(tmp_path / file, file_format=name))


def test_the_table_equals_the_published_one():
    labels = {name: task.labels for name, task in GLUE.items()}
    binary, entailment = ("0", "1"), ("entailment", "not_entailment")
    nli = ("contradiction", "entailment", "neutral")
    assert labels == {
        **dict.fromkeys(("cola", "sst2", "mrpc", "qqp", "wnli"), binary),
        **dict.fromkeys(("qnli", "rte"), entailment),
        "mnli": nli,
        "stsb": (),
    }
    assert {name: task.metrics for name, task in GLUE.items() if task.metrics != ("accuracy",)} == {
        "cola": ("matthews",),
        "mrpc": ("accuracy", "f1"),
        "qqp": ("accuracy", "f1"),
        "stsb": ("pearson", "spearman"),
    }
    assert [name for name, task in GLUE.items() if task.kind == "regression"] == ["stsb"]


def test_submissions_have_the_published_format():
    assert list(submission_lines("rte", [("0", "entailment"), (1, "not_entailment")])) == [
        "index\tprediction",
        "0\tentailment",
        "1\tnot_entailment",
    ]
    assert list(submission_lines("cola", [(0, "1")])) == ["index\tprediction", "0\t1"]
    values = enumerate([2.71828, -0.5, 5.5, 5, 0.0004])
    assert list(submission_lines("stsb", values))[1:] == [
        "0\t2.718",
        "1\t0.000",
        "2\t5.000",
        "3\t5.000",
        "4\t0.000",
    ]
    with pytest.raises(UserError, match="mnli: row 3: expected one of contradiction"):
        list(submission_lines("mnli", [(3, "1")]))
    with pytest.raises(UserError, match="stsb: row 0: expected a finite number, received nan"):
        list(submission_lines("stsb", [(0, float("nan"))]))
