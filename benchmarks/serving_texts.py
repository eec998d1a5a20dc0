"""Texts of benchmarks/serving.py, the same from the same file, in order of arrival.

"short" is one sentence of 5 to 60 tokens, 24 on average as in SST-2. "mixed" is one to four
consecutive sentences of 20 to 120 tokens, 53 on average as in AG News. "long" is 300 words of at
most 512 tokens. All texts are ASCII, for which all tokenizers return the same tokens.
"""

import random

import tensorflow as tf

STARTS = 40_000  # Number of sampled lines in the file.


def choose(kind, count, path, tokenizer):
    """Return texts and their lengths in tokens, with [CLS] and [SEP]."""
    randomly = random.Random(kind)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.isascii()]
    if kind == "long":
        starts = randomly.sample(range(len(lines) - 300), 2 * count)
        candidates = [" ".join(" ".join(lines[at : at + 300]).split()[:300]) for at in starts]
        lengths = _lengths(candidates, tokenizer)
        fitting = [position for position, length in enumerate(lengths) if length <= 512][:count]
        return [candidates[position] for position in fitting], [
            lengths[position] for position in fitting
        ]

    longest_run, shortest, longest = {"short": (1, 5, 60), "mixed": (4, 20, 120)}[kind]
    starts = randomly.sample(range(len(lines) - longest_run), STARTS)
    candidates = [
        " ".join(lines[at : at + run])
        for at in starts
        for run in range(1, longest_run + 1)
        if all(lines[at : at + run])  # Blank lines separate documents.
    ]
    of_length = {}
    for text, length in zip(candidates, _lengths(candidates, tokenizer), strict=True):
        of_length.setdefault(length, []).append(text)
    # Lengths are drawn at random, since sentences of novels are shorter than those of reviews.
    lengths = [round(randomly.triangular(shortest, longest, shortest)) for _ in range(count)]
    return [of_length[length].pop() for length in lengths], lengths


def _lengths(texts, tokenizer):
    return (tokenizer.tokenize(tf.constant(texts)).ids.row_lengths() + 2).numpy().tolist()
