"""Measure start-up and memory with many shards, and reading of one file with many examples.

    python benchmarks/many_shards.py --directory=DIR --part=write [--num_shards=10000]
    python benchmarks/many_shards.py --directory=DIR --part=resume|inspect|read|pretrain
    python benchmarks/many_shards.py --directory=DIR --part=huge [--examples=10000000]

The first command writes shards of a few examples from random text to DIR, which the others use.
The last one writes a single TFRecord file of another program. Memory is the peak resident set size
of the process that is named, without its workers.
"""

import argparse
import itertools
import json
import pathlib
import random
import re
import resource
import subprocess
import sys
import time

import own_process

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS_PER_SHARD = 6
LENGTH = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *LETTERS]
ENTRIES += [f"##{letter}" for letter in LETTERS]
CONFIG = {
    "vocab_size": len(ENTRIES),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}


def main():
    """Run one part of the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, type=pathlib.Path)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--num_shards", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=10_000_000)
    arguments = parser.parse_args()
    arguments.directory.mkdir(exist_ok=True)
    for name, values in PARTS[arguments.part](arguments):
        print(f"{name:24} {json.dumps(values)}", flush=True)


def write(arguments):
    """Write the text, the vocabulary and the shards."""
    directory, rng = arguments.directory, random.Random(0)
    (directory / "vocab.txt").write_text("\n".join(ENTRIES) + "\n")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with open(directory / "text.txt", "w") as stream:
        for _ in range(arguments.num_shards * DOCUMENTS_PER_SHARD):
            sentences = ("".join(rng.choices(LETTERS + " ", k=40)) for _ in range(6))
            stream.write("\n".join(sentences) + "\n\n")
    yield "write_shards", write_shards(arguments)


def resume(arguments):
    """Rerun write_shards with all shards, and with half of them."""
    yield "write_shards, complete", write_shards(arguments)
    for number in range(0, arguments.num_shards, 2):
        name = f"examples-{number:05d}-of-{arguments.num_shards:05d}.tfrecord"
        (arguments.directory / "shards" / name).unlink()
    yield "write_shards, half", write_shards(arguments)


def inspect(arguments):
    """Verify and summarize the shards."""
    shards = arguments.directory / "shards"
    yield "inspect_shards", run("bert_tf.inspect_shards", "shards verified", f"--shards={shards}")


def read(arguments):
    """Read the first batch, at the start and in the middle of an epoch."""
    shards = str(arguments.directory / "shards")
    for fraction in (0.0, 0.5):
        values = own_process.call(f"{NAME}.first_batch", directory=shards, fraction=fraction)
        yield f"first batch, {fraction:.0%}", values


def pretrain(arguments):
    """Pretrain a toy model for a step, and run a dry run."""
    directory = arguments.directory
    flags = [f"--shards={directory / 'shards'}", f"--config={directory / 'config.json'}"]
    flags += ["--global_batch_size=32", "--num_train_steps=1", "--log_every=1"]
    run_directory = directory / f"run{time.time_ns()}"
    flags.append(f"--output_dir={run_directory}")
    yield "pretrain --dry_run", run("bert_tf.pretrain", "step 1", "--dry_run", *flags)
    yield "pretrain", run("bert_tf.pretrain", "step 1", *flags)


def huge(arguments):
    """Read batches of a single file with many examples."""
    shards = arguments.directory / f"huge{arguments.examples}"
    if not shards.exists():
        own_process.call(
            f"{NAME}.write_huge", directory=str(shards), num_examples=arguments.examples
        )
    for fraction in (0.0, 0.5):
        values = own_process.call(f"{NAME}.first_batch", directory=str(shards), fraction=fraction)
        yield f"huge, first batch, {fraction:.0%}", values


def write_shards(arguments):
    """Run write_shards."""
    directory = arguments.directory
    flags = [f"--input={directory / 'text.txt'}", f"--vocab={directory / 'vocab.txt'}"]
    flags += [f"--output_dir={directory / 'shards'}", f"--num_shards={arguments.num_shards}"]
    flags += [f"--max_seq_length={LENGTH}", "--max_predictions_per_seq=10"]
    return run("bert_tf.write_shards", "workers ready|nothing to do", *flags)


def run(module, first_line, *flags):
    """Run a command. Return seconds in all and until a line, and the peak memory in MB."""
    began, ready, peak, lines = time.monotonic(), None, 0, []
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        lines.append(line)
        if ready is None and re.search(first_line, line):
            ready = time.monotonic() - began
        peak = max(peak, peak_mb(process.pid))
    if process.wait():
        raise SystemExit("".join(lines))
    seconds = time.monotonic() - began
    return {"ready": round(ready, 1), "seconds": round(seconds, 1), "MB": round(peak)}


def peak_mb(pid):
    """Return the peak resident set size of a process in MB, 0 if it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) / 1e3 if found else 0


def first_batch(directory, fraction):
    """Return seconds of opening, verifying and the first batches of an epoch from a fraction on."""
    from bert_tf import BertConfig
    from bert_tf.data.batches import PretrainingDataset, flatten_examples
    from bert_tf.data.manifest import Manifest

    times, examples = [time.monotonic()], 0
    vocabulary = Manifest.load(directory).vocabulary()
    times.append(time.monotonic())
    data = PretrainingDataset(directory, vocabulary, BertConfig(**CONFIG))
    times.append(time.monotonic())
    data.manifest.check_files()
    times.append(time.monotonic())
    position = data.position(0, int(fraction * len(data)))
    batches = iter(data.training_batches(position, 256, flatten_examples))
    next(batches)
    times.append(time.monotonic())
    while examples < 100_000:
        next(batches)
        examples += 256
    rate = examples / (time.monotonic() - times[-1])
    names = ("manifest", "open", "verify", "first_batch")
    seconds = [round(after - before, 2) for before, after in itertools.pairwise(times)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {**dict(zip(names, seconds, strict=True)), "per_second": round(rate), "MB": memory}


def write_huge(directory, num_examples):
    """Write one TFRecord file of examples and its manifest, as `write_manifest` does."""
    import numpy as np
    import tensorflow as tf

    from bert_tf import Vocabulary
    from bert_tf.data import tf_examples
    from bert_tf.data.manifest import Manifest
    from bert_tf.storage import files

    rng, shape = np.random.default_rng(0), (4096, LENGTH)
    ids = rng.integers(5, len(ENTRIES), shape)
    examples = {"input_ids": ids, "input_mask": np.ones(shape, int), "segment_ids": ids % 2}
    for name in tf_examples.MASKS:
        examples[name] = np.tile(np.arange(10), (len(ids), 1)).astype(
            np.float32 if name == "masked_lm_weights" else int
        )
    examples[tf_examples.LABELS] = ids[:, :1] % 2
    records = tf_examples.serialize(examples)
    pathlib.Path(directory).mkdir()
    path = f"{directory}/tf_examples.tfrecord"
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(num_examples):
            writer.write(records[number % len(records)])
    entry = {
        "file": "tf_examples.tfrecord",
        "records": num_examples,
        "bytes": files.size(path),
        "sha256": files.sha256(path),
        "tokens": num_examples * LENGTH,
        "random_next": 0,
    }
    vocabulary = Vocabulary(ENTRIES)
    manifest = Manifest.describe(directory, vocabulary, LENGTH, 10, [entry])
    manifest.save_vocabulary(vocabulary)
    manifest.save({0: entry})
    return {}


NAME = pathlib.Path(__file__).stem
PARTS = {
    "write": write,
    "resume": resume,
    "inspect": inspect,
    "read": read,
    "pretrain": pretrain,
    "huge": huge,
}


if __name__ == "__main__":
    main()
