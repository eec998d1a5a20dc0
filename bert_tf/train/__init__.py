"""Training shared by all tasks: losses, optimizers, the train step and the loop."""
