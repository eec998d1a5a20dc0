"""Tagging of tokens."""
