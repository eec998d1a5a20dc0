"""The texts that benchmarks/serving.py asks: the same from the same file, in order of arrival.

"short": a sentence, 5 to 60 tokens, 24 on average, as SST-2's. "mixed": one to four consecutive
sentences, 20 to 120 tokens, 53 on average, as AG News'. "long": 300 words, at most 512 tokens. Only
texts in ASCII, of which every side's tokenizer makes the same tokens.
"""

import random

import tensorflow as tf

STARTS = 40_000  # Where in the file sentences are looked for.


def choose(kind, count, path, tokenizer):
    """-> (texts, their lengths in tokens with [CLS] and [SEP])."""
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
        if all(lines[at : at + run])  # A blank line stands between documents.
    ]
    of_length = {}
    for text, length in zip(candidates, _lengths(candidates, tokenizer), strict=True):
        of_length.setdefault(length, []).append(text)
    # A length of chance for each text, as single sentences of novels are shorter than reviews'.
    lengths = [round(randomly.triangular(shortest, longest, shortest)) for _ in range(count)]
    return [of_length[length].pop() for length in lengths], lengths


def _lengths(texts, tokenizer):
    return (tokenizer.tokenize(tf.constant(texts)).ids.row_lengths() + 2).numpy().tolist()
