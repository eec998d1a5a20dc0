"""Fixed batch and timing of the pretraining benchmarks, with numpy alone for all backends."""

import dataclasses
import math
import time

import numpy as np

WARMUP_STEPS = 3  # In these steps the graph, kernels and memory pools are built.
SPECIALS, POSITIONS = 1000, 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batch."""

    layers: int = 6
    hidden: int = 512
    batch: int = 16
    length: int = 128
    vocabulary: int = 30522

    @property
    def config(self):
        """Return the keyword arguments of a BertConfig, that of bert_tf and of transformers."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "intermediate_size": 4 * self.hidden,
            "max_position_embeddings": POSITIONS,
        }

    @property
    def predictions(self):
        """Return the published number of predictions: 20 of 128 tokens, 77 of 512."""
        return math.ceil(0.15 * self.length)


def examples(sizes):
    """Return {feature: array} as in shards, without padding; every prediction has weight 1."""
    rng = np.random.default_rng(0)
    shape = (sizes.batch, sizes.length)
    predicted = (sizes.batch, sizes.predictions)
    positions = rng.permuted(np.tile(np.arange(1, sizes.length - 1), (sizes.batch, 1)), axis=1)
    segments = np.arange(sizes.length) >= sizes.length // 2
    return {
        "input_ids": rng.integers(SPECIALS, sizes.vocabulary, shape, np.int32),
        "input_mask": np.ones(shape, np.int32),
        "segment_ids": segments * np.ones(shape, np.int32),
        "masked_lm_positions": np.sort(positions[:, : sizes.predictions], axis=1).astype(np.int32),
        "masked_lm_ids": rng.integers(SPECIALS, sizes.vocabulary, predicted, np.int32),
        "masked_lm_weights": np.ones(predicted, np.float32),
        "next_sentence_labels": rng.integers(0, 2, (sizes.batch, 1), np.int32),
    }


def timed(step, steps, uncounted=WARMUP_STEPS):
    """Call `step`, and return the milliseconds of each of the calls after `uncounted` ones."""
    milliseconds = []
    for _ in range(uncounted + steps):
        start = time.perf_counter()
        step()
        milliseconds.append(1000 * (time.perf_counter() - start))
    return {"ms": milliseconds[uncounted:]}
