"""Embedder: vectors of Python strings, files, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf import Tokenizer, UserError, read_pretrained
from bert_tf.conversion import checked_conversion
from tasks.base.task import task_from_dict
from tasks.model.labelled_rows import Rows
from tasks.prediction.outputs import EmbedderSettings, VectorJob
from tasks.types.similarity import text_embedder
from tasks.types.similarity.embedding_model import SIMILARITIES, normalized
from tasks.types.similarity.text_embedder import SimilarityTask
from tests import sentence_transformers_files as st_files
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


@pytest.mark.medium
def test_vectors_of_tokens_are_float32_in_mixed_precision(huggingface_dir):
    options = {"max_seq_length": 8, "dtype": "mixed_bfloat16"}
    model = tasks.TextEmbedder.from_pretrained(huggingface_dir, **options)
    ((tokens, vectors),) = model.token_vectors(TEXTS[:1])
    assert vectors.dtype == np.float32 and vectors.shape == (len(tokens), 12)


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
        ({"normalize": 1}, "TextEmbedder: normalize: expected bool, received 1"),
        ({"prompts": ["query: "]}, r"TextEmbedder: prompts: expected dict, received \['query: '\]"),
    ],
)
def test_wrong_options_are_reported(huggingface_dir, options, message):
    with pytest.raises(UserError, match=message):
        tasks.TextEmbedder.from_pretrained(huggingface_dir, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pooling": "mean+last"},
            r"pooling='mean\+last': expected one of cls, mean, max",
        ),
        ({"similarity": "hamming"}, "similarity='hamming': expected one of cosine, dot, euclidean"),
        (
            {"dense_units": (0,), "dense_activations": ("tanh",)},
            r"dense_units=\(0,\): expected int",
        ),
        (
            {"dense_units": (3,), "dense_activations": ("relu",)},
            r"dense_activations=\('relu',\): expected 1 of tanh, identity, one per dense layer",
        ),
        (
            {"default_prompt": "x"},
            "default_prompt='x': expected one of none, since the model",
        ),
        (
            {"default_prompt": "x", "prompts": {"query": "a"}},
            "default_prompt='x': expected one of 'query'",
        ),
        (
            {"default_prompt": "a", "prompts": {"a": "b"}, "text_columns": ("text_a", "text_b")},
            "default_prompt='a': expected none with pairs",
        ),
    ],
)
def test_fields_without_a_meaning_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SimilarityTask(max_seq_length=8, **options)


def test_arguments_of_predict_are_checked_with_a_prompt_too(config, vocabulary):
    task = SimilarityTask(max_seq_length=8, prompts={"query": "the "})
    model = tasks.TextEmbedder(task, config, vocabulary)
    with pytest.raises(UserError, match="batch_size=0: expected an integer > 0"):
        model.predict(TEXTS, batch_size=0, prompt="query")
    with pytest.raises(UserError, match="steps: expected with a dataset only"):
        model.predict(TEXTS, batch_size=None, prompt="query", steps=1)
    with pytest.raises(UserError, match="callbacks: expected with token ids only"):
        model.predict(TEXTS, prompt="query", callbacks=[keras.callbacks.History()])
    with pytest.raises(TypeError, match="'step'"):
        model.predict(TEXTS, prompt="query", step=1)
    with pytest.raises(UserError, match="batch_size=0: expected an integer > 0"):
        model.token_vectors(TEXTS, batch_size=0)


def test_vectors_of_tokens_are_those_of_any_rows(config, vocabulary):
    model = tasks.TextEmbedder(SimilarityTask(max_seq_length=8), config, vocabulary)
    expected = model.token_vectors(TEXTS)
    dataset = tf.data.Dataset.from_tensor_slices(TEXTS).batch(4)
    for rows in (Rows({"text": TEXTS}, [], (), "texts.csv"), dataset):
        for found, row in zip(model.token_vectors(rows), expected, strict=True):
            assert found[0] == row[0]
            np.testing.assert_allclose(found[1], row[1], atol=1e-5)


def test_vectors_of_tokens_take_bounded_memory(config, vocabulary, monkeypatch):
    padded, shapes = text_embedder.to_padded, []

    def to_padded(*args):
        shapes.append(padded(*args)["input_ids"].shape)
        return padded(*args)

    monkeypatch.setattr(text_embedder, "to_padded", to_padded)
    config = dataclasses.replace(config, max_position_embeddings=64)
    model = tasks.TextEmbedder(SimilarityTask(max_seq_length=64), config, vocabulary)
    rows = model.token_vectors(["the bill", *["a"] * 298, "a " * 70])
    assert shapes == [(256, 4), (44, 64)]
    assert all(vectors.base is None for _, vectors in rows)  # No row keeps the others in memory.


def test_one_size_is_a_list_of_one():
    one = SimilarityTask.from_options(
        max_seq_length=8, dense_units=384, dense_activations="identity", matryoshka_dims=64
    )
    several = {"dense_units": [384], "dense_activations": ["identity"], "matryoshka_dims": [64]}
    assert one == SimilarityTask.from_options(max_seq_length=8, **several)
    default = SimilarityTask.from_options(max_seq_length=8, dense_units=384)
    assert (default.dense_units, default.dense_activations) == ((384,), ("tanh",))
    with pytest.raises(UserError, match="dense_units=.'384',.: expected integers >= 1"):
        SimilarityTask.from_options(max_seq_length=8, dense_units="384")


def test_the_log_of_a_training_names_the_prompt():
    task = SimilarityTask(max_seq_length=8)
    assert task.summary() == ""
    task = dataclasses.replace(task, prompts={"query": "a ", "document": "b "})
    assert task.summary() == "; no prompt before texts, of 'query', 'document'"
    task = dataclasses.replace(task, default_prompt="query")
    assert task.summary() == "; prompt 'query' before texts, of 'query', 'document'"


def test_similarities_of_vectors():
    a, b = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[4.0, -3.0], [0.0, 5.0]])
    expected = {
        "cosine": [0, 1],
        "dot": [0, 10],
        "euclidean": [-(50**0.5), -3],
        "manhattan": [-8, -3],
    }
    assert expected.keys() == SIMILARITIES.keys()
    for name, scores in expected.items():
        np.testing.assert_allclose(SIMILARITIES[name](a, b), scores, atol=1e-6)
    np.testing.assert_array_equal(normalized(np.zeros((1, 2))), np.zeros((1, 2)))


def test_tokens_of_a_prompt_have_no_offsets(vocabulary):
    task = SimilarityTask(max_seq_length=7, prompts={"query": "the bill "}, default_prompt="query")
    tokenize = Tokenizer(vocabulary, True).tokenize_with_offsets
    texts = {"text": tf.constant(["my app is", ""])}
    packed = task.encode(texts, tokenize, vocabulary).packed
    entries = vocabulary.entries
    assert [[entries[number] for number in row] for row in packed.input_ids.to_list()] == [
        ["[CLS]", "the", "bill", "my", "app", "is", "[SEP]"],
        ["[CLS]", "the", "bill", "[SEP]"],
    ]
    assert packed.starts.to_list() == [[-1, -1, -1, 0, 3, 7, -1], [-1] * 4]
    assert packed.ends.to_list() == [[-1, -1, -1, 2, 6, 9, -1], [-1] * 4]


@pytest.fixture
def directory(tmp_path, config, vocabulary):
    """Return a directory of sentence-transformers with all modules."""
    return st_files.write(
        tmp_path / "model",
        config,
        vocabulary,
        kinds=("Transformer", "Pooling", "Dense", "Normalize"),
        pooling={**st_files.POOLING, "pooling_mode": ["max", "cls"]},
        dense={**st_files.DENSE, "in_features": 24},
        tensors=st_files.dense_tensors(24),
        encoder={"max_seq_length": 7},
        model={**st_files.MODEL, "default_prompt_name": "query"},
    )


def test_options_override_the_settings_of_a_directory(directory):
    task = tasks.TextEmbedder.from_pretrained(directory).task
    assert task == SimilarityTask(
        max_seq_length=7,
        pooling="max+cls",
        dense_units=(5,),
        dense_activations=("tanh",),
        normalize=True,
        prompts={"query": "the bill ", "document": ""},
        default_prompt="query",
    )
    changed = {"normalize": False, "prompts": {}, "max_seq_length": 9, "dense_units": (5, 3)}
    model = tasks.TextEmbedder.from_pretrained(directory, **changed)
    assert model.task == dataclasses.replace(
        task, **changed, dense_activations=("tanh", "tanh"), default_prompt=None
    )
    assert model.has_new_head and "dense layers of the embedder" in model.record["origin"]
    embedder = EmbedderSettings().create_embedder(read_pretrained(directory))
    assert embedder.task == task and not embedder.has_new_head
    embedder = EmbedderSettings(max_seq_length=9).create_embedder(read_pretrained(directory))
    assert embedder.task == dataclasses.replace(task, max_seq_length=9)


def test_pairs_have_no_prompt_and_a_wrong_one_names_the_flag(directory, huggingface_dir):
    pretrained, bert = read_pretrained(directory), read_pretrained(huggingface_dir)
    of_pairs = EmbedderSettings().create_embedder(pretrained, num_texts=2)
    assert of_pairs.task.default_prompt is None
    assert tasks.TextEmbedder.from_pretrained(directory, pairs=True).task == of_pairs.task
    prompted = EmbedderSettings(prompt="document").create_embedder(pretrained)
    assert prompted.task.default_prompt == "document"
    for source, num_texts, prompt, message in (
        (pretrained, 2, "query", "'query': expected none with --text_b_column"),
        (pretrained, 1, "x", "'x': expected one of 'query', 'document'"),
        (bert, 1, "query", "'query': expected one of none, since the model has no prompts"),
    ):
        flags = EmbedderSettings(prompt=prompt, max_seq_length=7)
        with pytest.raises(UserError, match=f"^--prompt={message}"):
            flags.create_embedder(source, num_texts)


def test_dense_layers_are_used_for_vectors_of_their_size_only(directory):
    pretrained = read_pretrained(directory)
    task = tasks.TextEmbedder.from_pretrained(directory).task
    for other, size in (({"pooling": "mean"}, 12), ({"layers": "concat_last_4"}, 96)):
        values = dataclasses.replace(task, **other).to_dict()
        assert pretrained.head_for(values) is None  # They are trained anew.
        with pytest.raises(UserError, match=f"dense layers of vectors of {size} numbers, rec.* 24"):
            pretrained.head_for(values, keep=True)
        ((name, value),) = other.items()
        message = f"{name}={value}: the dense layers of .* take vectors of 24 numb.* {size};"
        with pytest.raises(UserError, match=f"^{message}"):
            tasks.TextEmbedder.from_pretrained(directory, **other)
        with pytest.raises(UserError, match=f"^--{message}"):
            EmbedderSettings(**other).create_embedder(pretrained)
    model = tasks.TextEmbedder.from_pretrained(directory, pooling="mean", dense_units=(5,))
    assert model.has_new_head and model.vector_size == 5
    assert pretrained.head_for(dataclasses.replace(task, pooling="mean+cls").to_dict())


def test_an_embedder_that_is_not_supported_is_refused(tmp_path, config, vocabulary):
    pooling = {**st_files.POOLING, "include_prompt": False}
    path = st_files.write(tmp_path / "model", config, vocabulary, pooling=pooling)
    for create in (
        tasks.TextEmbedder.from_pretrained,
        lambda path: EmbedderSettings().create_embedder(read_pretrained(path)),
    ):
        with pytest.raises(UserError, match="include_prompt=False is not supported"):
            create(path)
    assert tasks.TextClassifier.from_pretrained(path, labels=["a", "b"]).labels == ("a", "b")


@pytest.mark.slow
def test_vectors_of_a_directory_have_all_its_modules(directory, tmp_path):
    model = tasks.TextEmbedder.from_pretrained(directory)
    ids = model.tokenize(TEXTS)
    inputs = {name: ids[name] for name in ("input_ids", "input_mask", "segment_ids")}
    assert inputs["input_mask"].sum(axis=1).tolist() == [7, 5, 7, 4]  # With the prompt.
    hidden = np.array(model.encoder(inputs)["sequence"])
    largest = np.where(inputs["input_mask"][:, :, np.newaxis] == 1, hidden, -np.inf).max(axis=1)
    tensors = st_files.dense_tensors(24)
    pooled = np.concatenate([largest, hidden[:, 0]], axis=1)
    dense = np.tanh(pooled @ tensors["linear.weight"].T + tensors["linear.bias"])
    expected = dense / np.linalg.norm(dense, axis=1, keepdims=True)
    vectors = model.predict(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(
        model.similarity(vectors, expected), expected @ expected.T, atol=1e-5
    )
    plain = model.predict(TEXTS, prompt="document")
    assert np.abs(plain - vectors).max() > 0.01
    np.testing.assert_allclose(
        model.predict([f"the bill {text}" for text in TEXTS], prompt="document"), vectors, atol=1e-5
    )
    with pytest.raises(UserError, match="prompt='x': expected one of 'query', 'document'"):
        model.predict(TEXTS, prompt="x")
    columns = {"text_a": TEXTS, "text_b": TEXTS[::-1]}
    scores = model.serving.call("similarity", columns)["score"]
    np.testing.assert_allclose(scores, (expected * expected[::-1]).sum(axis=1), atol=1e-5)
    # A run of it is the same embedder.
    checked_conversion.save_run(read_pretrained(directory), str(tmp_path / "run"))
    loaded = tasks.load_model(tmp_path / "run")
    assert loaded.task == model.task
    np.testing.assert_array_equal(loaded.predict(TEXTS), vectors)
    again = EmbedderSettings().create_embedder(read_pretrained(tmp_path / "run"))
    np.testing.assert_array_equal(again.predict(TEXTS), vectors)


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
    pretrained = read_pretrained(huggingface_dir)
    embedder = EmbedderSettings(max_seq_length=8).create_embedder(pretrained)
    source = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    job = VectorJob(model="", batch_size=4, file_format="npy")
    job.extract(embedder, source, tmp_path / "out.npy", lambda line: None)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), model.predict(TEXTS))


def test_task_json_has_all_fields():
    task = SimilarityTask(max_seq_length=8, layers="concat_last_4", prompts={"query": "find: "})
    assert task_from_dict(json.loads(json.dumps(task.to_dict()))) == task
