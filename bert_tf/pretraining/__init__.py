"""Pretraining: model with both objectives, evaluation on held-out shards, and the recipe."""
