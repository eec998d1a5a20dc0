"""Measure and plot how the cost of training and serving grows.

    python benchmarks/growth.py --output=DIRECTORY       (about ten minutes on two cores)

Training: time and peak memory of a pretraining step, flat, in float32. The base is 6 layers of
hidden size 256 and 8 examples of 128 tokens. Length, batch size and layers vary, with and without
gradient checkpointing. Each point has a separate process. Serving: strings to vectors with 6 layers
of hidden size 384. Tokens per text and texts per request vary.

Writes growth.jsonl, growth_training.png and growth_serving.png to DIRECTORY. Their dashed lines are
the arithmetic of the matrix products alone, at the rate of a line's largest point.
"""

import argparse
import dataclasses
import pathlib

import matplotlib

matplotlib.use("agg")

import matplotlib.ticker
import own_process
from matplotlib import pyplot
from pretraining_batch import Sizes

BASE = Sizes(hidden=256, batch=8)
GROWING = {"length": (64, 128, 256, 512), "batch": (4, 8, 16, 32), "layers": (2, 4, 6, 12)}
STEPS, WARMUP_STEPS = 5, 2
RECOMPUTE = {False: "activations stored", True: "layers recomputed"}
SERVED = Sizes(hidden=384)
NUMBER = matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
LENGTHS, BATCHES = (8, 16, 32, 64, 128, 256, 512), (1, 4, 16, 64)


def training_points():
    """Yield the sizes, settings and metrics of each point as one dict."""
    points = {
        dataclasses.replace(BASE, **{name: value})
        for name, values in GROWING.items()
        for value in values
    }
    for sizes in sorted(points, key=dataclasses.astuple):
        for recompute in RECOMPUTE:
            metrics = own_process.call(
                "pretraining_step_tensorflow.bare",
                sizes=dataclasses.asdict(sizes),
                layout="flat",
                precision="float32",
                steps=STEPS,
                recompute=recompute,
                uncounted=WARMUP_STEPS,
            )
            yield {"recompute": recompute, **dataclasses.asdict(sizes), **metrics}


def draw_training(points, path):
    """Plot time and memory of a training step."""
    figure, grid = pyplot.subplots(2, len(GROWING), figsize=(13, 8), sharex="col", sharey="row")
    for (name, values), (times, memory) in zip(GROWING.items(), grid.T, strict=True):
        others = {key: value for key, value in dataclasses.asdict(BASE).items() if key != name}
        for recompute, label in RECOMPUTE.items():
            expected = {**others, "recompute": recompute}
            line = sorted(
                (point for point in points if expected.items() <= point.items()),
                key=lambda point: point[name],
            )
            times.plot(values, [point["median_ms"] for point in line], marker="o", label=label)
            memory.plot(values, [point["peak_mb"] for point in line], marker="o", label=label)
            if not recompute:
                times.plot(values, by_flops(line, "flops_a_step"), "--k", label="arithmetic alone")
        for axes in (times, memory):
            logarithmic(axes, values)
        memory.set_yscale("linear")
        memory.set_ylim(bottom=0)
        memory.set_xlabel({"length": "tokens per example", "batch": "examples"}.get(name, name))
    grid[0, 0].set_ylabel("ms per step")
    grid[1, 0].set_ylabel("peak memory of the process, MB")
    grid[0, 0].legend()
    figure.suptitle(
        f"Pretraining step: {BASE.layers} layers, hidden size {BASE.hidden}, {BASE.batch} "
        f"examples of {BASE.length} tokens, one of them varied"
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def draw_serving(points, path):
    """Plot time per request."""
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axes, over, other, shown in (
        (panels[0], "length", "batch", BATCHES),
        (panels[1], "batch", "length", LENGTHS),
    ):
        for value in shown:
            line = [point for point in points if point[other] == value]
            over_values = [point[over] for point in line]
            times = [point["median_ms"] for point in line]
            (drawn,) = axes.plot(over_values, times, marker="o", label=f"{other} {value}")
            axes.plot(over_values, by_flops(line, "flops"), "--", color=drawn.get_color(), lw=0.8)
        logarithmic(axes, LENGTHS if over == "length" else BATCHES)
        axes.set_xlabel({"length": "tokens per text", "batch": "texts per request"}[over])
        axes.legend(fontsize="small")
    panels[0].set_ylabel("ms per request")
    figure.suptitle(
        f"Embedding texts: {SERVED.layers} layers, hidden size {SERVED.hidden}; dashed: arithmetic "
        "alone"
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def by_flops(line, key):
    """Return each point's milliseconds if time were proportional to the largest point's FLOPs."""
    largest = max(line, key=lambda point: point[key])
    return [largest["median_ms"] * point[key] / largest[key] for point in line]


def logarithmic(axes, values):
    """Set both axes to logarithmic scales, with ticks at the values."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(values, [str(value) for value in values])
    axes.yaxis.set_major_formatter(NUMBER)
    axes.yaxis.set_minor_formatter(NUMBER)
    axes.grid(alpha=0.3, which="both")


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default="training,serving")
    options = parser.parse_args()
    records = options.output / "growth.jsonl"
    if "training" in options.parts.split(","):
        points = []
        for point in training_points():
            print(point, flush=True)
            own_process.append(records, {"part": "training", **point})
            points.append(point)
        draw_training(points, options.output / "growth_training.png")
    if "serving" in options.parts.split(","):
        measured = own_process.call(
            "growth_serving.measure",
            sizes=dataclasses.asdict(SERVED),
            lengths=LENGTHS,
            batches=BATCHES,
        )
        for point in measured["points"]:
            print(point)
            own_process.append(records, {"part": "serving", **point})
        draw_serving(measured["points"], options.output / "growth_serving.png")


if __name__ == "__main__":
    main()
