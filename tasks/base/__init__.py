"""Base classes of the task types, and their registry."""
