"""Checks of exported models against trained ones, in predictions and metrics."""
