"""Vectors and scores of directories that sentence-transformers writes, and of those written for it.

BERT_TF_SENTENCE_TRANSFORMERS_PYTHON names an interpreter with sentence-transformers 6 and torch.
Without it, one is installed from the package registry. The texts are of many languages.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tasks
from bert_tf import Vocabulary, read_pretrained
from bert_tf.conversion import checked_conversion, exported_model
from export import LocalClient, publish

WRITER = pathlib.Path(__file__).with_name("sentence_transformers_writer.py")
EMBEDDERS = ("cls", "dense", "lower", "max", "old", "prompts", "several", "short")
CROSS_ENCODERS = ("cross_identity", "cross_sigmoid", "cross_three")
SHORT = 12  # Characters of a text of a pair, as in the writer, which cannot be imported here.
TOLERANCE = 1e-5
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return an interpreter with sentence-transformers."""
    if name := os.environ.get("BERT_TF_SENTENCE_TRANSFORMERS_PYTHON"):
        return name
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    packages = ["torch", "sentence-transformers>=6,<7"]
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", *packages], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"sentence-transformers cannot be installed: {done.stderr[-200:]}")
    return str(python)


def run(python, *arguments):
    """Run the writer, without this environment's packages and without a network."""
    done = subprocess.run(
        [python, "-I", str(WRITER), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def texts(data_dir):
    """Return 200 texts of all languages."""
    lines = (data_dir / "multilingual" / "all_lines.txt").read_text(encoding="utf-8").split("\n")
    lines = [line for line in lines if line.strip()]
    return lines[:: len(lines) // 200][:200]


@pytest.fixture(scope="module")
def written(tmp_path_factory, data_dir, python, texts):
    """Return the directory of the models that sentence-transformers writes, and its outputs."""
    directory = tmp_path_factory.mktemp("models")
    files = tmp_path_factory.mktemp("files")
    (files / "texts.json").write_text(json.dumps(texts))
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    Vocabulary(vocabulary.lines[:4_000], "the first entries").save(files / "vocab.txt")
    run(python, directory, files / "vocab.txt", files / "texts.json")
    outputs = np.load(directory / "outputs.npz")
    assert sorted(outputs.files) == sorted((*EMBEDDERS, *CROSS_ENCODERS))
    return directory, outputs


def assert_close(found, expected):
    """Compare vectors relative to their largest component."""
    largest = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(written, texts, name):
    directory, outputs = written
    model = tasks.TextEmbedder.from_pretrained(directory / name)
    vectors, expected = model.predict(texts), outputs[name]
    if name == "prompts":
        vectors = np.stack([vectors, model.predict(texts, prompt="document")])
    assert_close(vectors, expected)


def scores_of(path, texts, tmp_path):
    """Return the scores of a cross-encoder's run; probabilities for several outputs."""
    checked_conversion.save_run(read_pretrained(path), str(tmp_path / "run"))
    texts = [text[:SHORT] for text in texts]
    found = tasks.load_model(tmp_path / "run").predict((texts, texts[::-1]))
    return found["value"] if "value" in found else found["probabilities"]


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_are_those_of_cross_encoders(written, texts, name, tmp_path):
    directory, outputs = written
    expected = outputs[name]
    if expected.ndim == 2:
        expected = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    found = scores_of(directory / name, texts, tmp_path)
    assert_close(found, expected)


def test_a_real_embedder_has_the_same_vectors_in_a_served_model(
    pretrained_dir, python, texts, tmp_path
):
    (tmp_path / "minilm").symlink_to(pretrained_dir)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    run(python, "--read", tmp_path, "minilm", tmp_path / "texts.json")
    expected = np.load(tmp_path / "read.npz")["minilm"]
    model = tasks.TextEmbedder.from_pretrained(pretrained_dir)
    assert model.task.max_seq_length == 256 and model.task.normalize
    assert_close(model.predict(texts), expected)
    client = LocalClient(publish(model, tmp_path / "served").parent)
    assert_close(client.predict({"text": texts})["embedding"], expected)
    pairs = {"text_a": texts, "text_b": texts[::-1]}
    scores = client.predict(pairs, signature="similarity")["score"]
    assert_close(scores, (expected * expected[::-1]).sum(axis=1))


def test_what_is_written_has_the_same_vectors_and_loads_without_a_warning(
    written, python, texts, tmp_path
):
    directory, outputs = written
    for name in outputs.files:
        run_directory = tmp_path / f"run_{name}"
        checked_conversion.save_run(read_pretrained(directory / name), str(run_directory))
        pretrained = read_pretrained(run_directory)
        model = exported_model.from_pretrained(pretrained, run_directory)
        checked_conversion.convert(model, str(tmp_path / name), "sentence-transformers")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    run(python, "--read", tmp_path, ",".join(outputs.files), tmp_path / "texts.json")
    found = np.load(tmp_path / "read.npz")
    for name in outputs.files:
        np.testing.assert_array_equal(found[name], outputs[name])
