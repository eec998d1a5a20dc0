"""Pretraining data: documents, instances, masked examples, shards and batches."""
