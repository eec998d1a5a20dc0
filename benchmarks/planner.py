"""Compare the estimates of bert_tf.plan with measured steps and requests on this processor.

    python benchmarks/planner.py            (about a quarter of an hour on two cores)
    python benchmarks/planner.py --part=finetuning --data=DIR [--only=banking77]
    python benchmarks/planner.py --part=serving --data=DIR --models=DIR [--only=float32]

Each point runs in a separate process. Its peak memory and its time are printed beside the
estimates, as a row of a Markdown table. The rate of the matrix products is measured before and
after each point, since a shared machine has phases; the table has the mean of both estimates.
Pretraining steps repeat a batch. Fine-tuning has the recipes of task_recipes.py and the rows of
DIR; its steps are timed after ten others. Serving answers with a BERT-base, which is written to
--models first unless it is there.
"""

import argparse
import dataclasses
import os
import pathlib

import own_process
from pretraining_batch import Sizes

from bert_tf.config import BertConfig
from bert_tf.planning.devices import processor
from bert_tf.planning.memory import StepSizes
from bert_tf.planning.training import Training, estimate

STEPS, WARMUP_STEPS = 3, 2
REQUESTS = 6  # Timed, after as many that are not.
# Layers, hidden size, examples, tokens, precision, gradient checkpointing.
POINTS = (
    (2, 128, 8, 128, "float32", False),
    (6, 256, 8, 128, "float32", False),
    (6, 256, 32, 128, "float32", False),
    (6, 256, 8, 512, "float32", False),
    (6, 384, 8, 128, "float32", False),
    (6, 512, 16, 128, "float32", False),
    (6, 512, 16, 128, "bfloat16", False),
    (6, 512, 16, 128, "float32", True),
    (12, 768, 8, 128, "float32", False),
    (12, 768, 8, 128, "bfloat16", False),
    (12, 768, 8, 512, "float32", False),
    (12, 768, 8, 512, "float32", True),
    (24, 1024, 2, 128, "float32", False),
)

# The same; the fixed cost of a step was fitted to these.
FEW_TOKENS = (
    (2, 128, 1, 16, "float32", False),
    (6, 384, 1, 16, "float32", False),
    (6, 384, 4, 32, "float32", False),
    (12, 768, 1, 16, "float32", False),
    (6, 384, 1, 16, "bfloat16", False),
)
# Recipe, steps, precision.
FINETUNING = (
    ("banking77", 40, "float32"),
    ("banking77", 40, "bfloat16"),
    ("wnut17", 80, "float32"),
    ("hate_speech", 40, "float32"),
    ("arc", 40, "float32"),
    ("squad", 8, "float32"),
)
# Kind of texts, texts per request, precision.
SERVING = (
    ("short", 1, "float32"),
    ("short", 16, "float32"),
    ("mixed", 16, "float32"),
    ("long", 1, "float32"),
    ("short", 16, "bfloat16"),
    ("mixed", 16, "bfloat16"),
    ("short", 16, "int8"),
    ("mixed", 16, "int8"),
)
HEADERS = {
    "pretraining": ("layers, hidden size", "examples", "tokens"),
    "few_tokens": ("layers, hidden size", "examples", "tokens"),
    "finetuning": ("recipe", "tokens per step"),
    "serving": ("texts per request", "tokens per text"),
}


def compare(layers, hidden, examples, length, precision, recompute):
    """Return the cells of a row of the table."""
    sizes = Sizes(layers=layers, hidden=hidden, batch=examples, length=length)
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
    )

    def measure():
        return own_process.call(
            "pretraining_step_tensorflow.bare",
            sizes=dataclasses.asdict(sizes),
            layout="flat",
            precision=precision,
            steps=STEPS,
            recompute=recompute,
            uncounted=WARMUP_STEPS,
        )

    def estimate_step():
        found = own_process.call(
            "planner_points.rates",
            config=config.to_dict(),
            tokens=sizes.tokens,
            precision=precision,
        )
        device = processor(found["memory"], {precision: found["flops"]}, found["bandwidth"])
        step = StepSizes(config, examples, length, sizes.predictions, precision, recompute)
        result = estimate(Training(step, examples, sizes.tokens, 1, device))
        return {
            "estimated_mb": (result.memory["peak"] + result.memory["process"]) / 1e6,
            "estimated_ms": 1000 * result.step_seconds,
        }

    cells, _ = _compared(measure, estimate_step)
    name = precision + ", gradient checkpointing" * recompute
    return (f"{layers}, {hidden}", examples, length, name, *cells)


def compare_finetuning(name, steps, precision, data):
    """Return the cells of a row of fine-tuning."""

    def measure():
        measured = own_process.call(
            "task_types.measure", name=name, data=data, precision=precision, max_steps=steps
        )
        return {**measured, "median_ms": 1000 * measured["seconds_per_step"]}

    def estimate_step():
        return own_process.call(
            "planner_points.finetuning", name=name, data=data, precision=precision
        )

    cells, found = _compared(measure, estimate_step)
    return (name, f"{found['tokens']:,.0f}", precision, *cells)


def compare_serving(kind, batch, precision, data, models):
    """Return the cells of a row of serving."""
    directory = models / precision
    if not directory.is_dir():
        own_process.call(
            "planner_points.write_served", directory=str(directory), precision=precision
        )
    chosen = own_process.call("planner_points.texts", data=data, kind=kind, count=REQUESTS * batch)
    length = chosen["length"]

    def measure():
        return own_process.call(
            "planner_requests.send", directory=str(directory), texts=chosen["texts"], batch=batch
        )

    def estimate_request():
        return own_process.call(
            "planner_points.serving", length=length, batch=batch, precision=precision
        )

    cells, _ = _compared(measure, estimate_request)
    return (batch, f"{length:.0f}", precision, *cells)


def _compared(measure, estimated):
    """Measure between two estimates.

    Returns:
        The cells of measured and estimated memory and time, and the last estimate.
    """
    before, measured, after = estimated(), measure(), estimated()
    cells = []
    for unit, value in (("mb", measured["peak_mb"]), ("ms", measured["median_ms"])):
        mean = (before[f"estimated_{unit}"] + after[f"estimated_{unit}"]) / 2
        cells += (f"{value:,.0f}", f"{mean:,.0f}", f"{mean / value - 1:+.0%}")
    return cells, after


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=HEADERS, default="pretraining")
    parser.add_argument("--data", default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument("--models", type=pathlib.Path, help="directory of served models")
    parser.add_argument("--only", help="points with this value, such as banking77 or bfloat16")
    options = parser.parse_args()
    if options.part in ("finetuning", "serving") and not options.data:
        parser.error("--data: required")
    if options.part == "serving" and not options.models:
        parser.error("--models: required")
    points, function, further = {
        "pretraining": (POINTS, compare, ()),
        "few_tokens": (FEW_TOKENS, compare, ()),
        "finetuning": (FINETUNING, compare_finetuning, (options.data,)),
        "serving": (SERVING, compare_serving, (options.data, options.models)),
    }[options.part]
    columns = (*HEADERS[options.part], "", "MB", "estimated", "", "ms", "estimated", "")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for point in points:
        if not options.only or options.only in map(str, point):
            print(f"| {' | '.join(map(str, function(*point, *further)))} |", flush=True)


if __name__ == "__main__":
    main()
