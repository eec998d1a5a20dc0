"""Evaluation of an embedder as retrieval: metrics of a small dataset, and the command's errors."""

import json
import re
import types

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.runs.run import Run
from bert_tf.system import command
from bert_tf.text.token_counts import TokenCounts
from tasks import TextEmbedder, evaluate
from tasks.data.readers.retrieval import RetrievalDataset
from tasks.prediction import retrieval
from tasks.prediction.retrieval import evaluate_retrieval, open_embedder, rank_documents
from tasks.types.ranking import RankingTask
from tests.small import write_beir

DOCUMENTS = {
    "d1": "the bill is too high",
    "d2": "my app does not open",
    "q1": "the screen is broken",
    "d4": "the bill is high",
}
QUERIES = {"q1": "the screen is broken", "q2": "the bill is high", "unjudged": "the"}
RELEVANCE = {"q2": {"d4": 1, "d2": 1}, "q1": {"d1": 1, "d9": 1}}


@pytest.fixture
def beir(tmp_path):
    return write_beir(tmp_path / "beir", DOCUMENTS, QUERIES, RELEVANCE)


def run(*flags):
    settings, _ = command.parse(evaluate.EvaluateSettings, ["evaluate", *flags])
    settings.check()
    evaluate.main(settings)


class Embedder:
    """Known vectors by text, after a prompt."""

    serving = types.SimpleNamespace(take_token_counts=TokenCounts)

    def __init__(self, vectors, prompts=(), similarity="cosine"):
        self.vectors, self.seen = vectors, []
        prompts = dict.fromkeys(prompts, "")
        self.task = types.SimpleNamespace(prompts=prompts, similarity=similarity)

    def predict(self, texts, verbose="auto", prompt=None):
        self.seen.append((prompt, len(texts)))
        return np.array([self.vectors[text] for text in texts], np.float32)


def test_documents_are_ranked_by_similarity(beir, monkeypatch):
    """In blocks of two documents; q1 does not find the document that has its own id."""
    monkeypatch.setattr(retrieval, "TEXTS_PER_BLOCK", 2)
    vectors = [[1, 0], [0, 1], [1, 1], [3, 1]]
    embedder = Embedder({**dict(zip(DOCUMENTS.values(), vectors, strict=True)), "the": [0, 9]})
    queries = {name: QUERIES[name] for name in ("unjudged", "q2", "q1")}
    dataset = RetrievalDataset.open(beir)
    assert rank_documents(embedder, dataset, queries, lambda line: None) == {
        "unjudged": ["d2", "q1", "d4", "d1"],
        "q2": ["d4", "d1", "q1", "d2"],
        "q1": ["d4", "d1", "d2"],
    }


def test_a_relevant_document_with_the_id_of_its_query_is_a_result(tmp_path):
    """Queries and documents that are numbered from 0, and a query that is a document."""
    documents = {"0": "high", "1": "open", "2": "broken"}
    queries = {"0": "a bill", "1": "open", "2": "a screen"}
    relevance = {"0": {"0": 1}, "1": {"0": 2, "1": 0}, "2": {"0": 1}}
    beir = write_beir(tmp_path / "beir", documents, queries, relevance)
    vectors = {
        "high": [1, 0],
        "open": [0, 1],
        "broken": [1, 1],
        "a bill": [2, 0],
        "a screen": [1, 1],
    }
    found = evaluate_retrieval(
        Embedder(vectors), RetrievalDataset.open(beir), relevance, lambda line: None
    )
    assert found["recall@1"] == pytest.approx(2 / 3)  # Of "open", broken is the most similar one.
    assert found["map"] == pytest.approx((1 + 1 / 2 + 1) / 3)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((), [None, None]),
        (("query", "passage"), ["query", "passage"]),
        (("passage",), [None, "passage"]),
    ],
)
def test_queries_and_documents_follow_their_prompts(beir, prompts, expected):
    vectors = {text: [1, 0] for text in (*DOCUMENTS.values(), *QUERIES.values())}
    embedder = Embedder(vectors, prompts)
    rank_documents(embedder, RetrievalDataset.open(beir), QUERIES, lambda line: None)
    assert [prompt for prompt, _ in embedder.seen] == expected


def test_documents_are_ranked_by_the_similarity_of_the_embedder(beir):
    vectors = {text: [1, 0] for text in (*DOCUMENTS.values(), *QUERIES.values())}
    vectors |= {DOCUMENTS["d1"]: [5, 3], DOCUMENTS["d2"]: [2, 0]}
    best = {}
    for similarity in ("cosine", "dot"):
        embedder = Embedder(vectors, similarity=similarity)
        dataset = RetrievalDataset.open(beir)
        best[similarity] = rank_documents(embedder, dataset, {"unjudged": "the"}, print)["unjudged"]
    assert best["cosine"][-1] == "d1" and best["dot"][:2] == ["d1", "d2"]
    with pytest.raises(UserError, match="'euclidean': expected cosine or dot"):
        rank_documents(Embedder(vectors, similarity="euclidean"), dataset, QUERIES, print)


def test_a_ranker_is_no_embedder(config, vocabulary, tmp_path):
    task = RankingTask(max_seq_length=8)
    run = Run.create(tmp_path / "run", config, vocabulary, {"origin": "random"}, task.to_dict())
    run.checkpoints.save(0, {"bert/embeddings/word_embeddings": np.zeros(1, np.float32)})
    with pytest.raises(UserError, match="expected an embedder, received a run of task ranking"):
        retrieval.check_embedder(str(tmp_path / "run"))


@pytest.mark.medium
def test_the_command_prints_metrics(huggingface_dir, beir, tmp_path, capsys):
    """Evaluate a run, whose pooling is not the default."""
    model = TextEmbedder.from_pretrained(huggingface_dir, pooling="cls", max_seq_length=16)
    model.save_run(tmp_path / "run")
    assert open_embedder(str(tmp_path / "run")).task == model.task
    (beir / "qrels.txt").write_text("q2 0 d4 1\nq2 0 d9 1\n")
    run(f"--run={tmp_path / 'run'}", f"--data={beir}", f"--qrels={beir / 'qrels.txt'}")
    out, err = capsys.readouterr()
    assert re.search(r"warning: .*corpus.jsonl: 1 of 2 documents of .*qrels.txt are missing", err)
    metrics = json.loads(out.splitlines()[-1])
    # The text of d4 is that of the query; there is no d9.
    recalls = {f"recall@{cutoff}": 0.5 for cutoff in (1, 5, 10, 100)}
    ndcg = pytest.approx(1 / (1 + np.log(2) / np.log(3)))
    assert metrics == {**recalls, "mrr@10": 1.0, "ndcg@10": ndcg, "map": 0.5}


def test_wrong_flags_are_rejected(huggingface_dir, beir, tmp_path):
    with pytest.raises(UserError, match="--qrels: expected a directory of BEIR"):
        run(f"--run={huggingface_dir}", f"--data={beir / 'corpus.jsonl'}", "--qrels=x")
    with pytest.raises(UserError, match=r"corpus\.jsonl: no such file"):
        run(f"--run={huggingface_dir}", f"--data={tmp_path}")
    with pytest.raises(UserError, match="no model found"):
        run(f"--run={tmp_path}", f"--data={beir}")
    with pytest.raises(UserError, match="expected a run of an embedder"):
        open_embedder(str(huggingface_dir), checkpoint="step-1")


def test_vectors_that_are_not_finite_are_rejected(beir):
    embedder = Embedder({text: [np.nan, 1] for text in QUERIES.values()})
    with pytest.raises(UserError, match="queries: .*finite"):
        rank_documents(embedder, RetrievalDataset.open(beir), QUERIES, lambda line: None)
