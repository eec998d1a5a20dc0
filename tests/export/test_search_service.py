"""The search service of docs/search-service.md, with its models behind the tests' small server."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from export.publishing import publish
from tasks.metrics.retrieval import nearest_in_blocks
from tasks.prediction.vector_files import Vectors, build_index
from tasks.types.ranking import RankingTask
from tasks.types.similarity.text_embedder import SimilarityTask
from tests import small
from tests.conftest import ROOT
from tests.export.test_kinds import trained
from tests.test_docs import split_fences

PROGRAM = ROOT / "examples" / "serving" / "search_service.py"
TEXTS = ["the bill is too high", "my app", "", "the screen"]


def test_the_page_shows_the_program():
    page = (ROOT / "docs" / "search-service.md").read_text(encoding="utf-8")
    (block,) = (lines for name, lines in split_fences(page)[1] if name == "python")
    assert "\n".join(block) in PROGRAM.read_text(encoding="utf-8")


class Client:
    """Stands for a client: returns what a function of the inputs returns."""

    def __init__(self, of_inputs):
        self.predict = of_inputs


@pytest.fixture
def program():
    pytest.importorskip("usearch", reason="usearch is not installed")
    spec = importlib.util.spec_from_file_location("search_service", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_index_of_other_texts_is_rejected(program, tmp_path):
    index = program.usearch.index.Index(ndim=2, metric="cos")
    index.add(np.arange(4), np.eye(4, 2, dtype=np.float32))
    index.save(str(tmp_path / "v.usearch"))
    assert len(program.open_index(str(tmp_path / "v.usearch"), TEXTS)) == 4
    (tmp_path / "bad.usearch").write_text("no index")
    for name, texts in (("v", TEXTS[:3]), ("bad", TEXTS), ("none", TEXTS)):
        with pytest.raises(SystemExit, match=rf"{name}\.usearch: expected the index of"):
            program.open_index(str(tmp_path / f"{name}.usearch"), texts)


def test_texts_are_read_as_extract_reads_them(program, tmp_path):
    long = "a" * 140_000
    path = tmp_path / "rows.csv"
    path.write_text(f"\ufefftext\r\nmy app\r\n\r\n{long}\r\n", encoding="utf-8", newline="")
    assert program.read_texts(path) == ["my app", "", long]
    path.write_text("title\nmy app\n")
    with pytest.raises(SystemExit, match=r"--texts: .*rows\.csv:2: no column 'text'"):
        program.read_texts(path)


def test_candidates_of_the_index_are_ranked(program):
    index = program.usearch.index.Index(ndim=2, metric="cos")
    index.add(np.arange(4), np.array([[1, 0], [1, 0.1], [1, 0.2], [0, 1]], np.float32))

    def embed(inputs, signature):
        assert inputs == {"text": ["a bill"], "prompt": ["query: "]}
        assert signature == "with_prompt"
        return {"embedding": [[1.0, 0.0]]}

    def rank(inputs):
        # The blank text is left out, and the least similar one is no candidate.
        assert inputs == {"query": ["a bill"], "texts": [TEXTS[:2]]}
        return {"scores": [[0.25, 0.75]], "order": [[1, 0]]}

    service = program.SearchService(Client(embed), Client(rank), index, TEXTS, "query: ", 3)
    first, second = service.search("a bill")
    assert first == {"score": 0.75, "row": 1, "text": "my app"}
    assert second == {"score": 0.25, "row": 0, "text": "the bill is too high"}
    assert service.search("a bill", count=1) == [first]


@pytest.fixture(scope="module")
def models(tmp_path_factory, config, vocabulary):
    """Return an embedder, a ranker and the directory in which they are published."""
    directory = tmp_path_factory.mktemp("models")
    tasks = {
        "embedder": SimilarityTask(
            max_seq_length=12, dense_units=(6,), dense_activations=("tanh",), normalize=True
        ),
        "ranker": RankingTask(max_seq_length=16),
    }
    found = []
    for name, task in tasks.items():
        model = trained(tmp_path_factory.mktemp(name), task, config, vocabulary)
        publish(model, directory / name)
        found.append(model)
    return *found, directory


def answered(url, **values):
    """Return (status, JSON) of GET."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(values)}") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_the_service_answers_by_rest_and_grpc(models, tmp_path):
    pytest.importorskip("usearch", reason="usearch is not installed")
    from tests.export.server import serving

    embedder, ranker, directory = models
    words = ("the bill", "my app", "screen", "is high", "is broken", "open", "cafe", "a b c")
    texts = [" ".join(pair) for pair in itertools.permutations(words, 2)]
    small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in texts])
    np.save(tmp_path / "v.npy", embedder.predict(texts))
    build_index(Vectors(str(tmp_path / "v.npy")), str(tmp_path / "v.usearch"), lambda line: None)
    vectors = np.load(tmp_path / "v.npy")
    (rows,), _ = nearest_in_blocks([vectors], embedder.predict(["my bill"]), 54)
    ranked = ranker.predict({"query": ["my bill"], "texts": [texts]})["scores"][0]
    command = [sys.executable, PROGRAM, "--port=0", f"--texts={tmp_path / 'rows.csv'}"]
    command.append(f"--index={tmp_path / 'v.usearch'}")
    with serving(directory / "embedder", directory / "ranker") as addresses:
        for embedder_at, ranker_at in (
            (f"{addresses.rest}/v1/models/embedder", f"{addresses.grpc}/ranker"),
            (f"{addresses.grpc}/embedder", f"{addresses.rest}/v1/models/ranker"),
            (directory / "embedder", directory / "ranker"),
        ):
            flags = [f"--embedder={embedder_at}", f"--ranker={ranker_at}"]
            with subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            ) as process:
                try:
                    url = process.stdout.readline().strip().removesuffix("?q=")
                    status, found = answered(url, q="my bill", k=40)
                    assert answered(url, q=" ")[0] == 400
                    assert {answered(url, q="a", k=k)[0] for k in ("b", 0, -48, "9" * 5000)} == {
                        400
                    }
                    assert answered(url.replace("search", "other"), q="a")[0] == 400
                finally:
                    process.kill()
            assert status == 200 and len(found) == 40
            assert {of["row"] for of in found} <= set(rows.tolist())
            assert [of["text"] for of in found] == [texts[of["row"]] for of in found]
            scores = [of["score"] for of in found]
            np.testing.assert_allclose(scores, ranked[[of["row"] for of in found]], atol=1e-5)
            assert np.all(np.diff(scores) < 1e-3)  # In order, but for those that rounding decides.
