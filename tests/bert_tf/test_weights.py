"""Pretrained weights: complete name tables, rejected files and equal activations."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from bert_tf import BertConfig, Encoder, UserError, Vocabulary, read_pretrained
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from bert_tf.weights import google, name_map
from tests import reference, small
from tests.conftest import WORDS


def edit(directory, change):
    """Rewrite model.safetensors after change(tensors)."""
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def test_a_hugging_face_directory_has_every_weight(huggingface_dir, config):
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.config == dataclasses.replace(config, strip_accents=None)
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(pretrained.weights[name], array)


def test_every_variable_of_the_encoder_is_in_the_table_with_its_shape(config):
    encoder = Encoder(config)
    encoder.build()
    shapes = {
        name: tuple(variable.shape)
        for name, variable in model_variables(encoder).items()
        if "seed" not in name
    }
    assert shapes == name_map.weight_shapes(config)


def test_old_names_bfloat16_other_heads_and_position_ids_are_read(huggingface_dir, config):
    def change(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[old] = tensors.pop(name).astype(ml_dtypes.bfloat16)
        tensors["classifier.weight"] = np.zeros((3, 12), np.float32)
        tensors["classifier.bias"] = np.zeros(3, np.float32)
        tensors["bert.embeddings.position_ids"] = np.arange(16)[None]

    edit(huggingface_dir, change)
    pretrained = read_pretrained(huggingface_dir)
    assert (
        "not used: classifier head, architectures is BertModel; expected one of "
        in pretrained.origin
    )
    assert pretrained.origin.endswith(", embeddings.position_ids)")
    for name, array in small.random_weights(config).items():
        np.testing.assert_array_equal(
            pretrained.weights[name], array.astype(ml_dtypes.bfloat16).astype(np.float32)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.bias"),
            "1 weights are missing, the first encoder.layer.1.output.dense.bias",
        ),
        (
            lambda tensors: tensors.update(
                {"bert.encoder.layer.2.output.dense.bias": np.zeros(12, np.float32)}
            ),
            "1 unknown tensors, the first encoder.layer.2.output.dense.bias",
        ),
        (
            lambda tensors: tensors.update(
                {"bert.pooler.dense.weight": np.zeros((12, 13), np.float32)}
            ),
            r"pooler.dense.weight: shape mismatch. Expected: \(12, 12\). Received: \(12, 13\)",
        ),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_reported(huggingface_dir, change, message):
    edit(huggingface_dir, change)
    with pytest.raises(UserError, match=message):
        read_pretrained(huggingface_dir)


def test_a_vocabulary_of_the_wrong_size_is_rejected(huggingface_dir):
    Vocabulary([*WORDS, "more"]).save(huggingface_dir / "vocab.txt")
    with pytest.raises(
        UserError, match="vocab.txt: 30 entries, but the configuration's vocab_size is 29"
    ):
        read_pretrained(huggingface_dir)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:50],
        lambda data: data[:-100],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: b"",
    ],
)
def test_a_damaged_safetensors_file_is_reported(huggingface_dir, damage):
    path = huggingface_dir / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        read_pretrained(huggingface_dir)


def test_the_case_comes_from_the_flag_else_the_tokenizer_else_the_vocabulary(huggingface_dir):
    assert read_pretrained(huggingface_dir).config.do_lower_case is True
    assert read_pretrained(huggingface_dir, do_lower_case=False).config.do_lower_case is False
    (huggingface_dir / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert read_pretrained(huggingface_dir).config.do_lower_case is False
    (huggingface_dir / "tokenizer_config.json").unlink()
    assert read_pretrained(huggingface_dir).config.do_lower_case is True
    Vocabulary([*WORDS[:-1], "The"]).save(huggingface_dir / "vocab.txt")
    assert read_pretrained(huggingface_dir).config.do_lower_case is False


def test_missing_settings_of_a_hugging_face_directory_have_the_defaults_of_its_classes(
    huggingface_dir,
):
    values = json.loads((huggingface_dir / "config.json").read_text())
    del values["hidden_act"]
    (huggingface_dir / "config.json").write_text(json.dumps(values))
    (huggingface_dir / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": None}))
    config = read_pretrained(huggingface_dir).config
    assert (config.hidden_act, config.do_lower_case) == ("gelu", True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("empty", "no model found; expected a run directory"), ("a/b", "no such directory")],
)
def test_a_path_without_a_model_is_rejected(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        read_pretrained(tmp_path / name)


def test_a_saved_run_has_the_same_weights(huggingface_dir, tmp_path):
    pretrained = read_pretrained(huggingface_dir)
    pretrained.save(tmp_path / "run")
    again = read_pretrained(tmp_path / "run")
    assert (again.config, again.vocabulary.lines) == (
        pretrained.config,
        pretrained.vocabulary.lines,
    )
    for name, array in pretrained.weights.items():
        np.testing.assert_array_equal(again.weights[name], array)
    assert Run.open(tmp_path / "run").train["origin"] == pretrained.origin
    with pytest.raises(UserError, match="contains other files; name a new directory"):
        pretrained.save(tmp_path / "run")


def test_a_keras_nlp_preset_directory_has_equal_activations(tmp_path, inputs_BL):
    keras_nlp = pytest.importorskip("keras_nlp")
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=2,
        num_heads=3,
        hidden_dim=12,
        intermediate_dim=20,
        max_sequence_length=16,
    )
    backbone.save_to_preset(tmp_path / "preset")
    keras_nlp.models.BertTokenizer(vocabulary=WORDS, lowercase=True).save_to_preset(
        tmp_path / "preset"
    )
    pretrained = read_pretrained(tmp_path / "preset")
    assert (pretrained.config.hidden_act, pretrained.config.do_lower_case) == ("gelu_new", True)
    assert pretrained.vocabulary.entries == tuple(WORDS)
    encoder = Encoder(pretrained.config)
    encoder.build()
    pretrained.assign_to(encoder)
    expected = backbone(
        {
            "token_ids": inputs_BL["input_ids"],
            "padding_mask": inputs_BL["input_mask"],
            "segment_ids": inputs_BL["segment_ids"],
        }
    )
    reference.assert_equal(encoder(inputs_BL)["pooled"], expected["pooled_output"].numpy(), 2)


def test_a_preset_that_cannot_be_loaded_is_reported_in_one_line():
    with pytest.raises(UserError, match="keras-hub cannot load this preset"):
        read_pretrained("bert_no_such_preset")


def test_a_google_release_is_read(data_dir):
    directory = data_dir / "checkpoints" / "tf1_ckpt_tiny"
    pretrained = read_pretrained(directory)
    reader = tf.train.load_checkpoint(str(directory / "bert_model.ckpt"))
    assert pretrained.config.hidden_act == "gelu_new"
    np.testing.assert_array_equal(
        pretrained.weights["bert/layer_1/attention/key/kernel"],
        reader.get_tensor("bert/encoder/layer_1/attention/self/key/kernel"),
    )


def test_the_name_table_covers_a_real_release_and_a_missing_data_file_is_reported(
    data_dir, tmp_path
):
    directory = data_dir / "checkpoints" / "tf1_ckpt_chinese_L12_indexonly"
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "vocab.txt").write_bytes(
        (data_dir / "vocab" / "chinese" / "vocab.txt").read_bytes()
    )
    reader = tf.train.load_checkpoint(str(directory / "bert_model.ckpt"))
    config = BertConfig.load(directory / "bert_config.json")
    shapes = reader.get_variable_to_shape_map()
    zeros = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    vocabulary = Vocabulary.load(tmp_path / "vocab.txt")
    weights, unused_tensors = name_map.rename(
        name_map.StoredModel(config, vocabulary, zeros, "google", google.IGNORED, "release")
    )
    assert unused_tensors == []
    assert len(weights) == len(shapes) == 206
    assert {name.split("/")[0] for name in weights} == set(name_map.COMPONENTS)
    with pytest.raises(UserError, match="bert_model.ckpt: not a readable TensorFlow checkpoint"):
        read_pretrained(tmp_path)


def test_the_real_small_bert_is_read_completely(pretrained_dir):
    pretrained = read_pretrained(pretrained_dir)
    config, vocabulary = pretrained.config, pretrained.vocabulary
    assert (config.num_hidden_layers, config.hidden_size, config.hidden_act, len(vocabulary)) == (
        6,
        384,
        "gelu",
        30522,
    )
    assert pretrained.unused_tensors == ("embeddings.position_ids",)
    assert sum(array.size for array in pretrained.weights.values()) == 22_713_216
