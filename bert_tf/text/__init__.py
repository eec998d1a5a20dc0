"""Text: the vocabulary, the tokenizer in the graph, and the packing of segments."""
