"""Ranks of positives among the texts of dev rows, on literals."""

import numpy as np
import pytest

from bert_tf import UserError
from tasks.types.similarity.losses import NO_TEXT
from tasks.types.similarity.text_embedder import ranks_of_positives

# Two rows of anchor, positive and negative.
VECTORS = np.array(
    [[[1, 0], [1, 1], [2, 0.1]], [[0, 1], [0, 3], [-1, 0]]],
    np.float32,
)
NUMBERS = np.array([[0, 1, 2], [3, 4, 5]], np.int32)


def test_anchors_search_among_positives_and_negatives_of_all_rows():
    # The first positive is behind its negative, the second one is first.
    expected = {"recall@1": 0.5, "recall@10": 1.0, "mrr@10": (1 / 2 + 1) / 2}
    assert ranks_of_positives(NUMBERS, VECTORS, "cosine") == pytest.approx(expected)


def test_missing_texts_and_the_anchor_itself_are_no_candidates():
    numbers = np.array([[0, 1, NO_TEXT], [3, 4, 5]], np.int32)
    assert ranks_of_positives(numbers, VECTORS, "cosine")["recall@1"] == 1.0
    numbers = np.array([[0, 1, 0], [3, 4, 5]], np.int32)  # The negative is the anchor's text.
    assert ranks_of_positives(numbers, VECTORS, "cosine")["recall@1"] == 1.0


def test_an_anchor_of_several_rows_has_all_their_positives():
    vectors = np.array([[[1, 0], [1, 0.1]], [[1, 0], [1, 0.3]], [[0, 1], [1, 0.2]]], np.float32)
    numbers = np.array([[0, 1], [0, 2], [3, 4]], np.int32)
    # Both rows of anchor 0 find the positive 1 first; anchor 3 finds the positive 2 before its own.
    expected = {"recall@1": 2 / 3, "recall@10": 1.0, "mrr@10": (1 + 1 + 1 / 2) / 3}
    assert ranks_of_positives(numbers, vectors, "cosine") == pytest.approx(expected)


def test_equal_vectors_have_no_good_rank():
    vectors = np.ones_like(VECTORS)
    assert ranks_of_positives(NUMBERS, vectors, "cosine")["mrr@10"] == pytest.approx(1 / 4)


def test_vectors_that_are_not_finite_have_no_rank():
    """Comparisons with NaN are false, so that nothing would be before the positive."""
    vectors = VECTORS.copy()
    vectors[1, 0, 0] = np.nan
    with pytest.raises(UserError, match="vectors: expected finite numbers, received 1 of 2"):
        ranks_of_positives(NUMBERS, vectors, "cosine")


@pytest.mark.parametrize(
    ("similarity", "first"), [("cosine", 1.0), ("dot", 0.5), ("euclidean", 1.0), ("manhattan", 1.0)]
)
def test_the_similarity_decides(similarity, first):
    vectors = np.array([[[1, 0], [1, 0.1]], [[0.5, 0.5], [4, 4]]], np.float32)
    numbers = np.array([[0, 1], [2, 3]], np.int32)
    if similarity in ("euclidean", "manhattan"):
        vectors[1, 1] = [0.4, 0.5]
    assert ranks_of_positives(numbers, vectors, similarity)["recall@1"] == first


def test_a_text_of_a_class_searches_among_the_other_texts():
    vectors = np.array([[[1, 0]], [[1, 0.1]], [[0, 1]], [[1, 0.05]]], np.float32)
    classes = np.array([[0], [0], [0], [1]], np.int32)
    # Nearest to texts 0 and 1 is text 3, of the other class; to text 2 it is text 1. Text 3 has no
    # other text of its class and is left out.
    expected = {"recall@1": 1 / 3, "recall@10": 1.0, "mrr@10": (1 / 2 + 1 / 2 + 1) / 3}
    assert ranks_of_positives(classes, vectors, "cosine") == pytest.approx(expected)
