"""Measure the speed and the memory of a training step, next to other libraries.

    python benchmarks/training.py --quick
    python benchmarks/training.py --data=DIR [--baselines=PYTHON]

Pretraining is a step on one repeated batch of 16 examples of 128 tokens without padding, of a model
with 6 layers and hidden size 512, with 20 predictions per example, dropout 0.1, AdamW and clipping
by the global norm. keras-hub has no next sentence prediction, a negligible part of a step.

Fine-tuning has the recipes of task_recipes.py. "bert_tf" is the loop of `bert-tf finetune`,
"bert_tf, fit" that of Keras. transformers is a plain loop on PyTorch with the same windows in the
same order, padded to the longest one of a batch; keras-hub pads all rows to the maximum. The rate
is that of groups of steps, after the first ones, in which graphs and kernels are built.

The programs alternate, each in a process of its own with two threads. PYTHON is an interpreter with
torch and transformers.
"""

import dataclasses
import functools

import own_process
import results
from pretraining_batch import Sizes
from task_recipes import TASKS, train_baseline

ROWS = {
    "complaints": "complaints, batches of 32",
    "banking77": "banking77, batches of 32",
    "wnut17": "WNUT17, batches of 16",
    "squad": "SQuAD's format, 16 windows of 384",
}
WARMUP_STEPS, GROUP = 10, 5


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--tasks", help=f"comma-separated, of {', '.join(ROWS)}")
    options = parser.parse_args()
    default = "complaints" if options.quick or not options.data else ",".join(ROWS)
    measured = results.Results("training", options)
    if not options.baselines:
        measured.leave_out("transformers", "--baselines is not set")
    precisions = ["float32"]
    if not options.quick and results.has_feature("avx512_bf16"):
        precisions.append("bfloat16")
    for precision in precisions:
        pretraining(precision, options, measured)
        measured.save()
        for name in (options.tasks or default).split(","):
            finetuning(name, precision, options, measured)
            measured.save()


def pretraining(precision, options, measured):
    """Measure the pretraining step of all programs."""
    steps, rounds = (8, 1) if options.quick else (20, 3)
    shared = {"sizes": dataclasses.asdict(Sizes()), "precision": precision, "steps": steps}
    call = functools.partial(own_process.call, **shared)
    torch = functools.partial(call, "training_torch.pretrain", options.baselines)
    programs = {
        "bert_tf": functools.partial(call, "pretraining_step_tensorflow.bare"),
        "keras-hub": functools.partial(call, "pretraining_step_tensorflow.keras_hub"),
        "transformers": functools.partial(torch, compiled=False),
        "transformers, compiled": functools.partial(torch, compiled=True),
    }
    for program, found in in_turns(programs, rounds, options, measured).items():
        row = (f"Pretraining, {precision}", "step of 16 x 128 tokens", program)
        measured.add(*row, "ms", [ms for one in found for ms in one["ms"]])
        measured.add(*row, "MB", [one["peak_mb"] for one in found])


def finetuning(name, precision, options, measured):
    """Measure fine-tuning of all programs."""
    steps, rounds = (20, 1) if options.quick else (40, 2)
    data, max_steps = str(options.data or "."), WARMUP_STEPS + steps
    call = functools.partial(own_process.call, name=name, data=data, max_steps=max_steps)
    programs = {
        "bert_tf": functools.partial(call, "finetuning_tensorflow.train", precision=precision),
        "bert_tf, fit": functools.partial(call, "finetuning_tensorflow.fit"),
        "keras-hub": functools.partial(call, "finetuning_tensorflow.keras_hub_fit"),
        "transformers": functools.partial(
            train_baseline, name, data, options.baselines, max_steps, precision=precision
        ),
    }
    if TASKS[name][0]["task"] != "classification" or precision != "float32":
        del programs["bert_tf, fit"], programs["keras-hub"]
    for program, found in in_turns(programs, rounds, options, measured).items():
        row = (f"Fine-tuning, {precision}", ROWS[name], program)
        rates = [rate for one in found for rate in rates_of(one, TASKS[name][0])]
        measured.add(*row, "examples/s", rates)
        measured.add(*row, "MB", [one["peak_mb"] for one in found])


def in_turns(programs, rounds, options, measured):
    """Return the results per program; one that fails is left out."""
    found = {name: [] for name in programs if options.baselines or "transformers" not in name}
    for _ in range(rounds):
        for name in tuple(found):
            try:
                found[name].append(programs[name]())
            except own_process.Failed as failure:
                measured.leave_out(name, failure)
                del found[name]
    return found


def rates_of(found, recipe):
    """Return examples per second of each group of timed steps."""
    ends, count, batch = found["ends"], found["count"], recipe["global_batch_size"]
    epoch = [min(batch, count - first) for first in range(0, count, batch)]
    return [
        sum(epoch[step % len(epoch)] for step in range(first, first + GROUP))
        / (ends[first + GROUP] - ends[first])
        for first in range(WARMUP_STEPS, len(ends) - GROUP, GROUP)
    ]


if __name__ == "__main__":
    main()
