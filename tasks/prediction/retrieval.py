"""Search by meaning: embedders and rankers by path, evaluation, and hard negatives.

Shape suffixes: N texts of the corpus, n texts or pairs of a block, Q queries, K results or
candidates, D size of a vector.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage import strict_json
from bert_tf.system.progress import Progress
from bert_tf.weights import heads, sources
from tasks.data.readers.retrieval import Relevance, RetrievalDataset
from tasks.metrics.retrieval import DEPTH, nearest_in_blocks, normalized, retrieval_metrics
from tasks.prediction.outputs import in_batches

if TYPE_CHECKING:
    from tasks.types.ranking import TextRanker
    from tasks.types.similarity.text_embedder import TextEmbedder

TEXTS_PER_BLOCK = 16_384  # Their vectors are in memory.
# Names of prompts before queries and documents, as encode_query and encode_document of
# sentence-transformers look for them.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
_EXPECTED_RANKER = "expected a run of task ranking, or a cross-encoder with one output"


def check_embedder(path: str, checkpoint: str | None = None) -> None:
    """Check without TensorFlow that there is a model that `open_embedder` accepts.

    Raises:
        UserError: There is no model, or no such checkpoint, or it is a ranker.
    """
    sources.check(path, as_embedder=True)
    if _task_type(path) == "ranking":
        raise UserError(
            f"--run={path}: expected an embedder, received a run of task ranking, which scores "
            "texts next to their query"
        )
    if checkpoint is not None:
        Run.open(path).checkpoints.step_of(checkpoint)


def open_embedder(path: str, checkpoint: str | None = None) -> TextEmbedder:
    """Load an embedder.

    Args:
        path: Run of an embedder; or any other model, whose vectors are those of
            `TextEmbedder.from_pretrained`.
        checkpoint: Name of a checkpoint directory of the run; by default the best, else the latest.

    Raises:
        UserError: There is no model.
    """
    from bert_tf.train.distribution import use_precision
    from tasks import TextEmbedder
    from tasks.model.loading import load_model

    use_precision("float32")
    if _task_type(path) == TextEmbedder.task_class.kind:
        return load_model(path, checkpoint=checkpoint)
    if checkpoint is not None:
        raise UserError(f"--checkpoint={checkpoint}: expected a run of an embedder, not {path}")
    return TextEmbedder.from_pretrained(path)


def _task_type(path):
    """Return the task type of a run; `None` if it was only pretrained, and for other models."""
    return (Run.open(path).task or {}).get("kind") if Run.exists(path) else None


def prompt_of(embedder: TextEmbedder, names: Iterable[str]) -> str | None:
    """Return the first of these names that is a prompt of the embedder, or `None`."""
    return next((name for name in names if name in embedder.task.prompts), None)


def vectors_in_blocks(
    embedder: TextEmbedder,
    texts: Iterable[str],
    total: int,
    what: str,
    log: Callable[[str], None],
    prompts: Iterable[str] = (),
) -> Iterator[np.ndarray]:
    """Yield the vectors of texts, float32 `(n, D)`, in order, with progress.

    Args:
        embedder: The embedder.
        texts: The texts as in their file, read block by block.
        total: Their number.
        what: What they are, such as "documents".
        log: Callable that takes log lines.
        prompts: Names of the prompt before the texts; the first that the embedder has is used, by
            default its default prompt.

    Raises:
        UserError: If a vector is not finite.
    """
    prompt = prompt_of(embedder, prompts)
    with Progress(log, what, total) as progress:
        for batch in in_batches(texts, TEXTS_PER_BLOCK):
            vectors_nD = embedder.predict(batch, verbose=0, prompt=prompt)
            if not np.isfinite(vectors_nD).all():
                raise UserError(f"{what}: {strict_json.NOT_FINITE}")
            yield vectors_nD
            progress.update(progress.done + len(batch))
    for line in embedder.serving.take_token_counts().warnings(what, allows_unknown=True):
        log(f"warning: {line}")


def check_ranker(path: str) -> None:
    """Check without TensorFlow that there is a model at a path, and the task of a run.

    Raises:
        UserError: There is no model, or a run of another task.
    """
    sources.check(path)
    if Run.exists(path) and _task_type(path) not in ("ranking", "regression"):
        raise UserError(f"--rerank={path}: {_EXPECTED_RANKER}")


def open_ranker(path: str) -> TextRanker:
    """Load a ranker.

    Args:
        path: Run of task ranking, or a cross-encoder: a directory, or a run of regression on pairs.

    Raises:
        UserError: It is neither.
    """
    from tasks.model.loading import load_model
    from tasks.types.ranking import RankingTask, TextRanker

    if _task_type(path) == "ranking":
        return load_model(path)
    pretrained = sources.read_pretrained(path)
    source = pretrained.task or {}
    is_cross_encoder = source.get("kind") == "regression" and heads.reads_pairs(source)
    # Converted rankers say that they are.
    if not is_cross_encoder and source.get("kind") != "ranking":
        raise UserError(
            f"--rerank={path}: {_EXPECTED_RANKER}; one whose directory names no activation has to "
            "be converted with bert-tf convert --pairs"
        )
    task = RankingTask(
        max_seq_length=source["max_seq_length"], activation=source.get("activation", "identity")
    )
    return TextRanker.from_weights(pretrained, task, keep_head=True)


def rerank(ranker: TextRanker, query: str, texts: Sequence[str]) -> list[tuple[int, float]]:
    """Return (index, score) of texts, the best first.

    Args:
        ranker: The ranker.
        query: The query.
        texts: The texts, none of them empty.
    """
    (row,) = ranker.predict_rows({"query": [query], "texts": [list(texts)]})
    return [(index, row["scores"][index]) for index in row["order"]]


class MinedPair(NamedTuple):
    """A pair with its negatives, most similar first."""

    anchor: str
    positive: str
    negatives: list[str]


def mine_negatives(
    embedder: TextEmbedder,
    corpus: Sequence[str],
    pairs: Callable[[], Iterable[tuple[str, str]]],
    *,
    num_negatives: int,
    margin: float,
    top_k: int,
    directory: str | os.PathLike[str],
    log: Callable[[str], None],
) -> Iterator[MinedPair]:
    """Yield each pair with its hard negatives, in order.

    Args:
        embedder: The embedder.
        corpus: Texts that may become negatives.
        pairs: Returns all (anchor, positive) pairs; it is called several times. A text that is the
            positive of an anchor in any row is no negative of this anchor.
        num_negatives: Largest number of negatives of a pair.
        margin: A negative is less similar to the anchor than the positive by more than this.
        top_k: Number of nearest texts that negatives are taken from.
        directory: Where the vectors of the corpus are, in a temporary file.
        log: Callable that takes log lines.

    Raises:
        UserError: If a vector is not finite.
    """

    def key(text):
        """Return a text such that those that differ in case or white space alone are equal."""
        return " ".join(text.split()).casefold()

    excluded: dict[str, set[str]] = {}
    count = 0
    for anchor, positive in pairs():
        # Nor is a blank, or the anchor, which duplicate questions have as a nearest text.
        excluded.setdefault(key(anchor), {key(anchor), ""}).add(key(positive))
        count += 1

    def negatives_of(anchor, candidates):
        """Return the first candidates that are no positives of the anchor, each once."""
        seen, negatives = set(excluded[key(anchor)]), []
        for text in candidates:
            if len(negatives) == num_negatives:
                break
            if key(text) not in seen:
                seen.add(key(text))
                negatives.append(text)
        return negatives

    def vectors(texts, total, what, prompts):
        return vectors_in_blocks(embedder, texts, total, what, log, prompts)

    with tempfile.TemporaryFile(dir=directory) as stream:
        for vectors_nD in vectors(corpus, len(corpus), "texts of the corpus", DOCUMENT_PROMPTS):
            stream.write(normalized(vectors_nD).tobytes())
        stream.flush()
        shape = len(corpus), vectors_nD.shape[1]
        vectors_ND = np.memmap(stream, np.float32, "r", shape=shape)
        anchors = (anchor for anchor, _ in pairs())
        positives = (positive for _, positive in pairs())
        for block, anchors_nD, positives_nD in zip(
            in_batches(pairs(), TEXTS_PER_BLOCK),
            vectors(anchors, count, "anchors", QUERY_PROMPTS),
            vectors(positives, count, "positives", DOCUMENT_PROMPTS),
            strict=True,
        ):
            of_positives_n = np.sum(normalized(anchors_nD) * normalized(positives_nD), axis=1)
            starts = range(0, len(corpus), TEXTS_PER_BLOCK)
            blocks = (vectors_ND[first : first + TEXTS_PER_BLOCK] for first in starts)
            indices_nK, similarities_nK = nearest_in_blocks(blocks, anchors_nD, top_k)
            is_allowed_nK = similarities_nK < of_positives_n[:, np.newaxis] - margin
            for pair, indices_K, is_allowed_K in zip(block, indices_nK, is_allowed_nK, strict=True):
                candidates = map(corpus.__getitem__, indices_K[is_allowed_K].tolist())
                yield MinedPair(*pair, negatives_of(pair[0], candidates))


def rank_documents(
    embedder: TextEmbedder,
    dataset: RetrievalDataset,
    queries: dict[str, str],
    log: Callable[[str], None],
    relevance: Relevance | None = None,
) -> dict[str, list[str]]:
    """Return the ids of the most similar documents of each query, the best first.

    Documents are read, embedded and compared block by block. A document that has the id of its
    query is not a result, as in BEIR, whose queries are documents in some datasets. It is one if it
    is relevant to the query: both then have numbers of their own. Queries and documents follow the
    embedder's prompts for them.

    Args:
        embedder: The embedder.
        dataset: Source of the documents.
        queries: Text by id.
        log: Callable that takes log lines.
        relevance: Relevance by document by query.

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
    judged = relevance or {}
    return {
        query: [
            name
            for name in map(names.__getitem__, indices_K)
            if name != query or judged.get(query, {}).get(name, 0) > 0
        ][:DEPTH]
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
    rankings = rank_documents(embedder, dataset, queries, log, relevance)
    return retrieval_metrics(relevance, rankings)
