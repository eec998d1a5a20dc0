"""Time the embedding of texts over lengths and batch sizes, for growth.py."""

import dataclasses
import time

import keras
import tensorflow as tf
from pretraining_batch import Sizes, summary
from pretraining_step_tensorflow import config_of, forward_flops

from bert_tf.text.tokenizer import Tokenizer
from bert_tf.text.vocabulary import SPECIALS, Vocabulary
from tasks.types.masked_lm import MaskedLmPipeline, MaskedLmTask

SECONDS_A_POINT, MOST = 1.0, 20


def measure(sizes, lengths, batches):
    """Return {"points": [...]}, milliseconds of requests of `batch` texts of `length` tokens."""
    sizes = Sizes(**sizes)
    keras.utils.set_random_seed(0)
    words = [f"w{number}" for number in range(sizes.vocabulary - len(SPECIALS))]
    task = MaskedLmTask(max_seq_length=max(lengths))
    config = config_of(sizes)
    tokenizer = Tokenizer.from_config(config, Vocabulary([*SPECIALS, *words]))
    pipeline = MaskedLmPipeline(task, tokenizer, task.build_model(config))
    embed = pipeline.signatures["embed"]

    def request(texts):
        start = time.perf_counter()
        embed(texts)["mean"].numpy()
        return time.perf_counter() - start

    points = []
    for length in lengths:
        for batch in batches:
            of_request = dataclasses.replace(sizes, batch=batch, length=length)
            texts = tf.constant([" ".join(words[row : row + length - 2]) for row in range(batch)])
            request(texts)
            seconds = [request(texts)]
            while sum(seconds) < SECONDS_A_POINT and len(seconds) < MOST:
                seconds.append(request(texts))
            points.append(
                {
                    "length": length,
                    "batch": batch,
                    **summary(seconds),
                    "flops": forward_flops(of_request, predictions=0),
                }
            )
    return {"points": points}
