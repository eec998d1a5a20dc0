"""Text: vocabulary, tokenizer inside the graph, and packing of segments."""
