"""Export to LiteRT (TensorFlow Lite), and its client."""
