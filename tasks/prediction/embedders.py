"""Embedders by path, and vectors of texts in order.

Shape suffixes: n texts of a block, D size of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage import strict_json
from bert_tf.system.progress import Progress
from bert_tf.weights import sources
from tasks.prediction.prediction_files import in_batches

if TYPE_CHECKING:
    from tasks.types.similarity.text_embedder import TextEmbedder

TEXTS_PER_BLOCK = 16_384  # Their vectors are in memory.
# Names of prompts before queries and documents, as encode_query and encode_document of
# sentence-transformers look for them.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


def check_embedder(path: str, checkpoint: str | None = None) -> None:
    """Check without TensorFlow that there is a model that `open_embedder` accepts.

    Raises:
        UserError: There is no model, or no such checkpoint, or it is a ranker.
    """
    sources.check(path, as_embedder=True)
    if Run.exists(path) and (Run.open(path).task or {}).get("kind") == "ranking":
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
    if _is_run_of_embedder(path, TextEmbedder.task_class.kind):
        return load_model(path, checkpoint=checkpoint)
    if checkpoint is not None:
        raise UserError(f"--checkpoint={checkpoint}: expected a run of an embedder, not {path}")
    return TextEmbedder.from_pretrained(path)


def _is_run_of_embedder(path, kind):
    return Run.exists(path) and (Run.open(path).task or {}).get("kind") == kind


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
        texts: The texts, read block by block.
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
            vectors_nD = embedder.predict(batch, prompt=prompt)
            if not np.isfinite(vectors_nD).all():
                raise UserError(f"{what}: {strict_json.NOT_FINITE}")
            yield vectors_nD
            progress.update(progress.done + len(batch))
