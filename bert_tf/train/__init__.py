"""Training: losses, the optimizer, the train step and the loop that all training shares."""
