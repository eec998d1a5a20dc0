"""Compare the tokenizer's MB per second on English with others, for ids and ids with offsets.

    python benchmarks/tokenizer.py --text=FILE --vocab=vocab.txt        (a minute)

FILE is plain English with one sentence per line. Its first 5.5 MB are tokenized in one call. The
baselines are TF Text's FastBertTokenizer, whose tokens differ from the released ones on rare
Unicode, and Hugging Face's Rust library `tokenizers`. Five calls of each alternate; medians are
printed.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tensorflow_text as tf_text
from tokenizers import BertWordPieceTokenizer

from bert_tf import Tokenizer, Vocabulary

BYTES, ROUNDS = 5_500_000, 5


def baselines(vocabulary, vocab_path, lines):
    """Return {name: function that tokenizes all lines}."""
    texts = tf.constant(lines)
    signature = {"input_signature": [tf.TensorSpec([None], tf.string)], "autograph": False}
    ours = Tokenizer(vocabulary, do_lower_case=True)
    fast = tf_text.FastBertTokenizer(
        list(vocabulary.entries), token_out_type=tf.int32, lower_case_nfd_strip_accents=True
    )

    def offsets(texts):
        tokens = ours.tokenize_with_offsets(texts)
        return tokens.ids.flat_values, tokens.starts.flat_values, tokens.ends.flat_values

    functions = {
        "bert_tf, ids": lambda texts: ours.tokenize(texts).ids.flat_values,
        "bert_tf, ids and offsets": offsets,
        "FastBertTokenizer, ids": lambda texts: fast.tokenize(texts).flat_values,
        "FastBertTokenizer, ids and offsets": lambda texts: (
            fast.tokenize_with_offsets(texts)[0].flat_values
        ),
    }
    result = {}
    for name, function in functions.items():
        traced = tf.function(function, **signature)
        result[name] = lambda traced=traced: traced(texts)
    rust = BertWordPieceTokenizer(str(vocab_path), lowercase=True)
    result["tokenizers (Rust), ids"] = lambda: rust.encode_batch(lines, add_special_tokens=False)
    return result


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--vocab", required=True)
    arguments = parser.parse_args()
    with open(arguments.text, encoding="utf-8", newline="\n") as file:
        lines = file.read(BYTES).split("\n")
    megabytes = sum(len(line.encode()) + 1 for line in lines) / 1e6
    functions = baselines(Vocabulary.load(arguments.vocab), arguments.vocab, lines)
    seconds = {name: [] for name in functions}
    for number in range(ROUNDS + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:  # The first call builds graphs.
                seconds[name].append(time.perf_counter() - start)
    print(f"{len(lines):,} lines, {megabytes:.1f} MB")
    for name, values in seconds.items():
        print(f"{name:36} {megabytes / statistics.median(values):6.1f} MB/s")


if __name__ == "__main__":
    main()
