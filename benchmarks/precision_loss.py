"""Plot the pretraining loss in float32 and bfloat16 with the same data, weights and dropout.

    python benchmarks/precision_loss.py --data=DIR --output=DIRECTORY

500 steps of --model_size=tiny on the first 4 MB of DIR's books, 32 examples of 128 tokens per step,
each precision in a separate process. Writes precision_loss.jsonl and precision_loss.png to
DIRECTORY. Prints the mean loss of the last 100 steps.
"""

import argparse
import os
import pathlib
import statistics
import tempfile

import matplotlib

matplotlib.use("agg")

import own_process
from matplotlib import pyplot

TEXT_BYTES, STEPS, BATCH, LOG_EVERY = 4_000_000, 500, 32, 5


def write(data, directory):
    """Write the shards of the first books to `directory`, and return {"shards": path}."""
    from bert_tf.data.settings import WriteShardsSettings
    from bert_tf.data.writing import write_shards

    with open(pathlib.Path(data, "text", "books.txt"), encoding="utf-8") as lines:
        text = lines.read(TEXT_BYTES)
    pathlib.Path(directory, "books.txt").write_text(text, encoding="utf-8")
    settings = WriteShardsSettings(
        input=(f"{directory}/books.txt",),
        vocab=str(pathlib.Path(data, "vocab", "uncased", "vocab.txt")),
        output_dir=f"{directory}/shards",
        num_shards=8,
    )
    write_shards(settings)
    return {"shards": settings.output_dir}


def train(shards, precision, output_dir):
    """Pretrain for STEPS steps, and return {"points": [[step, loss], ...]}."""
    from bert_tf.pretraining.recipe import pretrain
    from bert_tf.pretraining.settings import PretrainSettings

    settings = PretrainSettings(
        shards=(shards,),
        output_dir=output_dir,
        model_size="tiny",
        num_train_steps=STEPS,
        global_batch_size=BATCH,
        learning_rate=1e-3,
        warmup_steps=STEPS // 10,
        precision=precision,
        log_every=LOG_EVERY,
    )
    run = pretrain(settings)
    return {"points": [[line["step"], line["loss"]] for line in run.metrics() if "loss" in line]}


def draw(curves, path):
    """Plot {precision: [[step, loss], ...]}."""
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for precision, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=precision, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss: masked LM + next sentence")
    axes.set_title(f"Pretraining of tiny on novels, {BATCH} examples of 128 tokens per step")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    if not options.data:
        parser.error("--data: expected a directory with text/books.txt and vocab/uncased")
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        shards = own_process.call(
            "precision_loss.write", data=str(options.data), directory=directory
        )
        for precision in ("float32", "bfloat16"):
            prediction = own_process.call(
                "precision_loss.train",
                shards=shards["shards"],
                precision=precision,
                output_dir=f"{directory}/{precision}",
            )
            own_process.append(
                options.output / "precision_loss.jsonl", {"precision": precision, **prediction}
            )
            curves[precision] = prediction["points"]
            last = [loss for step, loss in prediction["points"] if step > STEPS - 100]
            print(
                f"{precision}: {statistics.mean(last):.4f}, {prediction['process_seconds']:.0f} s",
                flush=True,
            )
    draw(curves, options.output / "precision_loss.png")


if __name__ == "__main__":
    main()
