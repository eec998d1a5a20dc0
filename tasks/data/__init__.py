"""Data of tasks: rows, examples, windows and batches."""
