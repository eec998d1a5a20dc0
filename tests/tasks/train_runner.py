"""Train a classifier from Python in one of several worker processes, and write its weights."""

import argparse
import csv
import sys

import numpy as np


def main(arguments):
    from bert_tf.train.distribution import make_strategy
    from tasks import TextClassifier

    parser = argparse.ArgumentParser()
    for name in ("strategy", "init_from", "train", "output_dir", "weights"):
        parser.add_argument(f"--{name}", required=True)
    flags = parser.parse_args(arguments)
    with open(flags.train) as file:
        _, *rows = csv.reader(file)
    texts, labels = map(list, zip(*rows, strict=True))
    with make_strategy(flags.strategy).scope():
        model = TextClassifier.from_pretrained(
            flags.init_from, labels=sorted(set(labels)), max_seq_length=12
        )
    model.train(
        texts,
        labels,
        output_dir=flags.output_dir,
        global_batch_size=8,
        epochs=2,
        learning_rate=1e-3,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    np.savez(flags.weights, *model.get_weights())


if __name__ == "__main__":
    main(sys.argv[1:])
