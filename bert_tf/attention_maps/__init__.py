"""Attention maps: attention probabilities of a text, as an image or an interactive page."""
