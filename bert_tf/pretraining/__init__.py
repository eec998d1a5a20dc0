"""Pretraining: the two objectives, evaluation on held-out shards, and the recipe."""
