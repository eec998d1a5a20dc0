"""Measure the stages of learning a vocabulary in MB of text per second.

    python benchmarks/vocabulary.py --text=FILE [--vocab_size=30522]        (15 seconds)

FILE is plain text with one sentence per line. "total" is the complete bert_tf.learn_vocab, without
the start-up of TensorFlow. Each stage runs once, as in the command.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from bert_tf import Tokenizer, Vocabulary
from bert_tf.data import vocabulary_learning as learning


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--vocab_size", type=int, default=30522)
    arguments = parser.parse_args()
    megabytes = os.path.getsize(arguments.text) / 1e6
    seconds, held_out = {}, []

    def timed(name, function):
        start = time.perf_counter()
        result = function()
        seconds[name] = time.perf_counter() - start
        return result

    unique_words = learning.make_unique_words(do_lower_case=True)
    timed("building the graph", lambda: unique_words(tf.constant(["a"])))
    lines = learning.hold_out(learning.read_lines([arguments.text], "lines", "text"), held_out)
    counts = timed("counting", lambda: learning.count_words(lines, unique_words, lambda line: None))
    entries = timed("training", lambda: learning.train(counts, arguments.vocab_size))
    tokenizer = timed("building the tokenizer", lambda: Tokenizer(Vocabulary(entries), True))
    result = timed(
        "testing the vocabulary", lambda: learning.try_out(tokenizer, held_out, unique_words)
    )
    seconds["total"] = sum(seconds.values())
    print(f"{megabytes:.1f} MB, {len(counts):,} distinct words, {len(entries):,} entries; {result}")
    for name, value in seconds.items():
        print(f"{name:24} {value:6.2f} s {megabytes / value:8.1f} MB/s")


if __name__ == "__main__":
    main()
