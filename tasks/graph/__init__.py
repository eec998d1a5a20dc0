"""Graphs from strings to predictions: heads, pipeline and traced functions."""
