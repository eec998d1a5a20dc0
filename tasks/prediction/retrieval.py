"""Evaluation of an embedder as retrieval: an exact search of all documents for each query.

Shape suffixes: Q queries, K results, D size of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bert_tf.errors import UserError
from tasks.data.readers.retrieval import Relevance, RetrievalDataset
from tasks.metrics.nearest_vectors import nearest_in_blocks
from tasks.metrics.retrieval import DEPTH, retrieval_metrics
from tasks.prediction.embedders import DOCUMENT_PROMPTS, QUERY_PROMPTS, vectors_in_blocks

if TYPE_CHECKING:
    from tasks.types.similarity.text_embedder import TextEmbedder


def rank_documents(
    embedder: TextEmbedder,
    dataset: RetrievalDataset,
    queries: dict[str, str],
    log: Callable[[str], None],
) -> dict[str, list[str]]:
    """Return the ids of the most similar documents of each query, the best first.

    Documents are read, embedded and compared block by block. A document that has the id of its
    query is not a result, as in BEIR, whose queries are documents in some datasets. Queries and
    documents follow the embedder's prompts for them.

    Args:
        embedder: The embedder.
        dataset: Source of the documents.
        queries: Text by id.
        log: Callable that takes log lines.

    Raises:
        UserError: If a vector is not finite, or the embedder's similarity is a distance.
    """
    similarity = embedder.task.similarity
    if similarity not in ("cosine", "dot"):
        raise UserError(f"similarity {similarity!r}: expected cosine or dot to search by")
    total = sum(1 for _ in dataset.documents())
    blocks = vectors_in_blocks(
        embedder, queries.values(), len(queries), "queries", log, QUERY_PROMPTS
    )
    queries_QD, names = np.concatenate(list(blocks)), []

    def texts():
        for name, text in dataset.documents():
            names.append(name)
            yield text

    documents = vectors_in_blocks(embedder, texts(), total, "documents", log, DOCUMENT_PROMPTS)
    indices_QK, _ = nearest_in_blocks(documents, queries_QD, DEPTH + 1, similarity == "cosine")
    return {
        query: [names[index] for index in indices_K if names[index] != query][:DEPTH]
        for query, indices_K in zip(queries, indices_QK.tolist(), strict=True)
    }


def evaluate_retrieval(
    embedder: TextEmbedder,
    dataset: RetrievalDataset,
    relevance: Relevance,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Return the metrics of an exact search; see `tasks.metrics.retrieval`.

    Args:
        embedder: The embedder.
        dataset: Source of queries and documents.
        relevance: Relevance by document by query.
        log: Callable that takes log lines.
    """
    queries = dataset.judged_queries(relevance)
    rankings = rank_documents(embedder, dataset, queries, log)
    return retrieval_metrics(relevance, rankings)
