"""What to serve: a task's signatures as a SavedModel, published only if it answers as the trained
model does."""
