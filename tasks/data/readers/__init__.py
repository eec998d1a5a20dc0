"""Readers of the file formats of labelled text, free of TensorFlow."""
