"""The base class of the task types, and their table."""
