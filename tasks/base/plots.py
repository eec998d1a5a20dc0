"""Plots of a fine-tuning run, drawn into matplotlib axes, and their images in RUN/plots.

A task returns its figures as functions of the axes, so that it needs no matplotlib. Shape suffixes:
N examples, C labels, K points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.plotting import draw_legend_above, plot_metrics, to_png

Plot = Callable[[Any], None]  # Draws a figure into matplotlib axes.

DIRECTORY, LAST = "plots", "loss.png"
MAX_LABELS = 80  # Rows of a confusion matrix, or groups of bars, that can be read.
MAX_NUMBERED = 20  # Rows of a confusion matrix with numbers in the cells.
MAX_HORIZONTAL = 6  # Groups of bars whose names fit side by side.


def draw_confusion_matrix(axes: Any, labels: Sequence[str], counts_CC: np.ndarray) -> None:
    """Draw numbers of examples by label (rows) and prediction; colors are fractions of a row."""
    side = max(4.0, 0.25 * len(labels))
    axes.figure.set_size_inches(side + 1, side)
    counts_CC = np.asarray(counts_CC)
    fractions_CC = counts_CC / np.maximum(counts_CC.sum(1, keepdims=True), 1)
    axes.imshow(fractions_CC, cmap="Blues", vmin=0, vmax=1)
    places = range(len(labels))
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in labels]
    axes.set_xticks(places, names, rotation=90, fontsize=8, parse_math=False)
    axes.set_yticks(places, names, fontsize=8, parse_math=False)
    axes.set(xlabel="prediction", ylabel="label")
    if len(labels) <= MAX_NUMBERED:
        for row, column in np.argwhere(counts_CC):
            color = "white" if fractions_CC[row, column] > 0.5 else "black"
            text = str(counts_CC[row, column])
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)


def reliability_points(
    confidence_N: np.ndarray, is_correct_N: np.ndarray, bins: int = 10
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean confidence, accuracy and count of each bin with examples, `(K,)` each.

    Args:
        confidence_N: Probabilities of the predictions, float.
        is_correct_N: Whether the predictions are correct, bool.
        bins: Number of bins of equal width.
    """
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    bin_N = np.searchsorted(edges, confidence_N)
    counts = np.bincount(bin_N, minlength=bins)
    kept = counts > 0
    means = [
        np.bincount(bin_N, weights=values, minlength=bins)[kept] / counts[kept]
        for values in (confidence_N, is_correct_N)
    ]
    return means[0], means[1], counts[kept]


def draw_reliability(axes: Any, confidence_N: np.ndarray, is_correct_N: np.ndarray) -> None:
    """Draw accuracy over confidence (Guo et al. 2017, figure 1); points are as large as bins."""
    confidence_K, accuracy_K, count_K = reliability_points(confidence_N, is_correct_N)
    axes.plot([0, 1], [0, 1], linestyle="--", color="gray", linewidth=1, label="calibrated")
    axes.plot(confidence_K, accuracy_K, linewidth=1, color="tab:blue")
    sizes = 300 * count_K / count_K.sum()
    axes.scatter(confidence_K, accuracy_K, sizes, color="tab:blue", label="predictions")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(alpha=0.3)


def precision_recall_points(
    is_positive_N: np.ndarray, scores_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thresholds in ascending order, precision and recall of a class, `(K,)` each."""
    order_N = np.argsort(-scores_N, kind="stable")
    scores_N, positive_N = scores_N[order_N], is_positive_N[order_N]
    # The last of equal scores stands for all examples that reach it.
    last_K = np.flatnonzero(np.append(np.diff(scores_N) != 0, True))
    hits_K = np.cumsum(positive_N)[last_K]
    precision_K, recall_K = hits_K / (last_K + 1), hits_K / max(positive_N.sum(), 1)
    return scores_N[last_K][::-1], precision_K[::-1], recall_K[::-1]


def draw_precision_recall(
    axes: Any,
    name: str,
    is_positive_N: np.ndarray,
    scores_N: np.ndarray,
    threshold: float | None = None,
) -> None:
    """Draw precision and recall of a class over the threshold, and the tuned threshold."""
    threshold_K, precision_K, recall_K = precision_recall_points(is_positive_N, scores_N)
    for values, label in ((precision_K, "precision"), (recall_K, "recall")):
        axes.step(threshold_K, values, where="pre", label=label, linewidth=1)
    _draw_threshold(axes, threshold)
    axes.set(xlabel="threshold", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(name, fontsize=9, parse_math=False)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def draw_bars(axes: Any, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar per name in each group; `values` are from 0 to 1, one per group, by name."""
    axes.figure.set_size_inches(max(6.0, 0.4 * len(groups)), 4.0)
    places, width = np.arange(len(groups)), 0.8 / len(values)
    for number, (name, of_name) in enumerate(values.items()):
        axes.bar(places + number * width, of_name, width, label=name)
    middle = places + 0.4 - width / 2
    rotation = 0 if len(groups) <= MAX_HORIZONTAL else 90
    axes.set_xticks(middle, groups, rotation=rotation, fontsize=8, parse_math=False)
    axes.set_ylim(0, 1.02)
    draw_legend_above(axes)
    axes.grid(axis="y", alpha=0.3)


def draw_histogram(
    axes: Any, scores: Mapping[str, np.ndarray], x_label: str, threshold: float | None = None
) -> None:
    """Draw one histogram of scores per name over the same bins, and the tuned threshold."""
    # In float32 nearly equal scores have no 40 bins between them.
    all_scores = np.concatenate(list(scores.values()), dtype=np.float64)
    edges = np.histogram_bin_edges(all_scores, bins=40)
    for name, of_name in scores.items():
        axes.hist(of_name, edges, density=len(of_name) > 0, alpha=0.6, label=name)
    _draw_threshold(axes, threshold)
    axes.set(xlabel=x_label, ylabel="density")
    axes.legend(fontsize=8)


def _draw_threshold(axes, threshold):
    if threshold is not None:
        axes.axvline(threshold, linestyle="--", color="gray", label="tuned threshold")


def are_complete(run: Run) -> bool:
    """Return True if RUN/plots has all images; loss.png is written last."""
    return files.exists(f"{run.file(DIRECTORY)}/{LAST}")


def write(run: Run, plots: Mapping[str, Plot]) -> str:
    """Write loss.png and one image per plot to RUN/plots, and return the directory.

    Raises UserError if matplotlib is not installed.
    """
    directory = run.file(DIRECTORY)
    files.makedirs(directory)
    for name, plot in plots.items():
        files.atomic_write_bytes(f"{directory}/{name}.png", _image(plot))
    lines = run.metrics()

    def draw_metrics(figure):
        losses, scores = figure.subplots(2, 1, sharex=True)
        plot_metrics(losses, lines, _names(lines, is_loss=True), "dev")
        plot_metrics(scores, lines, _names(lines, is_loss=False), "dev")
        scores.set_xlabel("step")

    files.atomic_write_bytes(f"{directory}/{LAST}", to_png(draw_metrics, figsize=(8, 7)))
    return directory


def _image(plot):
    """Return the PNG image of a plot."""
    return to_png(lambda figure: plot(figure.subplots()), figsize=(6.0, 5.0))


def _names(lines, is_loss):
    """Return the training loss and dev losses, or the dev metrics of at most 1 without labels."""
    names = dict.fromkeys(name for line in lines for name in line)
    if is_loss:
        return [name for name in names if name == "loss" or name.endswith("_loss")]
    overall = ("accuracy", "f1", "matthews", "exact_match", "pearson", "spearman", "roc_auc")
    overall += ("pr_auc", "@1", "@10", "_map")
    return [name for name in names if name.startswith("dev") and name.endswith(overall)][:8]
