"""Readers of retrieval datasets: judgements of TREC and BEIR, and errors that name the line."""

import gzip
import json
import re

import pytest

from bert_tf import UserError
from tasks.data.readers.retrieval import RetrievalDataset, read_jsonl, read_qrels
from tests.small import write_beir

EXPECTED = {"q1": {"d 1": 2, "d2": 0}, "q2": {"d3": -1}}


@pytest.mark.parametrize(
    "content",
    [
        "query-id\tcorpus-id\tscore\nq1\td 1\t2\nq1\td2\t0\n\nq2\td3\t-1\n",
        "q1\td 1\t2\r\nq1\td2\t0\r\nq2\td3\t-1",
    ],
)
def test_judgements_of_beir(tmp_path, content):
    (tmp_path / "test.tsv").write_bytes(content.encode())
    assert read_qrels(tmp_path / "test.tsv") == EXPECTED


def test_judgements_of_trec(tmp_path):
    (tmp_path / "qrels").write_text("q1 0 d1 2\nq1\tQ0\td2\t0\n q2   0 d3  -1 \n")
    assert read_qrels(tmp_path / "qrels") == {"q1": {"d1": 2, "d2": 0}, "q2": {"d3": -1}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1 0 d1 2\nq1 d1\n", "qrels:2: expected query, iteration, .* received 2 fields"),
        ("q1 0 d1 2\nq1 0 d2 0.5\n", "qrels:2: relevance '0.5': expected an integer"),
        ("q1 0 d1 2\nq1 0 d1 0\n", "qrels:2: query 'q1' and document 'd1' occur twice"),
        ("query-id\tcorpus-id\tscore\n", "qrels: expected at least one row"),
        # A header in another place is a row.
        ("q1\td1\t1\nquery-id\tcorpus-id\tscore\n", "qrels:2: relevance 'score'"),
    ],
)
def test_bad_judgements_name_their_line(tmp_path, content, message):
    (tmp_path / "qrels").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read_qrels(tmp_path / "qrels")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"_id": "a", "text": "x"}', "'a' occurs twice"),
        ('{"id": "a", "text": "x"}', "expected '_id' and 'text', received 'id', 'text'"),
        ('{"_id": "b", "text": ["x"]}', "'text': expected text, received ['x']"),
        ('{"_id": "", "text": "x"}', "'_id': expected an id"),
        ('{"_id": "b"', "not JSON"),
    ],
)
def test_bad_documents_name_their_line(tmp_path, row, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"_id": "a", "text": "x"}}\n{row}\n')
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        list(read_jsonl(path))


def test_a_title_precedes_its_text(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"_id": "1", "title": "A", "text": "b", "metadata": {}},
        {"_id": 2, "title": "", "text": "c"},
        {"_id": "3", "title": None, "text": ""},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_jsonl(path)) == [("1", "A b"), ("2", "c"), ("3", "")]


def test_a_directory_of_beir(tmp_path):
    directory = write_beir(
        tmp_path / "beir", {"d1": "one", "d2": "two"}, {"q1": "a", "q2": "b"}, {"q2": {"d1": 1}}
    )
    dataset = RetrievalDataset.open(directory)
    assert list(dataset.documents()) == [("d1", "one"), ("d2", "two")]
    # Queries without judgements are not evaluated.
    assert dataset.judged_queries(read_qrels(dataset.qrels)) == {"q2": "b"}
    with pytest.raises(UserError, match="1 of 2 are missing, the first is 'q3'"):
        dataset.judged_queries({"q1": {}, "q3": {}})
    warning = dataset.check_documents({"q1": {"d1": 1, "d8": 1, "d9": 1}, "q2": {"d7": 0}})
    expected = "3 of 4 documents of .* are missing, 2 of them relevant, such as 'd7'; no search"
    assert re.search(f"corpus.jsonl: {expected}", warning)
    assert "1 of 1 documents" in dataset.check_documents({"q1": {"d9": 0}})
    assert dataset.check_documents({"q1": {"d1": 1, "d2": 0}}) is None
    with pytest.raises(UserError, match="none of the 2 relevant ones is there, such as '1'"):
        dataset.check_documents({"q1": {"1": 1, "2": 2, "d1": 0}})

    corpus = directory / "corpus.jsonl"
    (directory / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    assert list(RetrievalDataset.open(directory).documents())[1] == ("d2", "two")
    (directory / "qrels" / "test.tsv").rename(directory / "dev.tsv")
    with pytest.raises(UserError, match="test.tsv: no such file"):
        RetrievalDataset.open(directory)
    assert RetrievalDataset.open(directory, str(directory / "dev.tsv")).qrels.suffix == ".tsv"
