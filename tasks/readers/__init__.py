"""Readers of the forms that labelled text comes in. Free of TensorFlow."""
