"""Compare the gradients of training in bfloat16 with those in float32, variable by variable.

    python benchmarks/gradients.py            (minutes if bfloat16 is emulated)

The models are the pretraining model and a classifier, with 2 layers of hidden size 256 and about
9,000 tokens in each layout. Both precisions have the same weights, batch and dropout masks. The
error of a variable is ||g_bfloat16 - g_float32|| / ||g_float32||. The softmax ignores a constant
that is added to all scores of a query, so that the true gradient of a key bias is 0. Its error is
divided by the norm of the query bias' gradient instead. Prints a Markdown table of all variables,
then one row per kind of variable with its worst layer. Exits with status 1 if a variable's error
exceeds LIMIT times the median of the kernels.
"""

import argparse
import re
import statistics
import sys

import keras
import numpy as np
import tensorflow as tf
from pretraining_batch import Sizes, examples
from pretraining_step_tensorflow import LAYOUTS, config_of

from bert_tf.pretraining.model import LOSSES, PretrainingModel, to_batch
from bert_tf.runs.checkpoints import model_variables
from bert_tf.train.distribution import use_precision
from bert_tf.train.losses import softmax_cross_entropy
from tasks.graph.heads import SequenceClassifier

SIZES = Sizes(layers=2, hidden=256, batch=96)
LIMIT, LABELS = 3, 3
SEED = tf.constant([1, 2**32], tf.int64)


def make_batch(layout):
    """Return (inputs, labels, weights) of one batch; texts fill 50 to 100% of the length."""
    arrays = examples(SIZES)
    rng = np.random.default_rng(1)
    lengths = rng.integers(SIZES.length // 2, SIZES.length + 1, SIZES.batch)[:, np.newaxis]
    positions = arrays["masked_lm_positions"]
    arrays["input_mask"] = (np.arange(SIZES.length) < lengths).astype(np.int32)
    for name in ("input_ids", "segment_ids"):
        arrays[name] *= arrays["input_mask"]
    arrays["masked_lm_weights"] = (positions < lengths).astype(np.float32)
    arrays["masked_lm_positions"] = np.where(positions < lengths, positions, 0)
    batches = tf.data.Dataset.from_tensors(arrays).map(LAYOUTS[layout]).map(to_batch)
    return next(iter(batches))


def pretraining(policy):
    """Return the built model and a function from a batch to its loss."""
    model = PretrainingModel(config_of(SIZES), policy)

    def loss(batch):
        inputs, labels, weights = batch
        outputs = model(inputs, training=True, seed=SEED)
        return tf.add_n(
            [
                tf.reduce_sum(weights[name] * of(labels[name], outputs[name]))
                / tf.reduce_sum(weights[name])
                for name, of in LOSSES.items()
            ]
        )

    return model, loss


def classification(policy):
    """Return the built model and a function from a batch to its loss."""
    model = SequenceClassifier(config_of(SIZES), LABELS, dtype=policy)

    def loss(batch):
        inputs = {key: value for key, value in batch[0].items() if key != "masked_lm_positions"}
        labels = tf.random.stateless_uniform([SIZES.batch], [3, 4], 0, LABELS, tf.int32)
        logits = model(inputs, training=True, seed=SEED)["label"]
        return tf.reduce_mean(softmax_cross_entropy(labels, logits))

    return model, loss


def gradients(make, batch, precision):
    """Return the gradients as {path of the variable: float64 array}, from fixed weights."""
    policy = use_precision(precision)
    keras.utils.set_random_seed(0)
    model, loss = make(policy)

    @tf.function(autograph=False)
    def take(batch):
        with tf.GradientTape() as tape:
            value = loss(batch)
        variables = [variable.value for variable in model.trainable_variables]
        return [tf.convert_to_tensor(of_one) for of_one in tape.gradient(value, variables)]

    names = {id(variable): name for name, variable in model_variables(model).items()}
    paths = [names[id(variable)] for variable in model.trainable_variables]
    values = [of_one.numpy().astype(np.float64) for of_one in take(batch)]
    return dict(zip(paths, values, strict=True))


def errors(make, layout):
    """Return {path of the variable: relative error} and the number of tokens."""
    batch = make_batch(layout)
    wide, narrow = (gradients(make, batch, name) for name in ("float32", "bfloat16"))
    norms = {path: np.linalg.norm(value) for path, value in wide.items()}
    of_all = {
        path: np.linalg.norm(narrow[path] - wide[path])
        / norms[path.replace("key/bias", "query/bias")]
        for path in wide
    }
    return of_all, int(tf.reduce_sum(tf.cast(LAYOUT_TOKENS[layout](batch[0]), tf.int32)))


LAYOUT_TOKENS = {
    "padded": lambda inputs: inputs["input_mask"],
    "flat": lambda inputs: inputs["row_splits"][-1],
}


def table(rows, columns):
    """Return a Markdown table of {name: [error, ...]}."""
    lines = [f"| variable | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for name, values in rows.items():
        cells = ["" if value is None else f"{100 * value:.2f}%" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Run the benchmark from the command line."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    columns, found, too_large = [], [], []
    for make in (pretraining, classification):
        for layout in LAYOUTS:
            of_all, tokens = errors(make, layout)
            columns.append(f"{make.__name__}, {layout}")
            median = statistics.median(
                error for path, error in of_all.items() if path.endswith("kernel")
            )
            of_all["(median of the kernels)"] = median
            found.append(of_all)
            worst = max(of_all, key=of_all.get)
            print(
                f"{columns[-1]}: {tokens:,} tokens, {len(of_all) - 1} variables; median of the "
                f"kernels {100 * median:.2f}%; largest {worst}, {of_all[worst] / median:.2f} times",
                flush=True,
            )
            too_large += [
                f"{columns[-1]}: {path} {error / median:.2f} times the median of the kernels"
                for path, error in of_all.items()
                if not error <= LIMIT * median
            ]
    names = list(dict.fromkeys(name for of_all in found for name in of_all))
    print(table({name: [of_all.get(name) for of_all in found] for name in names}, columns))
    kinds = {}
    for name in names:
        kinds.setdefault(re.sub(r"layer_\d+", "layer_*", name), []).append(name)
    worst = {
        kind: [max((of_all[n] for n in members if n in of_all), default=None) for of_all in found]
        for kind, members in kinds.items()
    }
    print(f"\n{table(worst, columns)}")
    if too_large:
        sys.exit("\n".join(too_large))


if __name__ == "__main__":
    main()
