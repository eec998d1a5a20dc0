"""Embedder: vectors of Python strings, files, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import tasks
from bert_tf import UserError, read_pretrained
from tasks.base.task import task_from_dict
from tasks.prediction.feature_extraction import create_embedder, extract
from tasks.types.similarity.text_embedder import SimilarityTask
from tests import small
from tests.conftest import ROOT

TEXTS = ["the bill is too high", "the", "my app does not open ! the app", ""]


@pytest.fixture
def model(huggingface_dir):
    return tasks.TextEmbedder.from_pretrained(huggingface_dir, max_seq_length=8)


@pytest.fixture(scope="module")
def config(config):
    """Return a configuration with two layers."""
    return dataclasses.replace(config, num_hidden_layers=2)


@pytest.mark.slow
def test_vectors_of_strings_and_token_ids_are_the_pooled_hidden_states(model):
    ids = model.tokenize(TEXTS)
    inputs = {name: ids[name] for name in ("input_ids", "input_mask", "segment_ids")}
    hidden = np.array(model.encoder(inputs)["sequence"])
    mask = inputs["input_mask"][:, :, np.newaxis]
    vectors = model.predict(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (4, 12) == (4, model.vector_size)
    np.testing.assert_allclose(vectors, (hidden * mask).sum(1) / mask.sum(1), atol=1e-5)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), vectors, atol=1e-5)
    np.testing.assert_array_equal(model.predict(TEXTS, batch_size=4), vectors)
    np.testing.assert_allclose(model.predict(TEXTS, batch_size=1), vectors, atol=1e-5)
    assert model.predict_rows(TEXTS) == [{"embedding": vector} for vector in vectors.tolist()]
    tokens, weights = model.attention(TEXTS)[1]
    assert tokens == ["[CLS]", "the", "[SEP]"] and weights.shape == (2, 3, 3, 3)


@pytest.mark.slow
def test_options_select_layers_pooling_and_the_end_of_the_text(huggingface_dir):
    def create(**options):
        return tasks.TextEmbedder.from_pretrained(huggingface_dir, max_seq_length=8, **options)

    tail = create(layers="second_to_last", pooling="cls", truncation="tail")
    ids = tail.tokenize(TEXTS[2:3])
    assert ids["start"].tolist() == [[-1, 7, 12, 16, 21, 23, 27, -1]]
    inputs = {name: ids[name] for name in ("input_ids", "input_mask", "segment_ids")}
    hidden = tail.encoder(inputs, output_hidden_states=True)["hidden_states"]
    np.testing.assert_allclose(tail.predict(TEXTS[2:3]), np.array(hidden[1])[:, 0], atol=1e-5)
    pairs = create(pairs=True)
    assert pairs.tokenize((["the bill"], ["my app"]))["segment_ids"].tolist() == [[0] * 4 + [1] * 3]
    assert pairs.predict((["the bill"], ["my app"])).shape == (1, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "sum_last_4"}, "layers=sum_last_4: requires 4 layers, but the encoder has 2"),
        ({"layers": "first"}, "layers='first': expected one of last, second_to_last, sum_last_4"),
        ({"pooling": "mean+sum"}, "pooling='mean.sum': expected one of cls, mean, max, mean_sqrt"),
        ({"max_seq_length": 17}, "max_seq_length=17: expected 4 to 16"),
    ],
)
def test_wrong_options_are_reported(huggingface_dir, options, message):
    with pytest.raises(UserError, match=message):
        tasks.TextEmbedder.from_pretrained(huggingface_dir, **options)


@pytest.mark.slow
def test_a_saved_model_gives_the_same_vectors(huggingface_dir, tmp_path):
    model = tasks.TextEmbedder.from_pretrained(huggingface_dir, pooling="cls", max_seq_length=8)
    rows = model.predict_rows(TEXTS)
    model.save(tmp_path / "m.keras")
    code = (
        "import json, tasks\n"
        f"model = tasks.load_model({str(tmp_path / 'm.keras')!r})\n"
        f"print(json.dumps([type(model).__name__, model.predict_rows({TEXTS!r})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["TextEmbedder", rows]
    model.save_run(tmp_path / "run")
    loaded = tasks.load_model(tmp_path / "run")
    assert type(loaded) is tasks.TextEmbedder and loaded.task == model.task
    assert loaded.predict_rows(TEXTS) == rows


@pytest.mark.slow
def test_the_command_writes_the_vectors_of_the_model(huggingface_dir, model, tmp_path):
    embedder = create_embedder(read_pretrained(huggingface_dir), "last", "mean", 8)
    source = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    extract(embedder, source, ["text"], tmp_path / "out.npy", False, 4, lambda line: None)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), model.predict(TEXTS))


def test_task_json_has_all_fields():
    task = SimilarityTask(max_seq_length=8, layers="concat_last_4", prompts={"query": "find: "})
    assert task_from_dict(json.loads(json.dumps(task.to_dict()))) == task
