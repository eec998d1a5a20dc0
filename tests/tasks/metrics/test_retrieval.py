"""Metrics of retrieval: those that trec_eval printed, by hand, and of vectors."""

import numpy as np
import pytest

from tasks.metrics.retrieval import nearest_in_blocks, ranked, retrieval_metrics
from tests.tasks.metrics.brute_force import cosine_ranking

RELEVANCE = {
    "ties": {"a": 1, "b": 0, "c": 1},
    "graded": {"a": 2, "b": 1, "c": 3, "x": 1},
    "none relevant": {"a": 0, "b": 0},
    "not found": {"z": 1},
    "negative": {"a": -1, "b": 2},
}
SCORES = {
    "ties": {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5},
    "graded": {"c": 1.0, "n": 0.9, "b": 0.8, "a": 0.7},
    "none relevant": {"a": 1.0, "b": 0.5},
    "not found": {"a": 1.0},
    "negative": {"a": 3.0, "b": 2.0, "c": 1.0},
    "not judged": {"a": 1.0},
}
# map, recip_rank, recall_1, recall_5, ndcg_cut_10 of RelevanceEvaluator(RELEVANCE, ...) of
# pytrec-eval-terrier 0.5.11, evaluate(SCORES).
PRINTED = {
    "ties": (0.5, 0.5, 0.0, 1.0, 0.6509209298071326),
    "graded": (0.6041666666666666, 1.0, 0.25, 0.75, 0.8399273613836907),
    "none relevant": (0.0, 0.0, 0.0, 0.0, 0.0),
    "not found": (0.0, 0.0, 0.0, 0.0, 0.0),
    "negative": (0.5, 0.5, 0.0, 1.0, 0.6309297535714575),
}
NAMES = ("map", "mrr@10", "recall@1", "recall@5", "ndcg@10")


def of_names(metrics):
    return [metrics[name] for name in NAMES]


@pytest.mark.parametrize("query", RELEVANCE)
def test_a_query_has_the_numbers_of_trec_eval(query):
    rankings = {name: ranked(scores) for name, scores in SCORES.items()}
    found = retrieval_metrics({query: RELEVANCE[query]}, rankings)
    assert of_names(found) == pytest.approx(PRINTED[query], rel=1e-12)


def test_metrics_are_means_over_judged_queries():
    """A query without a ranking counts as 0, one without judgements not at all."""
    rankings = {name: ranked(scores) for name, scores in SCORES.items()}
    found = retrieval_metrics({**RELEVANCE, "no ranking": {"a": 1}}, rankings)
    expected = np.sum(list(PRINTED.values()), axis=0) / 6
    assert of_names(found) == pytest.approx(expected.tolist(), rel=1e-12)
    assert set(retrieval_metrics({}, {}).values()) == {0.0}


def test_a_document_beyond_a_cutoff_is_not_found():
    rankings = {1: [*range(100, 110), 7, *range(200, 300), 8]}
    found = retrieval_metrics({1: {7: 1, 8: 1}}, rankings)
    assert found == {
        "recall@1": 0.0,
        "recall@5": 0.0,
        "recall@10": 0.0,
        "recall@100": 0.5,
        "mrr@10": 0.0,
        "ndcg@10": 0.0,
        "map": (1 / 11 + 2 / 112) / 2,
    }


def test_vectors_are_ordered_by_cosine():
    vectors = np.array([[0, 1], [3, 3], [0, 0], [2, 0], [-1, 0], [9, 0]], np.float32)
    for size in (1, 4, 6):
        blocks = [vectors[first : first + size] for first in range(0, 6, size)]
        indices, values = nearest_in_blocks(blocks, np.array([[5, 0]], np.float32), 10)
        assert indices.tolist() == [[3, 5, 1, 0, 2, 4]]
        np.testing.assert_allclose(values, [[1, 1, 0.5**0.5, 0, 0, -1]], atol=1e-6)
    assert nearest_in_blocks([vectors], vectors[:1], 2)[0].shape == (1, 2)


@pytest.mark.parametrize("top_k", [1, 3, 10, 50])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_nearest_in_blocks_equals_sorting(top_k, size):
    """Similarities are -1, 0 or 1, so that many are equal, also at the end of the results."""
    rng = np.random.default_rng(0)
    axes = np.array([[0, 0], [1, 0], [0, 2], [-4, 0], [0, -1]], np.float32)
    vectors, queries = axes[rng.integers(0, 5, 40)], axes[rng.integers(0, 5, 9)]
    blocks = [vectors[first : first + size] for first in range(0, 40, size)]
    indices, similarities = nearest_in_blocks(blocks, queries, top_k)
    assert indices.shape == similarities.shape == (9, min(top_k, 40))
    for row, query in enumerate(queries):
        expected = cosine_ranking(vectors, query)[:top_k]
        assert indices[row].tolist() == [index for index, _ in expected]
        assert similarities[row] == pytest.approx([value for _, value in expected], abs=1e-6)


def test_no_vectors_have_no_nearest():
    indices, similarities = nearest_in_blocks([], np.ones((2, 4), np.float32), 5)
    assert indices.shape == similarities.shape == (2, 0)


@pytest.mark.slow
def test_random_rankings_have_the_numbers_of_pytrec_eval():
    evaluation = pytest.importorskip("pytrec_eval")  # pytrec-eval-terrier.
    rng = np.random.default_rng(0)
    relevance, scores = {}, {}
    for query in range(200):
        names = [f"d{number}" for number in rng.permutation(300)]
        judged = names[: rng.integers(1, 60)]
        relevance[f"q{query}"] = {name: int(rng.integers(-1, 4)) for name in judged}
        # Quarters are exact in float32, which trec_eval compares.
        scores[f"q{query}"] = {
            name: int(rng.integers(0, 99)) / 4 for name in rng.permutation(names)
        }
    names = {"map", "ndcg_cut.10", "recall.1,5,10,100", "recip_rank"}
    each = evaluation.RelevanceEvaluator(relevance, names).evaluate(scores).values()
    found = retrieval_metrics(relevance, {name: ranked(of) for name, of in scores.items()})
    for name, printed in {
        "map": "map",
        "ndcg@10": "ndcg_cut_10",
        **{f"recall@{cutoff}": f"recall_{cutoff}" for cutoff in (1, 5, 10, 100)},
    }.items():
        assert found[name] == pytest.approx(np.mean([of[printed] for of in each]), rel=1e-12)
    first = [of["recip_rank"] * (of["recip_rank"] >= 0.1) for of in each]
    assert found["mrr@10"] == pytest.approx(np.mean(first), rel=1e-12)
