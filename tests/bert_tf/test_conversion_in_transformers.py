"""Converted models in transformers on PyTorch, and the small real BERT in every format.

BERT_TF_TRANSFORMERS_PYTHON names an interpreter with torch and transformers.
"""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, read_pretrained
from bert_tf.weights import name_map
from tests import small
from tests.bert_tf.test_conversion import WORDS_OF_TASKS, converted, fine_tuned, pretrained_run


def assert_equal_in_transformers(path, tolerance=1e-5):
    outputs = json.loads((path / "conversion.json").read_text())["outputs"]
    assert outputs["library"].startswith("transformers ")
    assert outputs["largest_difference"] < tolerance
    assert outputs["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS_OF_TASKS)
def test_a_fine_tuned_model_is_equal_in_transformers(
    tmp_path, config, vocabulary, name, transformers_python
):
    fine_tuned(tmp_path / "run", config, vocabulary, name)
    flags = {"format": "huggingface", "verify_python": transformers_python}
    assert_equal_in_transformers(converted(tmp_path / "run", tmp_path / "out", **flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("bert",),
        ("bert", "masked_lm"),
        ("bert", "next_sentence"),
        ("bert", "masked_lm", "next_sentence"),
    ],
)
def test_a_pretrained_model_is_equal_in_transformers(
    tmp_path, config, vocabulary, parts, transformers_python
):
    tanh = dataclasses.replace(config, hidden_act="gelu_new", layer_norm_eps=1e-6)
    pretrained_run(tmp_path / "run", tanh, vocabulary, parts)
    flags = {"format": "huggingface", "verify_python": transformers_python}
    assert_equal_in_transformers(converted(tmp_path / "run", tmp_path / "out", **flags))


@pytest.mark.slow
def test_a_grown_cased_model_is_equal_in_transformers(
    tmp_path, config, vocabulary, transformers_python
):
    cased = dataclasses.replace(config, do_lower_case=False)
    pretrained_run(tmp_path / "run", cased, vocabulary)
    (tmp_path / "words.txt").write_text("Zürich\nCafé\nMarch\n")
    path = converted(
        tmp_path / "run",
        tmp_path / "out",
        format="huggingface",
        verify_python=transformers_python,
        add_tokens=str(tmp_path / "words.txt"),
        extend_positions=30,
    )
    assert_equal_in_transformers(path)


@pytest.mark.slow
def test_another_tokenizer_in_transformers_is_an_error(
    tmp_path, config, vocabulary, transformers_python, monkeypatch
):
    pretrained_run(tmp_path / "run", config, vocabulary)
    # Words of over 100 characters are unknown there, of over 200 here.
    monkeypatch.setattr("bert_tf.conversion.checked_conversion.TEXTS", ("c" + 110 * "s",))
    with pytest.raises(UserError, match="transformers tokenizes 'css"):
        converted(
            tmp_path / "run",
            tmp_path / "out",
            format="huggingface",
            verify_python=transformers_python,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_small_real_bert_is_equal_in_transformers(
    tmp_path, pretrained_dir, transformers_python
):
    run = converted(pretrained_dir, tmp_path / "run")
    flags = {"format": "huggingface", "verify_python": transformers_python}
    assert_equal_in_transformers(converted(run, tmp_path / "out", **flags))


def test_an_interpreter_without_transformers_is_reported_and_nothing_is_written(
    tmp_path, config, vocabulary
):
    pretrained_run(tmp_path / "run", config, vocabulary)
    with pytest.raises(UserError, match="--verify_python=/bin/false: transformers failed"):
        converted(
            tmp_path / "run", tmp_path / "out", format="huggingface", verify_python="/bin/false"
        )
    with pytest.raises(UserError, match="--verify_python=/none: No such file"):
        converted(tmp_path / "run", tmp_path / "out", format="huggingface", verify_python="/none")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_the_small_real_bert_goes_to_google_and_keras(tmp_path, pretrained_dir):
    run = converted(pretrained_dir, tmp_path / "run")
    weights = read_pretrained(run).weights
    google = converted(run, tmp_path / "google", format="google")
    reader = tf.train.load_checkpoint(str(google / "bert_model.ckpt"))
    for row in name_map.table(read_pretrained(run).config):
        np.testing.assert_array_equal(reader.get_tensor(row.google), weights[row.ours])
    # The model computes the erf form, which keras-hub does not have.
    with pytest.raises(UserError, match="hidden_act is 'gelu', but keras-hub has 'gelu_new' only"):
        converted(run, tmp_path / "keras", format="keras")
    pytest.importorskip("keras_nlp")
    tanh = dataclasses.replace(read_pretrained(run).config, hidden_act="gelu_new")
    small.write_huggingface(tmp_path / "tanh", tanh, read_pretrained(run).vocabulary, weights)
    path = converted(tmp_path / "tanh", tmp_path / "keras", format="keras")
    report = json.loads((path / "conversion.json").read_text())
    assert report["outputs"]["largest_difference"] < 1e-5
