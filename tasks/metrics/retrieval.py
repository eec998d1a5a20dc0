"""Metrics of retrieval, with the definitions of trec_eval.

A ranking is a list of documents, the best first. A document is relevant to a query if its
relevance is above 0; only nDCG distinguishes grades. Each metric is a mean over the queries that
have judgements, as of trec_eval with -c: a query without a ranking, or without a relevant
document, counts as 0.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

CUTOFFS_OF_RECALL = (1, 5, 10, 100)
CUTOFF = 10  # Of the reciprocal rank and of nDCG.
# Documents of a ranking that the mean average precision sees, as in runs of TREC.
DEPTH = 1000

_Query = TypeVar("_Query", bound=Hashable)
_Document = TypeVar("_Document", bound=Hashable)


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


_OTHERS = (f"mrr@{CUTOFF}", f"ndcg@{CUTOFF}", "map")


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
