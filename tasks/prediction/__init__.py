"""Files of predictions and vectors, written by one process or several."""
