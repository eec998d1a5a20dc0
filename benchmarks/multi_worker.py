"""Measure and plot the throughput of pretraining by several processes on one machine.

    python -m bert_tf.write_shards --input=TEXT --vocab=vocab.txt --output_dir=SHARDS
    python benchmarks/multi_worker.py --shards=SHARDS --output=DIRECTORY

Each point is a run of bert_tf.pretrain --strategy=multi_worker with processes on loopback and the
same global batch, so that losses differ by their dropout masks only. "2" are two processes that
share two cores; "2-pinned" are two processes with one core each. One process runs without a
strategy. The rate is that of the command itself, without its first step.

Appends to multi_worker.jsonl in DIRECTORY and draws multi_worker.png of all its lines.
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

import matplotlib
import own_process

matplotlib.use("agg")

from matplotlib import pyplot

POINTS = ("1", "2", "4", "1-pinned", "2-pinned")
BATCHES = (32, 128)
CORES = 2
LABELS = {False: f"{CORES} cores for all processes", True: "one core per process"}


def measure(shards, model_size, point, batch, steps):
    """Return the tokens per second of the processes of a point, as one dict."""
    count, _, pinned = point.partition("-")
    with tempfile.TemporaryDirectory() as directory:
        run = pathlib.Path(directory) / "run"
        flags = {
            "shards": shards,
            "model_size": model_size,
            "output_dir": run,
            "num_train_steps": steps,
            "global_batch_size": batch,
            "warmup_steps": 1,
            "save_every": steps,
            "log_every": steps,
            "strategy": "none" if count == "1" else "multi_worker",
        }
        processes = start(flags, int(count), bool(pinned))
        outputs = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise own_process.Failed("\n".join(output[-500:] for output in outputs))
        *_, line = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        "processes": int(count),
        "pinned": bool(pinned),
        "global_batch_size": batch,
        "model_size": model_size,
        "steps": steps,
        "tokens_per_second": line["tokens_per_second"],
        "loss": line["loss"],
    }


def start(flags, count, pinned):
    """Start the processes of a run, each on a core of its own if `pinned`."""
    with contextlib.ExitStack() as stack:
        servers = [socket.create_server(("localhost", 0)) for _ in range(count)]
        ports = [stack.enter_context(server).getsockname()[1] for server in servers]
    workers = [f"localhost:{port}" for port in ports]
    processes = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        # Children inherit the cores of this process.
        os.sched_setaffinity(0, {index} if pinned else range(CORES))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "bert_tf.pretrain"]
                + [f"--{name}={value}" for name, value in flags.items()],
                text=True,
                stderr=subprocess.PIPE,
                env={**os.environ, **({"TF_CONFIG": config} if count > 1 else {})},
            )
        )
    os.sched_setaffinity(0, range(CORES))
    return processes


def draw(points, path):
    """Plot the median rate over the number of processes, for each global batch."""
    batches = sorted({point["global_batch_size"] for point in points})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(10, 4.5), sharey=True, squeeze=False)
    counts = sorted({point["processes"] for point in points})
    for axes, batch in zip(panels[0], batches, strict=True):
        for pinned, label in LABELS.items():
            rates = {
                count: [
                    point["tokens_per_second"]
                    for point in points
                    if (point["processes"], point["pinned"], point["global_batch_size"])
                    == (count, pinned, batch)
                ]
                for count in counts
            }
            medians = {count: statistics.median(all_) for count, all_ in rates.items() if all_}
            (line,) = axes.plot(medians.keys(), medians.values(), marker="o", label=label)
            if pinned and 1 in medians:
                ideal = [medians[1] * count for count in medians]
                axes.plot(medians.keys(), ideal, "--", color=line.get_color(), label="proportional")
        axes.set_title(f"global batch of {batch} examples")
        axes.set_xlabel("processes")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("tokens per second")
    panels[0, 0].legend()
    figure.suptitle(
        f"Pretraining ({points[-1]['model_size']}, float32), processes on loopback, {CORES} cores"
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--model_size", default="mini")
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args()
    records = options.output / "multi_worker.jsonl"
    for batch in map(int, options.batches.split(",")):
        for point in options.points.split(","):
            measured = measure(options.shards, options.model_size, point, batch, options.steps)
            print(measured, flush=True)
            own_process.append(records, measured)
    points = [json.loads(line) for line in records.read_text().splitlines()]
    draw(points, options.output / "multi_worker.png")


if __name__ == "__main__":
    main()
