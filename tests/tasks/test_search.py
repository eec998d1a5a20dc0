"""Search by cosine similarity: rows, vectors that do not belong to them, index and reranking."""

import importlib.util
import json
import os
import shutil
import types

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.data import jobs
from bert_tf.storage.ownership import sole_output
from bert_tf.system import command
from tasks import extract, search
from tasks.data.readers.rows import write_parquet
from tasks.metrics.retrieval import nearest_in_blocks, normalized
from tasks.prediction.retrieval import open_ranker
from tasks.prediction.vector_files import (
    ApproximateIndex,
    Vectors,
    build_index,
    index_path,
    open_vectors,
    recall,
)
from tests import small
from tests.conftest import READS_PROC
from tests.corpus import run_here

TEXTS = ["the bill is too high", "my app does not open", "the screen", "the bill is high"]


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros((2, 3)), None])
def test_a_file_without_vectors_is_rejected(tmp_path, array):
    path = tmp_path / "x.npy"
    path.write_text("no array") if array is None else np.save(path, array)
    with pytest.raises(UserError, match=r"x\.npy: expected a (\.npy file|float32 array)"):
        open_vectors(str(path))


@pytest.fixture(scope="module")
def extracted(config, vocabulary, tmp_path_factory):
    """Return a model, rows and their vectors."""
    directory = tmp_path_factory.mktemp("extracted")
    model = small.write_huggingface(directory / "bert", config, vocabulary)
    rows = small.write_rows(directory / "rows.csv", [(text, "x") for text in TEXTS])
    flags = [f"--model={model}", f"--input={rows}", "--max_seq_length=16"]
    output = f"--output={directory / 'vectors.npy'}"
    extract.main(command.parse(extract.ExtractSettings, ["extract", *flags, output])[0])
    return model, rows, directory / "vectors.npy"


@pytest.fixture
def flags(extracted, tmp_path):
    model, *paths = extracted
    rows, _ = (shutil.copy(path, tmp_path) for path in paths)
    flags = [f"--model={model}", f"--input={rows}", "--max_seq_length=16"]
    return [*flags, f"--vectors={tmp_path / 'vectors.npy'}", "--query=the bill is high"]


def run(flags):
    settings, _ = command.parse(search.SearchSettings, ["search", *flags])
    settings.check()
    search.main(settings)


def test_the_command_finds_the_row_of_the_query(flags, capsys):
    run([*flags, "--top_k=2"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"similarity": 1.0, "row": 3, "text": "the bill is high"}
    assert list(second) == ["similarity", "row", "text"] and second["similarity"] < 1


@pytest.mark.medium
def test_shards_of_arrays_are_searched(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "run", run_here)
    rows, shards = tmp_path / "rows", tmp_path / "rows" / "shards"
    rows.mkdir()
    shutil.move(tmp_path / "rows.csv", rows)
    flags[1] = f"--input={rows}/**"  # Of which the shards are no rows.
    written = [*flags[:3], f"--output_dir={shards}", "--num_shards=3"]
    settings, _ = command.parse(extract.ExtractSettings, ["x", *written, "--file_format=npy"])
    settings.check()
    extract.main(settings)
    arrays = [np.load(path) for path in sorted(shards.glob("*.npy"))]
    assert [len(array) for array in arrays] == [1, 1, 2]
    np.testing.assert_allclose(np.concatenate(arrays), np.load(tmp_path / "vectors.npy"), atol=1e-5)
    run([*flags, f"--vectors={shards}", "--top_k=1"])
    found = json.loads(capsys.readouterr().out)
    assert found == {"similarity": 1.0, "row": 3, "text": "the bill is high"}


def test_flags_of_arrays_are_checked(flags, tmp_path):
    given = ["x", *flags[:3], f"--output_dir={tmp_path / 'shards'}", "--file_format=npy"]
    with pytest.raises(UserError, match="--file_format=npy: expected jsonl or parquet with --per"):
        command.parse(extract.ExtractSettings, [*given, "--per_token"])
    (tmp_path / "rows.csv").write_text("text,label\na,b,c\n")
    with pytest.raises(UserError, match=r"rows\.csv:2"):  # An array has no errors.
        command.parse(extract.ExtractSettings, given)[0].check()


@pytest.mark.medium
def test_vectors_of_other_flags_or_rows_are_rejected(flags, tmp_path):
    with pytest.raises(UserError, match=r"vectors\.npy: not the vectors of .*rows\.csv"):
        run([*flags, "--pooling=cls"])
    with pytest.raises(UserError, match=r"vectors\.npy: not the vectors of .*rows\.csv"):
        run([*flags, "--max_seq_length=5"])
    small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in (*TEXTS[:3], TEXTS[1])])
    with pytest.raises(UserError, match=r"vectors\.npy: not the vectors of .*rows\.csv"):
        run(flags)
    small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS[:3]])
    with pytest.raises(UserError, match="4 vectors, but .* has 3 rows; run bert-tf extract"):
        run(flags)


def test_vectors_of_several_files_are_one_array(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    for number, first in enumerate(range(0, 30, 12)):
        np.save(tmp_path / f"v-{number}.npy", vectors[first : first + 12])
    together = Vectors(str(tmp_path / "v-*.npy"))
    assert len(together) == 30 and together.size == 4
    np.testing.assert_array_equal(np.concatenate(list(together.blocks())), vectors)
    rows = np.array([29, 0, 12, 11, 12])
    np.testing.assert_array_equal(together.take(rows), vectors[rows])
    expected = nearest_in_blocks([vectors], vectors[:3], 5)
    for found, values in zip(together.nearest(vectors[:3], 5), expected, strict=True):
        np.testing.assert_allclose(found, values, atol=1e-6)
    np.save(tmp_path / "v-3.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(UserError, match=r"v-3\.npy: vectors of 3 numbers\. Expected: 4"):
        Vectors(str(tmp_path / "v-*.npy"))
    with pytest.raises(UserError, match="no such file"):
        Vectors(str(tmp_path / "w-*.npy"))


@READS_PROC
def test_there_may_be_more_files_than_a_process_may_open(tmp_path):
    expected = np.arange(80, dtype=np.float32).reshape(40, 2)
    for number, row in enumerate(expected):
        np.save(tmp_path / f"v-{number:02}.npy", row[np.newaxis])
    before = len(os.listdir("/proc/self/fd"))
    vectors = Vectors(str(tmp_path / "v-*.npy"))
    np.testing.assert_array_equal(vectors.take(np.arange(40)), expected)
    assert len(os.listdir("/proc/self/fd")) == before


def test_vectors_of_a_parquet_file(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, vectors = str(tmp_path / "v.parquet"), [[1.0, 2.0], [3.0, 4.5]]

    def write(values):
        rows = [{"row": "a.csv:2", "vector": value} for value in values]
        with open(path, "wb") as stream:
            write_parquet(stream, path, rows, {"vector": ("float32", 1)})

    write(vectors)
    assert open_vectors(path).tolist() == vectors
    for column in (pa.array(vectors, pa.list_(pa.float32(), 2)), pa.array(vectors)):
        pq.write_table(pa.table({"vector": column}), path)
        assert open_vectors(path).tolist() == vectors
    for other in (["a"], [["a"]], [[1.0, None]]):
        pq.write_table(pa.table({"vector": other}), path)
        with pytest.raises(UserError, match="expected lists of numbers in the column vector"):
            open_vectors(path)
    bad = {"a vector in every row": [[1.0], None], "one size": [[1.0], [1.0, 2.0]]}
    for message, values in bad.items():
        write(values)
        with pytest.raises(UserError, match=f"expected.*{message}"):
            open_vectors(path)
    (tmp_path / "v.parquet").write_text("text")
    with pytest.raises(UserError, match="expected a Parquet file"):
        open_vectors(path)


@pytest.mark.parametrize("pattern", ["*.npy", "day=*/v.npy", "**/v.npy", "day=?/*/v.npy"])
def test_the_index_of_a_glob_is_where_its_pattern_begins(tmp_path, pattern):
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "v.npy").touch()
    assert index_path(f"{tmp_path}/{pattern}") == f"{tmp_path}/vectors.usearch"
    assert index_path(f"{tmp_path}/day=1/*.npy") == f"{tmp_path}/day=1/vectors.usearch"


def test_the_index_of_a_relative_glob_is_in_the_working_directory():
    assert index_path("absent-*/v.npy") == "vectors.usearch"


@pytest.mark.skipif(not importlib.util.find_spec("usearch"), reason="requires usearch")
class TestIndex:
    def write(self, directory, count=600, scale=1.0):
        vectors = np.random.default_rng(0).normal(0, scale, (count, 8)).astype(np.float32)
        np.save(directory / "v.npy", vectors)
        return Vectors(str(directory / "v.npy")), vectors

    def test_the_index_finds_the_nearest_vectors(self, tmp_path):
        vectors, array = self.write(tmp_path)
        path = index_path(vectors.path)
        assert path == str(tmp_path / "v.usearch")
        assert build_index(vectors, path, lambda line: None) > 0.95
        assert sorted(os.listdir(tmp_path)) == ["v.npy", "v.usearch"]
        rows, similarities = ApproximateIndex(path, vectors).nearest(array[:20], 3)
        assert rows[:, 0].tolist() == list(range(20))
        _, expected = nearest_in_blocks([array], array[:20], 3)
        assert recall(expected, similarities) > 0.95
        # Similarities are exact, whatever the precision of the index.
        units = normalized(array)
        by_hand = np.sum(units[rows] * units[:20, np.newaxis], axis=2)
        np.testing.assert_allclose(similarities, by_hand, atol=1e-6)

    def test_an_index_of_long_vectors_is_opened(self, tmp_path):
        """As of mean_sqrt_len: their squares are no numbers of half precision."""
        vectors, _ = self.write(tmp_path, count=40, scale=200.0)
        assert build_index(vectors, index_path(vectors.path), lambda line: None) > 0.95

    def test_an_index_that_cannot_be_written_is_reported_with_its_path(self, tmp_path):
        """The command shows an OSError as one line; usearch raises RuntimeError."""
        vectors, _ = self.write(tmp_path)
        path = str(tmp_path / "no" / "v.usearch")
        with pytest.raises(OSError, match="No such file") as raised:
            build_index(vectors, path, lambda line: None)
        assert raised.value.filename == path

    def test_an_index_of_other_vectors_is_rejected(self, tmp_path):
        vectors, array = self.write(tmp_path)
        path = index_path(vectors.path)
        with pytest.raises(UserError, match="no such file; run bert-tf search --build_index first"):
            ApproximateIndex(path, vectors)
        build_index(vectors, path, lambda line: None)
        for other in (array[:-1], array[::-1], array[:, :7]):
            np.save(tmp_path / "w.npy", other)
            with pytest.raises(UserError, match=r"v\.usearch: not an index of .*w\.npy"):
                ApproximateIndex(path, Vectors(str(tmp_path / "w.npy")))
        (tmp_path / "v.usearch").write_bytes(b"abc")
        with pytest.raises(UserError, match="not an index"):
            ApproximateIndex(path, vectors)

    def test_the_file_of_an_index_is_locked_before_it_is_built(self, tmp_path, monkeypatch):
        vectors, _ = self.write(tmp_path)
        monkeypatch.setattr(search, "build_index", None)
        with sole_output(index_path(vectors.path)):
            with pytest.raises(UserError, match=r"v\.usearch: in use by another process"):
                run([f"--vectors={vectors.path}", "--build_index"])

    @pytest.mark.medium
    def test_the_command_builds_and_uses_it(self, flags, tmp_path, capsys):
        run([f"--vectors={tmp_path / 'vectors.npy'}", "--build_index"])
        line = json.loads(capsys.readouterr().out)
        path = str(tmp_path / "vectors.usearch")
        assert line == {"index": path, "vectors": 4, "recall@10": 1.0}
        run([*flags, "--use_index", "--top_k=1"])
        assert json.loads(capsys.readouterr().out)["row"] == 3


def test_recall_by_hand():
    exact = np.array([[0.9, 0.8], [1.0, 1.0]])
    # An equal vector counts as found, a less similar one does not.
    assert recall(exact, np.array([[0.9, 0.8], [1.0, 0.7]])) == 0.75


@pytest.mark.parametrize(
    ("query_prompt", "prompt", "expected"),
    [
        (None, None, "query"),
        (None, "passage", "query"),  # Before rows alone.
        (None, "sts", "sts"),
        ("sts", "passage", "sts"),
    ],
)
def test_the_prompt_of_rows_is_that_of_the_query_unless_it_is_one_of_documents(
    query_prompt, prompt, expected
):
    settings = types.SimpleNamespace(query_prompt=query_prompt, prompt=prompt)
    task = types.SimpleNamespace(prompts={"query": "q: ", "passage": "p: ", "sts": "s: "})
    embedder = types.SimpleNamespace(task=task)
    assert search._prompt_of_query(settings, embedder) == expected
    task.prompts = {"passage": "p: "}
    if expected == "query":  # Then it is the default prompt.
        assert search._prompt_of_query(settings, embedder) is None


@pytest.mark.parametrize(
    ("passage", "default", "prompt", "warns"),
    [
        ("passage: ", None, None, True),
        ("passage: ", None, "passage", False),
        ("passage: ", "passage", None, False),
        ("", None, None, False),  # As in new directories of sentence-transformers.
    ],
)
def test_rows_without_the_prompt_of_documents_are_warned_of(
    capsys, passage, default, prompt, warns
):
    settings = types.SimpleNamespace(prompt=prompt, vectors="v.npy")
    prompts = {"query": "query: ", "passage": passage}
    search._warn_of_prompts(
        settings, types.SimpleNamespace(prompts=prompts, default_prompt=default)
    )
    assert ("'passage' for documents; pass --prompt=passage to" in capsys.readouterr().err) == warns


def test_wrong_flags_are_rejected(flags, tmp_path):
    with pytest.raises(UserError, match="--query: not supported with --build_index"):
        run([*flags[-2:], "--build_index"])
    with pytest.raises(UserError, match="--model: expected a value, or --build_index"):
        run(flags[1:])
    with pytest.raises(UserError, match="--query: expected UTF-8"):
        run([*flags, "--query=caf\udce9"])
    with pytest.raises(UserError, match=r"--rerank=.*: expected a run of task ranking"):
        open_ranker(flags[0].removeprefix("--model="))


@pytest.mark.medium
def test_results_are_reranked(flags, capsys, monkeypatch):
    """The longest of the texts nearest to the query comes first; others follow."""

    class Ranker:
        def predict_rows(self, x):
            assert x["query"] == ["the bill is high"]
            (texts,) = x["texts"]
            order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
            return [{"scores": [len(text) / 100 for text in texts], "order": order}]

    monkeypatch.setattr(search, "open_ranker", lambda path: Ranker())
    monkeypatch.setattr(search, "check_ranker", lambda path: None)
    run([*flags, "--rerank=R", "--rerank_k=2", "--top_k=3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [next(iter(line)) for line in lines] == ["score", "score", "similarity"]
    assert lines[0]["score"] == len(lines[0]["text"]) / 100 > lines[1]["score"]
    assert 3 in [line["row"] for line in lines[:2]]
