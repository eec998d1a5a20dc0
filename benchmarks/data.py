"""Measure preparing text: tokenizing, learning a vocabulary, writing and reading shards.

    python benchmarks/data.py --quick
    python benchmarks/data.py --data=DIR

The text is DIR/text/books.txt, English novels with one sentence per line, or without DIR random
sentences of the complaints of examples/. The tokenizers have an uncased vocabulary of 30,522
entries. The others are TF Text's FastBertTokenizer, whose ids differ from the released ones on rare
Unicode, and Hugging Face's Rust library. Calls alternate, of 5.5 MB each. write_shards has two
workers and writes 64 shards of sequences of 128 tokens; its rate is without its start, and its
memory the peak of the summed PSS of its processes, sampled five times per second.
"""

import collections
import contextlib
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import own_process
import results
from task_recipes import columns, minilm

ROOT, VOCAB = results.ROOT, str(minilm() / "vocab.txt")
QUICK_BYTES, BYTES, TOKENIZED_BYTES = 12_000_000, 48_000_000, 5_500_000
VOCAB_SIZES = {"novels": 30_522, "random sentences": 4000}  # Of the vocabulary that is learned.
BERT_TF, TF_TEXT, RUST = "bert_tf", "TF Text", "tokenizers (Rust)"


def main():
    """Run the benchmark from the command line."""
    options = results.parser(__doc__).parse_args()
    measured = results.Results("data", options)
    rounds = 1 if options.quick else 3

    def add(workload, unit, values, program=BERT_TF):
        measured.add("Data", workload, program, unit, values)

    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        path, kind = write_text(directory, options.data, QUICK_BYTES if options.quick else BYTES)
        try:
            for workload, program, rates in own_process.call("data.tokenize", path=str(path))[
                "rates"
            ]:
                add(f"{kind}: {workload}", "MB/s", rates, program)
        except own_process.Failed as failure:
            measured.leave_out("tokenizers", failure)
        size = VOCAB_SIZES[kind]
        learned = [own_process.call("data.learn", path=str(path), size=size) for _ in range(rounds)]
        add(f"{kind}: learn {size:,} entries", "MB/s", [one["rate"] for one in learned])
        written = [write_shards(path, directory / str(number)) for number in range(rounds)]
        add(f"{kind}: write shards", "MB/s", [one["rate"] for one in written])
        add("start of write_shards", "s", [one["start"] for one in written])
        add("memory of write_shards", "MB", [one["memory"] for one in written])
        read = own_process.call("data.read", directory=str(directory / "0"), passes=3)
        add("read shards", "examples/s", read["rates"])
    measured.save()


def write_text(directory, data, size):
    """Write text of about `size` bytes; return its path and what it is."""
    path, books = directory / "text.txt", data and data / "text" / "books.txt"
    if books and books.is_file():
        with open(books, encoding="utf-8") as lines:
            path.write_text(lines.read(size), encoding="utf-8")
        return path, "novels"
    known = " ".join(columns("complaints")[0]).split()
    drawn, written = random.Random(0), 0
    # Nine of ten words are known; the others are pairs of known ones, as rare as names.
    words = known * 9 + ["".join(drawn.choices(known, k=2)) for _ in known]
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            sentences = (" ".join(drawn.choices(words, k=18)) for _ in range(20))
            written += file.write("\n".join(sentences) + "\n\n")
    return path, "random sentences"


def tokenize(path):
    """Return MB per second of each tokenizer, for ids and for ids with offsets."""
    import tensorflow as tf
    import tensorflow_text as tf_text
    from tokenizers import BertWordPieceTokenizer

    from bert_tf import Tokenizer, Vocabulary

    text = pathlib.Path(path).read_bytes()[:TOKENIZED_BYTES].decode(errors="ignore")
    lines, vocabulary = text.split("\n")[:-1], Vocabulary.load(VOCAB)
    texts = tf.constant(lines)
    ours = Tokenizer(vocabulary, do_lower_case=True)
    fast = tf_text.FastBertTokenizer(
        list(vocabulary.entries), token_out_type=tf.int32, lower_case_nfd_strip_accents=True
    )
    rust = BertWordPieceTokenizer(VOCAB, lowercase=True)

    def traced(function):
        signature = [tf.TensorSpec([None], tf.string)]
        graph = tf.function(function, input_signature=signature, autograph=False)
        return lambda: graph(texts)

    def offsets(texts):
        tokens = ours.tokenize_with_offsets(texts)
        return tokens.ids.flat_values, tokens.starts.flat_values, tokens.ends.flat_values

    functions = {
        ("tokenize", BERT_TF): traced(lambda texts: ours.tokenize(texts).ids.flat_values),
        ("tokenize", TF_TEXT): traced(lambda texts: fast.tokenize(texts).flat_values),
        ("tokenize with offsets", BERT_TF): traced(offsets),
        ("tokenize with offsets", TF_TEXT): traced(
            lambda texts: [part.flat_values for part in fast.tokenize_with_offsets(texts)]
        ),
        ("tokenize with offsets", RUST): lambda: rust.encode_batch(lines, add_special_tokens=False),
    }
    rates, size = collections.defaultdict(list), len(text.encode()) / 1e6
    for number in range(6):
        for key, function in functions.items():
            seconds = _seconds(function)
            if number:  # The first call builds the graph.
                rates[key].append(size / seconds)
    return {"rates": [(*key, values) for key, values in rates.items()]}


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def learn(path, size):
    """Return MB per second of learning a vocabulary, without start-up."""
    import tensorflow as tf

    from bert_tf.data import vocabulary_learning as learning

    unique_words = learning.make_unique_words(do_lower_case=True)
    unique_words(tf.constant(["a"]))

    def run():
        lines = learning.hold_out(learning.read_lines([path], "lines", "text"), [])
        learning.train(learning.count_words(lines, unique_words, lambda line: None), size)

    return {"rate": pathlib.Path(path).stat().st_size / 1e6 / _seconds(run)}


def write_shards(path, shards, count=64):
    """Write `count` shards; return the rate, start and memory of the command."""
    command = [sys.executable, "-m", "bert_tf.write_shards", f"--input={path}", f"--vocab={VOCAB}"]
    command += [f"--output_dir={shards}", "--num_workers=2", f"--num_shards={count}"]
    began, peak = time.monotonic(), 0
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(0.2)
    seconds, lines = time.monotonic() - began, process.stderr.read()
    if process.returncode:
        sys.exit(lines)
    start = float(re.search(r"ready after ([\d.]+) s", lines)[1])
    rate = path.stat().st_size / 1e6 / (seconds - start)
    return {"rate": rate, "start": start, "memory": peak}


def memory_of(session):
    """Return the sum of the proportional set sizes of the processes of a session in MB."""
    total = 0
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, TypeError):  # A process has ended.
            if os.getsid(int(path.name)) == session:
                text = (path / "smaps_rollup").read_text()
                total += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])
    return total / 1e3


def read(directory, passes):
    """Return examples per second of reading shards, from the second batch on."""
    from bert_tf import BertConfig
    from bert_tf.data.batches import PretrainingDataset, flatten_examples
    from bert_tf.data.manifest import Manifest

    vocabulary = Manifest.load(directory).vocabulary()
    data = PretrainingDataset(directory, vocabulary, BertConfig(vocab_size=len(vocabulary)))
    rates, batch, counted = [], 256, min(100, len(data) // 256 - 2)
    for epoch in range(passes):
        batches = iter(data.training_batches(data.position(epoch, 0), batch, flatten_examples))
        next(batches)
        start = time.perf_counter()
        for _ in range(counted):
            next(batches)
        rates.append(batch * counted / (time.perf_counter() - start))
    return {"rates": rates}


if __name__ == "__main__":
    main()
