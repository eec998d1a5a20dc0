"""Exact search of the most similar vectors, and metrics of rankings as in trec_eval.

A ranking is a list of documents, the best first. A document is relevant to a query if its
relevance is above 0; only nDCG distinguishes grades. Each metric is a mean over the queries that
have judgements, as of trec_eval with -c: a query without a ranking, or without a relevant
document, counts as 0.

Shape suffixes: n vectors of a block, Q queries, D size of a vector, K results.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

VECTORS_PER_BLOCK = 16_384
QUERIES_PER_BLOCK = 1024  # With it a block of similarities takes 64 MiB.
CUTOFFS_OF_RECALL = (1, 5, 10, 100)
CUTOFF = 10  # Of the reciprocal rank and of nDCG.
# Documents of a ranking that the mean average precision sees, as in runs of TREC.
DEPTH = 1000
_Query = TypeVar("_Query", bound=Hashable)
_Document = TypeVar("_Document", bound=Hashable)
_OTHERS = (f"mrr@{CUTOFF}", f"ndcg@{CUTOFF}", "map")


def nearest_in_blocks(
    blocks: Iterable[np.ndarray], queries_QD: np.ndarray, top_k: int, is_cosine: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the K vectors that are most similar to each query.

    Args:
        blocks: The vectors, float32 `(n, D)` each.
        queries_QD: float32 `(Q, D)`.
        top_k: K; all vectors if there are fewer.
        is_cosine: Whether the similarity is the cosine, otherwise the dot product.

    Returns:
        (indices, similarities), int64 and float32 `(Q, K)`, most similar first. Of equal vectors
        the first one comes first. A vector of zeros has similarity 0.
    """
    scaled = normalized if is_cosine else np.asarray
    units_QD, count = scaled(queries_QD), 0
    indices_QK = np.zeros((len(queries_QD), 0), np.int64)
    similarities_QK = np.zeros((len(queries_QD), 0), np.float32)
    for vectors_nD in blocks:
        units_nD = scaled(vectors_nD)
        parts = []
        for first in range(0, len(units_QD), QUERIES_PER_BLOCK):
            rows = slice(first, first + QUERIES_PER_BLOCK)
            found_qk, of_found_qk = _largest(units_QD[rows] @ units_nD.T, top_k)
            # Those of earlier blocks come first, and the order is stable.
            together = np.concatenate([indices_QK[rows], found_qk + count], axis=1)
            of_together = np.concatenate([similarities_QK[rows], of_found_qk], axis=1)
            order_qk = np.argsort(-of_together, axis=1, kind="stable")[:, :top_k]
            parts.append(
                [np.take_along_axis(values, order_qk, axis=1) for values in (together, of_together)]
            )
        if parts:
            indices_QK, similarities_QK = map(np.concatenate, zip(*parts, strict=True))
        count += len(vectors_nD)
    return indices_QK, similarities_QK


def normalized(vectors_nD: np.ndarray) -> np.ndarray:
    """Return vectors of length 1, and of length 0 for a vector of zeros, float32 `(n, D)`."""
    norms_n1 = np.linalg.norm(vectors_nD, axis=1, keepdims=True)
    return np.divide(vectors_nD, norms_n1, out=np.zeros_like(vectors_nD), where=norms_n1 > 0)


def _largest(values_qn, top_k):
    """Return (indices, values) of the K largest per row in any order, equal ones by their index."""
    size = values_qn.shape[1]
    if top_k >= size:
        return np.broadcast_to(np.arange(size), values_qn.shape), values_qn
    indices_qk = np.argpartition(values_qn, size - top_k, axis=1)[:, size - top_k :]
    least_q1 = np.take_along_axis(values_qn, indices_qk, axis=1).min(axis=1, keepdims=True)
    # Where several values equal the least one, argpartition takes any of them.
    for row in np.flatnonzero(np.count_nonzero(values_qn >= least_q1, axis=1) > top_k):
        indices_qk[row] = np.argsort(-values_qn[row], kind="stable")[:top_k]
    indices_qk.sort(axis=1)
    return indices_qk, np.take_along_axis(values_qn, indices_qk, axis=1)


def retrieval_metrics(
    relevance: Mapping[_Query, Mapping[_Document, float]],
    rankings: Mapping[_Query, Sequence[_Document]],
) -> dict[str, float]:
    """Return recall, reciprocal rank, nDCG and average precision, as means over queries.

    Args:
        relevance: Relevance by document by query. Documents without one count as irrelevant.
        rankings: Distinct documents by query. Queries without judgements are ignored.

    Returns:
        "recall@1", "recall@5", "recall@10" and "recall@100": fraction of the relevant documents
        among the first ones. "mrr@10": 1 / rank of the first relevant document, 0 if it is not
        among the first 10. "ndcg@10": discounted gain of the first 10, with the relevance as the
        gain, divided by that of the best ranking. "map": mean of the precision at the rank of each
        relevant document. All are 0 without queries.
    """
    each = [_of_query(judged, rankings.get(query, ())) for query, judged in relevance.items()]
    names = (*(f"recall@{cutoff}" for cutoff in CUTOFFS_OF_RECALL), *_OTHERS)
    means = np.mean(each, axis=0) if each else np.zeros(len(names))
    return dict(zip(names, means.tolist(), strict=True))


def _of_query(judged, ranking):
    """Return the metrics of one query, in the order of their names."""
    gains = {document: gain for document, gain in judged.items() if gain > 0}
    if not gains:
        return [0.0] * (len(CUTOFFS_OF_RECALL) + len(_OTHERS))
    ranks, found = [], []
    for rank, document in enumerate(ranking, start=1):
        if document in gains:
            ranks.append(rank)
            found.append(gains[document])
    recalls = [sum(rank <= cutoff for rank in ranks) / len(gains) for cutoff in CUTOFFS_OF_RECALL]
    first = ranks[0] if ranks else np.inf
    ideal = sorted(gains.values(), reverse=True)
    return [
        *recalls,
        1 / first if first <= CUTOFF else 0.0,
        _discounted(ranks, found) / _discounted(range(1, len(ideal) + 1), ideal),
        sum(number / rank for number, rank in enumerate(ranks, start=1)) / len(gains),
    ]


def _discounted(ranks, gains):
    return sum(
        gain / np.log2(rank + 1) for rank, gain in zip(ranks, gains, strict=True) if rank <= CUTOFF
    )


def ranked(scores: Mapping[_Document, float]) -> list[_Document]:
    """Return documents by descending score; of equal ones the greatest first, as trec_eval."""
    return sorted(scores, key=lambda document: (scores[document], document), reverse=True)
