"""Ranks of the positives of dev rows among all their texts.

Shape suffixes: N rows, C texts per row, G candidates, n rows of a block, D size of a vector.
"""

import numpy as np
import scipy.spatial

from tasks.metrics.nearest_vectors import normalized
from tasks.types.similarity.losses import NO_TEXT

BLOCK_ELEMENTS = 1 << 26  # Scores in memory at a time.


def ranks_of_positives(
    numbers_NC: np.ndarray, vectors_NCD: np.ndarray, similarity: str
) -> dict[str, float]:
    """Return recall@1, recall@10 and mrr@10 of the anchors.

    They are the fractions of anchors with a positive among the first texts, and the mean of 1 /
    rank of the first positive.

    An anchor's candidates are the distinct positives and negatives of all rows; of rows of one
    text, the other texts. An anchor of several rows has the positives of all of them. A tie with
    the positive counts as better than it, so that equal vectors have no good ranks.

    Args:
        numbers_NC: Numbers of the texts, equal for equal texts and texts of one class; NO_TEXT for
            a missing text.
        vectors_NCD: Embeddings.
        similarity: A key of SIMILARITIES.
    """
    anchors_N, own_N = numbers_NC[:, 0], numbers_NC[:, min(1, numbers_NC.shape[1] - 1)]
    if numbers_NC.shape[1] == 1:
        candidates_G, vectors_GD = anchors_N, vectors_NCD[:, 0]
    else:
        candidates_G, first_G = np.unique(numbers_NC[:, 1:], return_index=True)
        vectors_GD = vectors_NCD[:, 1:].reshape(-1, vectors_NCD.shape[-1])[first_G]
        is_text_G = candidates_G != NO_TEXT
        candidates_G, vectors_GD = candidates_G[is_text_G], vectors_GD[is_text_G]
        of_anchor: dict[int, set[int]] = {}
        places_N = np.searchsorted(candidates_G, own_N)
        for anchor, place in zip(anchors_N.tolist(), places_N.tolist(), strict=True):
            of_anchor.setdefault(anchor, set()).add(place)
    size = max(1, BLOCK_ELEMENTS // len(vectors_GD))
    ranks = []
    for first in range(0, len(anchors_N), size):
        block = slice(first, first + size)
        scores_nG = _scores(vectors_NCD[block, 0], vectors_GD, similarity)
        if numbers_NC.shape[1] == 1:  # A text does not find itself.
            is_own_nG = candidates_G == own_N[block, np.newaxis]
            rows_n = np.arange(len(scores_nG))
            scores_nG[rows_n, first + rows_n] = -np.inf
            is_own_nG[rows_n, first + rows_n] = False
        else:
            is_own_nG = np.zeros(scores_nG.shape, bool)
            for row, anchor in enumerate(anchors_N[block].tolist()):
                is_own_nG[row, list(of_anchor[anchor])] = True
            is_anchor_nG = candidates_G == anchors_N[block, np.newaxis]
            scores_nG[is_anchor_nG & ~is_own_nG] = -np.inf
        best_n = np.max(np.where(is_own_nG, scores_nG, -np.inf), axis=1)
        is_better_nG = (scores_nG >= best_n[:, np.newaxis]) & ~is_own_nG
        ranks.append(np.where(is_own_nG.any(axis=1), 1.0 + is_better_nG.sum(axis=1), np.nan))
    ranks_N = np.concatenate(ranks)
    ranks_N = ranks_N[~np.isnan(ranks_N)]
    if not len(ranks_N):
        return {"recall@1": 0.0, "recall@10": 0.0, "mrr@10": 0.0}
    return {
        "recall@1": float(np.mean(ranks_N <= 1)),
        "recall@10": float(np.mean(ranks_N <= 10)),
        "mrr@10": float(np.mean(np.where(ranks_N <= 10, 1.0 / ranks_N, 0.0))),
    }


def _scores(anchors_nD, vectors_GD, similarity):
    if similarity in ("euclidean", "manhattan"):
        metric = similarity.replace("manhattan", "cityblock")
        return -scipy.spatial.distance.cdist(anchors_nD, vectors_GD, metric)
    if similarity == "cosine":
        anchors_nD, vectors_GD = normalized(anchors_nD), normalized(vectors_GD)
    return anchors_nD @ vectors_GD.T
