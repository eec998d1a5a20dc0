"""Pretraining data: documents -> instances -> masked examples -> shards -> batches."""
