"""Weights from elsewhere, read into our names."""
