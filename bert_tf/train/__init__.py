"""Training: losses, the optimizer, the train step and the loop that pretraining and fine-tuning
share."""
