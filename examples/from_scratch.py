"""Build a vocabulary and shards, and pretrain a small BERT, on a text that Python contains.

    python examples/from_scratch.py OUTPUT

The text is the language reference in Python's help (as shown by `help("assert")`), about 80 topics.
Every eighth topic is held out. At the end, the accuracy on held-out masked tokens is compared with
always predicting the most frequent token.
"""

import json
import pathlib
import subprocess
import sys
from pydoc_data import topics

import numpy as np

from bert_tf.system import command

command.import_tensorflow()  # Without its start-up messages.
from bert_tf.data import tf_examples  # noqa: E402
from bert_tf.data.inspection import read_shards  # noqa: E402
from bert_tf.data.manifest import Manifest  # noqa: E402

VOCAB_SIZE, MAX_SEQ_LENGTH, NUM_STEPS = 2000, 32, 1500
# No dropout: with so little text and so few steps the model underfits.
SIZE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_SEQ_LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def run(title, name, **flags):
    """Print and run a command of this project."""
    arguments = [name, *(f"--{flag}={value}" for flag, value in flags.items())]
    print(f"\n== {title}\n$ bert-tf {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "bert_tf", *arguments], check=True)


def token_counts(shards):
    """Return the counts of each id as a token and as a masked token, over all examples."""
    manifest = Manifest.load(shards)
    tokens, answers = (np.zeros(VOCAB_SIZE, np.int64) for _ in range(2))
    paths = [manifest.path(entry["file"]) for entry in manifest.shards]
    for _, examples in read_shards(paths, tf_examples.parser_of(manifest.settings)):
        tokens += np.bincount(examples["input_ids"].ravel(), minlength=VOCAB_SIZE)
        found = examples["masked_lm_ids"][examples["masked_lm_weights"] > 0]
        answers += np.bincount(found, minlength=VOCAB_SIZE)
    return tokens, answers


def main(output):
    """Write all files of the example to `output`."""
    output = pathlib.Path(output)
    output.mkdir(parents=True)  # Fails if it exists, so that no old files are used.
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    for name, part in (
        ("train", [text for number, text in enumerate(texts) if number % 8]),
        ("held_out", texts[::8]),
    ):
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    vocab = output / "vocab.txt"
    run(
        "vocabulary",
        "learn_vocab",
        input=output / "train.jsonl",
        input_format="jsonl",
        vocab_size=VOCAB_SIZE,
        output=vocab,
    )
    shards, held_out = output / "shards", output / "held_out"
    for name, directory, num_shards in (("train", shards, 8), ("held_out", held_out, 1)):
        run(
            f"shards ({name})",
            "write_shards",
            input=output / f"{name}.jsonl",
            input_format="jsonl",
            vocab=vocab,
            output_dir=directory,
            num_shards=num_shards,
            max_seq_length=MAX_SEQ_LENGTH,
            max_predictions_per_seq=5,
            dupe_factor=10,
        )
    (output / "config.json").write_text(json.dumps(SIZE))
    run(
        "pretrain",
        "pretrain",
        shards=shards,
        eval_shards=held_out,
        config=output / "config.json",
        output_dir=output / "pretrained",
        global_batch_size=32,
        num_train_steps=NUM_STEPS,
        learning_rate=2e-3,
        warmup_steps=100,
        bias_correction=True,
        log_every=300,
    )
    *_, last = map(json.loads, open(output / "pretrained" / "metrics.jsonl"))
    answers = token_counts(held_out)[1]
    tokens = token_counts(shards)[1]
    most = tokens.argmax()
    word = Manifest.load(shards).vocabulary().entries[most]
    print(
        f"\nAccuracy on masked tokens of held-out text: "
        f"{last['eval_masked_lm_accuracy']:.1%}; always predicting {word!r}: "
        f"{answers[most] / answers.sum():.1%}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
