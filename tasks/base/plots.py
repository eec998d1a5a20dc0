"""Plots of a fine-tuning run: data of a figure from the postprocessors, images in RUN/plots.

A postprocessor returns what a figure shows as one of the classes here, so that it needs no
matplotlib. Shape suffixes: N examples, C labels, K points, G groups.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.system.plotting import import_pyplot, plot_metrics, to_png

DIRECTORY, LAST = "plots", "loss.png"
MAX_LABELS = 80  # Rows of a confusion matrix, or groups of bars, that can be read.
MAX_NUMBERED = 20  # Rows of a confusion matrix with numbers in the cells.


class Plot(abc.ABC):
    """Data of a figure."""

    size = (6.0, 5.0)

    @abc.abstractmethod
    def draw(self, axes: Any) -> None:
        """Draw the figure into matplotlib axes."""


@dataclasses.dataclass(frozen=True)
class ConfusionMatrix(Plot):
    """Matrix of labels (rows) and predictions (columns).

    Attributes:
        labels: C names.
        counts_CC: Number of examples per cell, int `(C, C)`.
    """

    labels: Sequence[str]
    counts_CC: np.ndarray

    @property
    def size(self) -> tuple[float, float]:  # type: ignore[override]
        """Width and height in inches."""
        side = max(4.0, 0.25 * len(self.labels))
        return side + 1, side

    def draw(self, axes: Any) -> None:
        """Draw fractions of each row as colors, and the counts as numbers."""
        counts_CC = np.asarray(self.counts_CC)
        fractions_CC = counts_CC / np.maximum(counts_CC.sum(1, keepdims=True), 1)
        axes.imshow(fractions_CC, cmap="Blues", vmin=0, vmax=1)
        places = range(len(self.labels))
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in self.labels]
        axes.set_xticks(places, names, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(places, names, fontsize=8, parse_math=False)
        axes.set(xlabel="prediction", ylabel="label")
        if len(self.labels) <= MAX_NUMBERED:
            for row, column in np.argwhere(counts_CC):
                color = "white" if fractions_CC[row, column] > 0.5 else "black"
                text = str(counts_CC[row, column])
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)


@dataclasses.dataclass(frozen=True)
class Reliability(Plot):
    """Reliability diagram: accuracy over confidence (Guo et al. 2017, figure 1).

    Attributes:
        confidence_N: Probabilities of the predictions, float `(N,)`.
        is_correct_N: Whether the predictions are correct, bool `(N,)`.
        bins: Number of bins of equal width.
    """

    confidence_N: np.ndarray
    is_correct_N: np.ndarray
    bins: int = 10

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean confidence, accuracy and count of each bin with examples, `(K,)` each."""
        edges = np.linspace(0, 1, self.bins + 1)[1:-1]
        bin_N = np.searchsorted(edges, self.confidence_N)
        counts = np.bincount(bin_N, minlength=self.bins)
        kept = counts > 0
        means = [
            np.bincount(bin_N, weights=values, minlength=self.bins)[kept] / counts[kept]
            for values in (self.confidence_N, self.is_correct_N)
        ]
        return means[0], means[1], counts[kept]

    def draw(self, axes: Any) -> None:
        """Draw a point per bin, as large as its share of the examples, and the diagonal."""
        confidence_K, accuracy_K, count_K = self.points()
        axes.plot([0, 1], [0, 1], linestyle="--", color="gray", linewidth=1, label="calibrated")
        axes.plot(confidence_K, accuracy_K, linewidth=1, color="tab:blue")
        sizes = 300 * count_K / count_K.sum()
        axes.scatter(confidence_K, accuracy_K, sizes, color="tab:blue", label="predictions")
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
        axes.legend(loc="upper left", fontsize=8)
        axes.grid(alpha=0.3)


@dataclasses.dataclass(frozen=True)
class PrecisionRecall(Plot):
    """Precision and recall of one class over the threshold.

    Attributes:
        name: The class.
        is_positive_N: Whether an example is of the class, bool `(N,)`.
        scores_N: Probabilities of the class, float `(N,)`.
        threshold: The tuned threshold, or None.
    """

    name: str
    is_positive_N: np.ndarray
    scores_N: np.ndarray
    threshold: float | None = None

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return thresholds in ascending order, precision and recall, `(K,)` each."""
        order_N = np.argsort(-self.scores_N, kind="stable")
        scores_N, positive_N = self.scores_N[order_N], self.is_positive_N[order_N]
        # The last of equal scores stands for all examples that reach it.
        last_K = np.flatnonzero(np.append(np.diff(scores_N) != 0, True))
        hits_K = np.cumsum(positive_N)[last_K]
        precision_K, recall_K = hits_K / (last_K + 1), hits_K / max(positive_N.sum(), 1)
        return scores_N[last_K][::-1], precision_K[::-1], recall_K[::-1]

    def draw(self, axes: Any) -> None:
        """Draw both curves and the threshold."""
        threshold_K, precision_K, recall_K = self.points()
        for values, name in ((precision_K, "precision"), (recall_K, "recall")):
            axes.step(threshold_K, values, where="pre", label=name, linewidth=1)
        if self.threshold is not None:
            axes.axvline(self.threshold, linestyle="--", color="gray", label="tuned threshold")
        axes.set(xlabel="threshold", xlim=(0, 1), ylim=(0, 1.02))
        axes.set_title(self.name, fontsize=9, parse_math=False)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)


@dataclasses.dataclass(frozen=True)
class Bars(Plot):
    """Groups of bars with values from 0 to 1.

    Attributes:
        groups: G names.
        values: `{name: G values}`.
    """

    groups: Sequence[str]
    values: Mapping[str, Sequence[float]]

    @property
    def size(self) -> tuple[float, float]:  # type: ignore[override]
        """Width and height in inches."""
        return max(6.0, 0.4 * len(self.groups)), 4.0

    def draw(self, axes: Any) -> None:
        """Draw a bar per name in each group."""
        places, width = np.arange(len(self.groups)), 0.8 / len(self.values)
        for number, (name, values) in enumerate(self.values.items()):
            axes.bar(places + number * width, values, width, label=name)
        middle = places + 0.4 - width / 2
        axes.set_xticks(middle, self.groups, rotation=90, fontsize=8, parse_math=False)
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8)
        axes.grid(axis="y", alpha=0.3)


@dataclasses.dataclass(frozen=True)
class Histogram(Plot):
    """Distributions of a score.

    Attributes:
        scores: `{name: scores}`.
        x_label: What the score is.
        threshold: The tuned threshold, or None.
    """

    scores: Mapping[str, np.ndarray]
    x_label: str
    threshold: float | None = None

    def draw(self, axes: Any) -> None:
        """Draw one histogram per name over the same bins."""
        edges = np.histogram_bin_edges(np.concatenate(list(self.scores.values())), bins=40)
        for name, scores in self.scores.items():
            axes.hist(scores, edges, density=len(scores) > 0, alpha=0.6, label=name)
        if self.threshold is not None:
            axes.axvline(self.threshold, linestyle="--", color="gray", label="tuned threshold")
        axes.set(xlabel=self.x_label, ylabel="density")
        axes.legend(fontsize=8)


def are_complete(run: Run) -> bool:
    """Return True if RUN/plots has all images; loss.png is written last."""
    return files.exists(f"{run.file(DIRECTORY)}/{LAST}")


def write(run: Run, plots: Mapping[str, Plot]) -> str:
    """Write loss.png and one image per plot to RUN/plots.

    Args:
        run: Open run.
        plots: Plots by file name without suffix.

    Returns:
        The directory.

    Raises:
        UserError: If matplotlib is not installed.
    """
    pyplot = import_pyplot()
    directory = run.file(DIRECTORY)
    files.makedirs(directory)
    for name in files.listdir(directory):  # Of a process that was killed.
        if files.is_temporary(name):
            files.remove(f"{directory}/{name}")
    for name, plot in plots.items():
        figure, axes = pyplot.subplots(figsize=plot.size)
        plot.draw(axes)
        files.atomic_write_bytes(f"{directory}/{name}.png", to_png(figure))
    figure, (losses, scores) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True)
    lines = run.metrics()
    plot_metrics(losses, lines, _names(lines, is_loss=True), "dev")
    plot_metrics(scores, lines, _names(lines, is_loss=False), "dev")
    scores.set_xlabel("step")
    files.atomic_write_bytes(f"{directory}/{LAST}", to_png(figure))
    return directory


def _names(lines, is_loss):
    """Return the training loss and dev losses, or the dev metrics from 0 to 1 without labels."""
    names = dict.fromkeys(name for line in lines for name in line)
    if is_loss:
        return [name for name in names if name == "loss" or name.endswith("_loss")]
    overall = ("accuracy", "f1", "exact_match", "pearson", "spearman", "roc_auc", "pr_auc")
    return [name for name in names if name.startswith("dev") and name.endswith(overall)][:8]
