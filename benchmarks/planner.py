"""Compare the estimates of bert_tf.plan with measured pretraining steps on this processor.

    python benchmarks/planner.py            (about ten minutes on two cores)

Each point is a pretraining step in a separate process. Its peak memory and its median time are
printed beside the estimates, as a Markdown table. The rate of the matrix products is measured once
per point, in a separate process as well, right after the step.
"""

import dataclasses

import own_process
from pretraining_batch import Sizes

from bert_tf.config import BertConfig
from bert_tf.planning.devices import processor
from bert_tf.planning.memory import StepSizes
from bert_tf.planning.training import Training, estimate

STEPS, WARMUP_STEPS = 3, 2
# Layers, hidden size, examples, tokens, precision, gradient checkpointing.
POINTS = (
    (2, 128, 8, 128, "float32", False),
    (6, 256, 8, 128, "float32", False),
    (6, 256, 32, 128, "float32", False),
    (6, 256, 8, 512, "float32", False),
    (6, 512, 16, 128, "float32", False),
    (6, 512, 16, 128, "bfloat16", False),
    (6, 512, 16, 128, "float32", True),
    (12, 768, 8, 128, "float32", False),
    (12, 768, 8, 128, "bfloat16", False),
    (12, 768, 8, 512, "float32", False),
    (12, 768, 8, 512, "float32", True),
    (24, 1024, 2, 128, "float32", False),
)


def rates(config, tokens, precision):
    """Return the measured rates of this processor; called in a separate process."""
    from bert_tf.planning.calibration import measure_processor

    device = measure_processor(BertConfig(**config), tokens, precision)
    return {
        "memory": device.memory,
        "flops": device.flops[precision],
        "bandwidth": device.bandwidth,
    }


def compare(layers, hidden, examples, length, precision, recompute):
    """Return the cells of a row of the table."""
    sizes = Sizes(layers=layers, hidden=hidden, batch=examples, length=length)
    measured = own_process.call(
        "pretraining_step_tensorflow.bare",
        sizes=dataclasses.asdict(sizes),
        layout="flat",
        precision=precision,
        steps=STEPS,
        recompute=recompute,
        uncounted=WARMUP_STEPS,
    )
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
    )
    found = own_process.call(
        "planner.rates", config=config.to_dict(), tokens=sizes.tokens, precision=precision
    )
    device = processor(found["memory"], found["flops"], found["bandwidth"])
    step = StepSizes(config, examples, length, sizes.predictions, precision, recompute)
    result = estimate(Training(step, examples, sizes.tokens, 1, device))
    memory = (result.memory["peak"] + result.memory["process"]) / 1e6
    milliseconds = 1000 * result.step_seconds
    return (
        f"{layers}, {hidden}",
        examples,
        length,
        precision + ", gradient checkpointing" * recompute,
        f"{measured['peak_mb']:,}",
        f"{memory:,.0f}",
        f"{memory / measured['peak_mb'] - 1:+.0%}",
        f"{measured['median_ms']:,.0f}",
        f"{milliseconds:,.0f}",
        f"{milliseconds / measured['median_ms'] - 1:+.0%}",
    )


def main():
    """Run the benchmark from the command line."""
    print("| layers, hidden size | examples | tokens | | MB | estimated | | ms | estimated | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for point in POINTS:
        print(f"| {' | '.join(map(str, compare(*point)))} |", flush=True)


if __name__ == "__main__":
    main()
