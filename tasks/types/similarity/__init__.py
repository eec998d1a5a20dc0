"""Similarity: vectors of texts, and scores of pairs of them."""
