"""Question answering by a span of a context."""
