"""Keras models on strings, and their training."""
