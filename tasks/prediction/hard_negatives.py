"""Hard negatives: texts of a corpus that are similar to an anchor without being its positive.

Shape suffixes: N texts of the corpus, n pairs of a block, D size of a vector, K candidates.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.metrics.nearest_vectors import nearest, normalized
from tasks.prediction.embedders import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    TEXTS_PER_BLOCK,
    vectors_in_blocks,
)
from tasks.prediction.prediction_files import in_batches

if TYPE_CHECKING:
    from tasks.types.similarity.text_embedder import TextEmbedder


class MinedPair(NamedTuple):
    """A pair with its negatives, most similar first."""

    anchor: str
    positive: str
    negatives: list[str]


class NegativeMiner:
    """Finds hard negatives; the vectors of the corpus are in a temporary file.

    Args:
        embedder: The embedder.
        corpus: Texts that may become negatives.
        pairs: Returns all (anchor, positive) pairs; it is called several times. A text that is the
            positive of an anchor in any row is no negative of this anchor.
        directory: Where the temporary file is created.
        log: Callable that takes log lines.
    """

    def __init__(
        self,
        embedder: TextEmbedder,
        corpus: Sequence[str],
        pairs: Callable[[], Iterable[tuple[str, str]]],
        directory: str | os.PathLike[str],
        log: Callable[[str], None],
    ) -> None:
        self.embedder, self.corpus, self.pairs, self.log = embedder, corpus, pairs, log
        self._excluded: dict[str, set[str]] = {}
        self._count = 0
        for anchor, positive in pairs():
            key = _key(anchor)
            # Nor is a blank, or the anchor, which duplicate questions have as a nearest text.
            self._excluded.setdefault(key, {key, ""}).add(_key(positive))
            self._count += 1
        self._directory = directory

    def mine(self, num_negatives: int, margin: float, top_k: int) -> Iterator[MinedPair]:
        """Yield each pair with its negatives, in order.

        Args:
            num_negatives: Largest number of negatives of a pair.
            margin: A negative is less similar to the anchor than the positive by more than this.
            top_k: Number of nearest texts that negatives are taken from.

        Raises:
            UserError: If a vector is not finite.
        """
        with tempfile.TemporaryFile(dir=self._directory) as stream:
            for vectors_nD in self._vectors(
                self.corpus, len(self.corpus), "texts of the corpus", DOCUMENT_PROMPTS
            ):
                stream.write(normalized(vectors_nD).tobytes())
            stream.flush()
            shape = len(self.corpus), vectors_nD.shape[1]
            vectors_ND = np.memmap(stream, np.float32, "r", shape=shape)
            anchors = (anchor for anchor, _ in self.pairs())
            positives = (positive for _, positive in self.pairs())
            of_anchors = self._vectors(anchors, self._count, "anchors", QUERY_PROMPTS)
            of_positives = self._vectors(positives, self._count, "positives", DOCUMENT_PROMPTS)
            blocks = in_batches(self.pairs(), TEXTS_PER_BLOCK)
            for pairs, anchors_nD, positives_nD in zip(
                blocks, of_anchors, of_positives, strict=True
            ):
                of_positives_n = np.sum(normalized(anchors_nD) * normalized(positives_nD), axis=1)
                indices_nK, similarities_nK = nearest(vectors_ND, anchors_nD, top_k)
                is_allowed_nK = similarities_nK < of_positives_n[:, np.newaxis] - margin
                for pair, indices_K, is_allowed_K in zip(
                    pairs, indices_nK, is_allowed_nK, strict=True
                ):
                    candidates = map(self.corpus.__getitem__, indices_K[is_allowed_K].tolist())
                    negatives = self._negatives(pair[0], candidates, num_negatives)
                    yield MinedPair(*pair, negatives)

    def _vectors(self, texts, total, what, prompts):
        return vectors_in_blocks(self.embedder, texts, total, what, self.log, prompts)

    def _negatives(self, anchor, candidates, num_negatives):
        """Return the first candidates that are no positives of the anchor, each once."""
        seen, negatives = set(self._excluded[_key(anchor)]), []
        for text in candidates:
            if len(negatives) == num_negatives:
                break
            if (key := _key(text)) not in seen:
                seen.add(key)
                negatives.append(text)
        return negatives


def _key(text):
    """Return a text such that those that differ in case or white space alone are equal."""
    return " ".join(text.split()).casefold()
