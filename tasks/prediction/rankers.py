"""Rankers by path, which order the results of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.weights import sources

if TYPE_CHECKING:
    from tasks.types.ranking import TextRanker

_EXPECTED = "expected a run of task ranking, or a cross-encoder with one output"


def check_ranker(path: str) -> None:
    """Check without TensorFlow that there is a model at a path, and the task of a run.

    Raises:
        UserError: There is no model, or a run of another task.
    """
    sources.check(path)
    if Run.exists(path) and (Run.open(path).task or {}).get("kind") != "ranking":
        raise UserError(f"--rerank={path}: {_EXPECTED}")


def open_ranker(path: str) -> TextRanker:
    """Load a ranker.

    Args:
        path: Run of task ranking, or directory of a cross-encoder.

    Raises:
        UserError: It is neither.
    """
    from tasks.model.loading import load_model
    from tasks.types.ranking import RankingTask, TextRanker

    if Run.exists(path):
        return load_model(path)
    pretrained = sources.read_pretrained(path)
    source = pretrained.task
    if source is None or source["kind"] != "regression":
        raise UserError(f"--rerank={path}: {_EXPECTED}")
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
