"""Metrics, in numpy, over a whole data set. Legend: N examples, C classes."""

import numpy as np


def accuracy(labels_N, predictions_N):
    return float(np.mean(labels_N == predictions_N))


def f1(labels_N, predictions_N, positive):
    """F1 of one class; 0 where it neither stands in the labels nor was predicted."""
    true_positives = np.sum((labels_N == positive) & (predictions_N == positive))
    either = np.sum(labels_N == positive) + np.sum(predictions_N == positive)
    return float(2 * true_positives / either) if either else 0.0


def macro_f1(labels_N, predictions_N):
    """The plain mean of the F1 of every class that was labelled or predicted, rare or common."""
    classes = np.union1d(labels_N, predictions_N)
    return float(np.mean([f1(labels_N, predictions_N, label) for label in classes]))
