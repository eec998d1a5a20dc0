"""Small corpora, their vocabulary and their shards, written in the process of the test."""

import contextlib
import os
import pathlib
import random

from bert_tf import BertConfig, Vocabulary
from bert_tf.data import documents, writing
from bert_tf.data.manifest import Manifest
from bert_tf.data.settings import WriteShardsSettings
from bert_tf.data.sharded_output import save_entry, shard_names
from bert_tf.data.shards import ShardWriter

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", ".", *LETTERS]
ENTRIES += [f"##{letter}" for letter in LETTERS]


def write_corpus(path, num_documents=60, seed=0):
    """Write documents of 1 to 9 sentences of 1 to 12 words of 1 to 3 letters."""
    rng = random.Random(seed)

    def sentence():
        words = ("".join(rng.choices(LETTERS, k=rng.randint(1, 3))) for _ in range(12))
        return " ".join(list(words)[: rng.randint(1, 12)]) + "."

    texts = ["\n".join(sentence() for _ in range(rng.randint(1, 9))) for _ in range(num_documents)]
    path.write_text("\n\n".join(texts) + "\n")
    return path


SMALL = {"num_shards": 3, "max_seq_length": 32, "max_predictions_per_seq": 5, "dupe_factor": 2}


def settings_of(corpus, directory, **changes):
    values = {**SMALL, **corpus, "output_dir": str(directory), **changes}
    return WriteShardsSettings(**{**values, "input": (values["input"],)})


def write_here(settings, plan_sha256=""):
    """Write all shards in this process and return {file: bytes}."""
    index = documents.index(
        documents.find_files(settings.input), settings.input_format, settings.text_field, ""
    )
    os.makedirs(settings.output_dir, exist_ok=True)
    vocabulary = Vocabulary.load(settings.vocab)
    tokenizer = {"do_lower_case": True, "strip_accents": None, "max_input_chars_per_word": 200}
    writer = ShardWriter(settings, vocabulary, tokenizer)
    for number, name in enumerate(shard_names("examples", settings.num_shards, "tfrecord")):
        spans = writing.ShardSpans(index, number, settings.num_shards)
        entry = writer.write(number, os.path.join(settings.output_dir, name), spans)
        save_entry(settings.output_dir, entry, plan_sha256)
    return contents(settings.output_dir)


@contextlib.contextmanager
def run_here(settings, open_writer, directory, num_tasks):
    """Stand in for `jobs.run`: write the shards in this process."""
    write = open_writer()

    def make(tasks, on_entry):
        for task in tasks:
            on_entry(write(*task))

    yield make


def contents(directory):
    return {path.name: path.read_bytes() for path in pathlib.Path(directory).glob("*.tfrecord")}


def config_of(**changes):
    values = {"vocab_size": len(ENTRIES), "hidden_size": 4, "num_attention_heads": 1}
    return BertConfig(**{**values, "max_position_embeddings": SMALL["max_seq_length"], **changes})


_written = {}


def write_shards(directory, masking="static", seed=0, **changes):
    """Write a directory of 3 shards and their manifest, in this process and once per arguments."""
    key = (masking, seed, *sorted(changes.items()))
    if key not in _written:
        _write_shards(directory, masking, seed, changes)
        shards = (path for path in (directory / "shards").rglob("*") if path.is_file())
        paths = [directory / "vocab.txt", directory / "text.txt", *shards]
        _written[key] = {path.relative_to(directory): path.read_bytes() for path in paths}
    for name, data in _written[key].items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory / "shards"


def _write_shards(directory, masking, seed, changes):
    directory.mkdir(exist_ok=True)
    vocabulary = Vocabulary(ENTRIES)
    vocabulary.save(directory / "vocab.txt")
    text = write_corpus(directory / "text.txt", seed=seed)
    corpus = {"input": str(text), "vocab": str(directory / "vocab.txt")}
    settings = settings_of(corpus, directory / "shards", masking=masking, **changes)
    tokenizer = {"do_lower_case": True, "strip_accents": None, "max_input_chars_per_word": 200}
    manifest = Manifest.planned(settings.output_dir, settings, vocabulary, tokenizer, {})
    (directory / "shards").mkdir()
    manifest.save({})
    write_here(settings, manifest.plan_sha256)
    manifest.save(manifest.finished())


def arguments(corpus, directory, **changes):
    flags = {**SMALL, **corpus, "output_dir": directory, "num_workers": 1, **changes}
    return [f"--{name}={value}" for name, value in flags.items()]


def write_command(run_command, corpus, directory, **changes):
    done = run_command(
        "bert_tf.write_shards", *arguments(corpus, directory, **changes), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done
