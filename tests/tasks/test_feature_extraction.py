"""Feature vectors in files: each option against the encoder by hand, order, bad rows."""

import dataclasses
import io
import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Encoder, UserError
from bert_tf.storage import files
from bert_tf.weights.sources import read_pretrained
from tasks.extract import ExtractSettings
from tasks.prediction.outputs import EmbedderSettings, VectorJob, write_array
from tasks.types.similarity.embedding_model import LAYERS
from tests import small

TEXTS = ["the bill is too high", "the", "", "my app does not open ! the app", "the screen"]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def config(config):
    """Return a configuration with two layers."""
    return dataclasses.replace(config, num_hidden_layers=2)


@pytest.fixture
def pretrained(tmp_path, config, vocabulary):
    """Write a model of five layers, so that the last four are not all of them."""
    config = dataclasses.replace(config, num_hidden_layers=5)
    return read_pretrained(small.write_huggingface(tmp_path / "five", config, vocabulary))


@pytest.fixture
def shallow(tmp_path, config, vocabulary):
    """Write a model of one layer, for what does not depend on layers."""
    config = dataclasses.replace(config, num_hidden_layers=1)
    return read_pretrained(small.write_huggingface(tmp_path / "one", config, vocabulary))


@pytest.fixture
def encoder(pretrained):
    encoder = Encoder(pretrained.config)
    encoder.build()
    pretrained.assign_to(encoder)
    return encoder


def by_hand(encoder, ids, segment_ids, layers, pooling):
    """Compute one text at a time in NumPy."""
    inputs = {"input_ids": [ids], "input_mask": [[1] * len(ids)], "segment_ids": [segment_ids]}
    inputs = {name: np.array(values, np.int32) for name, values in inputs.items()}
    outputs = [
        np.array(output)[0]
        for output in encoder(inputs, output_hidden_states=True)["hidden_states"]
    ]
    assert len(outputs) == 6  # Including the output of the embeddings.
    vectors = {
        "last": outputs[5],
        "second_to_last": outputs[4],
        "sum_last_4": outputs[2] + outputs[3] + outputs[4] + outputs[5],
        "concat_last_4": np.concatenate(outputs[2:], axis=1),
    }[layers]
    return vectors[0] if pooling == "cls" else vectors.mean(axis=0)


def test_layers_are_added_in_float32():
    """bfloat16 has 8 bits: there 256 + 1 is 256."""
    outputs = [tf.constant([value], tf.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    assert LAYERS["sum_last_4"][1](outputs).numpy().tolist() == [259.0]


def run(embedder, source, output, **options):
    job = VectorJob(**{"model": "", "batch_size": 2, "file_format": "npy", **options})
    return job.extract(embedder, source, output, lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "pooling"), [*((name, "mean") for name in LAYERS), ("last", "cls")]
)
def test_each_option_equals_the_encoder(pretrained, encoder, vocabulary, tmp_path, layers, pooling):
    flags = EmbedderSettings(layers=layers, pooling=pooling, max_seq_length=8)
    embedder = flags.create_embedder(pretrained)
    source = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    assert run(embedder, source, tmp_path / "out.npy") == (5, 0)
    vectors = np.load(tmp_path / "out.npy")
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, 48 if layers == "concat_last_4" else 12)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = [CLS, *[vocabulary[word] for word in text.split()][:6], SEP]
        expected = by_hand(encoder, ids, [0] * len(ids), layers, pooling)
        np.testing.assert_allclose(vector, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.slow
def test_a_pair_has_two_segments(pretrained, encoder, vocabulary, tmp_path):
    embedder = EmbedderSettings(max_seq_length=16).create_embedder(pretrained, num_texts=2)
    source = small.write_rows(tmp_path / "rows.csv", [("the bill", "my app")], ("first", "second"))
    run(embedder, source, tmp_path / "out.npy", columns=("first", "second"))
    ids = [CLS, *(vocabulary[w] for w in ("the", "bill")), SEP, vocabulary["my"], vocabulary["app"]]
    expected = by_hand(encoder, [*ids, SEP], [0] * 4 + [1] * 3, "last", "mean")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy")[0], expected, atol=1e-5)


@pytest.mark.medium
def test_lines_keep_their_order_in_any_batch_and_bad_rows_their_position(shallow, tmp_path):
    embedder = EmbedderSettings(max_seq_length=16).create_embedder(shallow)
    source = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": text}) for text in TEXTS]
    source.write_text("\n".join([rows[0], '{"words": "x"}', "not JSON", *rows[1:]]))
    small.write_rows(tmp_path / "good.csv", [(text, "x") for text in TEXTS])
    run(embedder, tmp_path / "good.csv", tmp_path / "good.npy", batch_size=64)
    for batch_size in (1, 2, 64):
        output = tmp_path / "out.jsonl"
        assert run(embedder, source, output, batch_size=batch_size) == (7, 2)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        vectors = [line["vector"] for line in lines if "vector" in line]
        np.testing.assert_allclose(vectors, np.load(tmp_path / "good.npy"), atol=1e-5)
        assert [list(line) for line in lines[:4]] == [["vector"], ["error"], ["error"], ["vector"]]
        assert "rows.jsonl:2: no column 'text'" in lines[1]["error"]
    with pytest.raises(UserError, match="rows.jsonl:2: no column 'text'"):
        run(embedder, source, tmp_path / "bad.npy")
    assert not (tmp_path / "bad.npy").exists()


@pytest.mark.medium
def test_vectors_per_token_average_to_those_of_the_text(pretrained, encoder, vocabulary, tmp_path):
    embedder = EmbedderSettings(max_seq_length=8).create_embedder(pretrained)
    source = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    output = tmp_path / "out.jsonl"
    assert run(embedder, source, output, per_token=True) == (5, 0)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    expected = embedder.predict(TEXTS)
    for text, line, vector in zip(TEXTS, lines, expected, strict=True):
        assert line["tokens"] == ["[CLS]", *text.split()[:6], "[SEP]"]
        assert np.shape(line["vectors"]) == (len(line["tokens"]), 12)
        np.testing.assert_allclose(np.mean(line["vectors"], axis=0), vector, atol=1e-5)
    ids = [CLS, vocabulary["the"], SEP]
    first = by_hand(encoder, ids, [0] * 3, "last", "cls")
    np.testing.assert_allclose(lines[1]["vectors"][0], first, atol=1e-5)


@pytest.mark.slow
def test_vectors_are_written_to_a_remote_path(pretrained, tmp_path):
    embedder = EmbedderSettings(max_seq_length=16).create_embedder(pretrained)
    source = small.write_rows(tmp_path / "rows.csv", [(text, "x") for text in TEXTS])
    for output in (tmp_path / "out.npy", "ram://extraction/out.npy"):
        run(embedder, source, output)
    with files.open_file("ram://extraction/out.npy") as stream:
        assert stream.readall() == (tmp_path / "out.npy").read_bytes()


@pytest.mark.parametrize(
    ("layers", "length", "texts", "message"),
    [
        ("sum_last_4", 16, 1, "--layers=sum_last_4: requires 4 layers, .* has 2"),
        ("last", 17, 1, "--max_seq_length: requires 17 positions, .* has 16"),
        ("last", 16, 3, "--text_b_column: requires 3 segments, .* has 2"),
    ],
)
def test_layers_that_do_not_exist_are_reported_in_one_line(
    huggingface_dir, layers, length, texts, message
):
    flags = EmbedderSettings(layers=layers, pooling="cls", max_seq_length=length)
    with pytest.raises(UserError, match=message):
        flags.create_embedder(read_pretrained(huggingface_dir), texts)


def test_wrong_settings_are_reported_with_the_flag(complaints, tmp_path):
    good = {"model": "x", "input": str(complaints["dev"]), "output": str(tmp_path / "out.npy")}
    ExtractSettings(**good)
    for changes, message in (
        ({"input": "absent.csv"}, "--input=absent.csv: no such file"),
        ({"output": "out.txt"}, "--output=out.txt: expected a .npy or .jsonl file"),
        ({"output": "absent/out.npy"}, "--output=absent/out.npy: expected a file in an existing"),
        ({"max_seq_length": 3}, "--max_seq_length=3: expected an integer >= 4"),
        ({"per_token": True}, "expected a .jsonl file with --per_token"),
    ):
        with pytest.raises(UserError, match=message):
            ExtractSettings(**{**good, **changes})


@pytest.mark.slow
def test_the_command_writes_vectors(huggingface_dir, complaints, run_command, tmp_path):
    flags = [
        f"--model={huggingface_dir}",
        f"--input={complaints['dev']}",
        "--max_seq_length=16",
        "--layers=second_to_last",
        "--pooling=cls",
    ]
    done = run_command("tasks.extract", *flags, f"--output={tmp_path / 'out.npy'}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "out.npy: 9 rows of 12 numbers" in done.stderr
    assert np.load(tmp_path / "out.npy").shape == (9, 12)


def test_an_array_of_another_number_of_rows_is_refused():
    with pytest.raises(UserError, match="read 1 rows, expected 2: the input was changed; rerun"):
        write_array(io.BytesIO(), [(None, {"vector": [1.0]})], 2)
