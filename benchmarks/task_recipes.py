"""Recipes and data files of training.py and learning.py, without TensorFlow.

A recipe consists of FinetuneSettings with the files of its training and test rows. The files are in
a directory of published datasets; the complaints are those of examples/.
"""

import csv
import json
import pathlib

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
        {"task": "anomaly", "normal_labels": ("in scope",), "max_seq_length": 64},
        "clinc150:train,oos_train",
        "clinc150:test,oos_test",
    ),
}
TUNES_ON_DEV = ("hate_speech_rare", "anomaly", "squad2")


def rows_file(data, path, name, scratch):
    """Return the path of a dataset's file; CLINC150's lists of pairs are converted to .csv."""
    data = pathlib.Path(data)
    if ":" not in path:
        return data / path
    directory, splits = path.split(":")
    pairs = json.loads((data / directory / "data_full.json").read_text(encoding="utf-8"))
    made = scratch / f"{name}-{splits.replace(',', '-')}.csv"
    with open(made, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(("text", "label"))
        for split in splits.split(","):
            for text, label in pairs[split]:
                is_scope = "out of scope" if label == "oos" else "in scope"
                writer.writerow((text, is_scope if name == "anomaly" else label))
    return made


def divided(train, scratch):
    """Split a training file: every tenth row or article is held out, of fewer articles the last."""
    parts = [scratch / f"{part}-{train.name}" for part in ("train", "held-out")]
    if train.suffix == ".json":
        complete = json.loads(train.read_text(encoding="utf-8"))
        held_out = min(9, len(complete["data"]) - 1)
        for number, part in enumerate(parts):
            articles = [
                article
                for position, article in enumerate(complete["data"])
                if (position % 10 == held_out) == bool(number)
            ]
            part.write_text(json.dumps({**complete, "data": articles}), encoding="utf-8")
        return parts
    with open(train, newline="", encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
    for number, part in enumerate(parts):
        with open(part, "w", newline="", encoding="utf-8") as lines:
            chosen = [
                row for position, row in enumerate(rows) if (position % 10 == 9) == bool(number)
            ]
            csv.writer(lines).writerows([header, *chosen])
    return parts


def baseline_rows(name, data, scratch):
    """Return {"train": rows, "test": rows} of a task as bert_tf reads them, as plain JSON."""
    from tasks.data.readers.rows import raise_bad_rows, read_rows
    from tasks.data.readers.squad import read_questions
    from tasks.data.readers.tagged import read_tagged

    options, *paths = TASKS[name]
    found = {}
    for part, path in zip(("train", "test"), paths, strict=True):
        path = rows_file(data, path, name, scratch)
        if options["task"] == "classification":
            text, label = options.get("text_column", "text"), options.get("label_column", "label")
            found[part] = [
                {"text": row.texts[text], "label": row.texts[label]}
                for row in raise_bad_rows(read_rows(path, (text, label)))
            ]
        elif options["task"] == "conll":
            found[part] = [row.label._asdict() for row in raise_bad_rows(read_tagged(path))]
        else:
            found[part] = [
                {"id": row.id, **row.texts, "answers": row.label}
                for row in raise_bad_rows(read_questions(path))
            ]
    if options["task"] == "squad":  # bert_tf also skips questions whose answer is in no window.
        found["train"] = [row for row in found["train"] if _is_learned_from(row)]
    return found


def _is_learned_from(row):
    """Return whether a question's first answer is at its annotated position."""
    text, start = row["answers"][0]
    return text and start >= 0 and row["context"][start : start + len(text)] == text


def first_head(seed, hidden, classes):
    """Return the initial kernel `(H, C)` of a head for all libraries. The bias is 0."""
    import numpy as np

    return np.random.default_rng(seed).normal(0, 0.02, (hidden, classes)).astype(np.float32)
