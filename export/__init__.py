"""What to serve: a SavedModel, published only if it answers as the trained model does."""
