"""Estimates of the memory, time and traffic of a training."""
