"""Small objects for tests: Hugging Face weights, rows, settings and batches."""

import csv
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from bert_tf.config import TOKENIZER_SETTINGS
from bert_tf.weights import name_map
from tasks.finetuning.settings import FinetuneSettings
from tasks.model.loading import load_model, model_class

TEXTS = {
    "billing": ["the bill is too high", "my bill is high !", "the bill , too high"],
    "hardware": ["the screen is broken", "my screen is too broken", "broken screen !"],
    "software": ["the app does not open", "my app does not open !", "not open , the app"],
}


def fast(values, *names):
    """Return values as parameters of a test that is slow but for these."""
    return [value if value in names else _slow(value) for value in values]


def _slow(value):
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def random_weights(config, seed=0, scale=0.3, parts=("bert",)):
    """Return {our name: array}, so large that every component matters; LayerNorm near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(1.0 if name.endswith("gamma") else 0.0, scale, shape).astype(np.float32)
        for part in parts
        for name, shape in name_map.weight_shapes(config, part).items()
    }


def write_huggingface(directory, config, vocabulary, weights=None, **changes):
    """Write a Hugging Face directory; `changes` are merged into its config.json."""
    directory.mkdir(parents=True)
    weights = weights or random_weights(config)
    tensors = {}
    for row in name_map.table(config):
        array = weights[row.ours]
        tensors["bert." + row.huggingface] = np.ascontiguousarray(
            array.T if row.ours.endswith("/kernel") else array
        )
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    values = {
        name: value for name, value in config.to_dict().items() if name not in TOKENIZER_SETTINGS
    }
    (directory / "config.json").write_text(
        json.dumps({**values, "model_type": "bert", "architectures": ["BertModel"], **changes})
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": True, "strip_accents": None})
    )
    vocabulary.save(directory / "vocab.txt")
    return directory


def write_rows(path, rows, columns=("text", "label")):
    with open(path, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_beir(directory, documents, queries, relevance):
    """Write a directory of BEIR from {id: text} twice, and {query: {document: relevance}}."""
    (directory / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    rows = [
        f"{query}\t{document}\t{value}\n"
        for query, judged in relevance.items()
        for document, value in judged.items()
    ]
    header = "query-id\tcorpus-id\tscore\n"
    (directory / "qrels" / "test.tsv").write_text(header + "".join(rows))
    return directory


def same_rows(path):
    """Write a dev file of the training rows with other bytes, if dev metrics do not matter."""
    path = pathlib.Path(path)
    other = path.with_stem(f"{path.stem}_again")
    other.write_bytes(path.read_bytes() + b"\n")
    return other


def write_complaints(directory):
    rows = [(text, label) for label, texts in TEXTS.items() for text in texts]
    return {
        "train": write_rows(directory / "train.csv", rows * 3),
        "dev": write_rows(directory / "dev.csv", rows),
    }


def settings(huggingface_dir, complaints, output_dir, **changes):
    """Return settings of a fine-tuning run that takes seconds."""
    values = {
        "task": "classification",
        "train": str(complaints["train"]),
        "dev": (str(complaints["dev"]),),
        "init_from": str(huggingface_dir),
        "output_dir": str(output_dir),
        "max_seq_length": 12,
        "global_batch_size": 8,
        "epochs": 2,
        "learning_rate": 1e-2,
        "log_every": 2,
    }
    return FinetuneSettings(**{**values, **changes})


def trained(path, pretrained, task, model):
    """Write a model of a task as a run, and open it."""
    record = {"origin": pretrained.origin_in(model)}
    parts = (task, pretrained.config, pretrained.vocabulary)
    model = model_class(task)(*parts, network=model, record=record, has_new_head=False)
    return load_model(model.save_run(path).path)


def in_order(encoded, batch_size):
    """Return the batches (inputs, labels, weights) of encoded examples in their order."""
    epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
    return encoded.epoch_batches(global_batch_size=batch_size, seed=0, epoch=epoch, shuffle=False)


def batches(rows=24, length=7, vocab_size=30, num_labels=3, replica_rows=8, seed=0, weights=None):
    """Return a repeating dataset of random (inputs, labels, weights) of `replica_rows` rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, length + 1, rows)
    inputs = {
        "input_ids": rng.integers(1, vocab_size, (rows, length)).astype(np.int32),
        "input_mask": (np.arange(length) < lengths[:, None]).astype(np.int32),
        "segment_ids": (np.arange(length) >= 3).astype(np.int32) * np.ones((rows, 1), np.int32),
    }
    weights = np.ones(rows, np.float32) if weights is None else np.asarray(weights, np.float32)
    labels = rng.integers(0, num_labels, rows).astype(np.int32)
    return (
        tf.data.Dataset.from_tensor_slices((inputs, {"label": labels}, {"label": weights}))
        .batch(replica_rows)
        .repeat()
    )
