"""Peak memory and time of a pretraining step of base at 512 tokens, kept or computed again.

    python benchmarks/gradient_checkpointing.py --recompute=false
    python benchmarks/gradient_checkpointing.py --recompute=true

One process each: a peak is a process'.
"""

import argparse
import resource
import time

import numpy as np
import tensorflow as tf

from bert_tf.config import PRESETS
from bert_tf.pretraining.model import LOSSES, MEASURES, PretrainingModel
from bert_tf.train.optimizer import AdamW
from bert_tf.train.step import TrainStep

BATCH, LENGTH, PREDICTIONS = 8, 512, 77


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recompute", choices=("true", "false"), required=True)
    recompute = parser.parse_args().recompute == "true"

    model = PretrainingModel(PRESETS["base"], recompute=recompute)
    optimizer = AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, LOSSES, optimizer, tf.distribute.get_strategy(), 0, MEASURES)
    ids = np.random.default_rng(0).integers(1000, 30000, (BATCH, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(PREDICTIONS, dtype=np.int32), (BATCH, 1))
    inputs = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    batch = (
        {**inputs, "masked_lm_positions": positions},
        {"masked_lm": ids[:, :PREDICTIONS], "next_sentence": np.zeros(BATCH, np.int32)},
        {
            "masked_lm": np.ones((BATCH, PREDICTIONS), np.float32),
            "next_sentence": np.ones(BATCH, np.float32),
        },
    )
    batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
    float(step(batches)["loss"])
    begun = time.monotonic()
    float(step(batches)["loss"])
    seconds = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"recompute={recompute}: {seconds:.1f} s a step, {peak:.1f} GB at the peak")


if __name__ == "__main__":
    main()
