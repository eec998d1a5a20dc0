"""Files next to the graph in a published version."""
