"""The public names, creation of an encoder from pretrained weights, and saving with Keras."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import bert_tf
from bert_tf import Encoder, UserError
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.runs.checkpoints import model_variables
from tests import small

NAMES = (
    "AdamW BertConfig Encoder FitSchedule Lamb MODEL_SIZES Tokenizer UserError Vocabulary "
    "WarmupLinearDecay WeightedMean pack read_pretrained to_flat to_padded"
).split()


def test_the_public_names():
    assert bert_tf.__all__ == dir(bert_tf) == NAMES
    assert [getattr(bert_tf, name).__name__ for name in NAMES if name != "MODEL_SIZES"] == [
        name for name in NAMES if name != "MODEL_SIZES"
    ]


@pytest.mark.parametrize("name", ["bert", "mine"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_an_encoder_is_created_from_pretrained_weights(huggingface_dir, config, name, dtype):
    encoder = Encoder.from_pretrained(huggingface_dir, dtype=dtype, name=name)
    assert (encoder.name, encoder.dtype_policy.name, encoder.config) == (name, dtype, config)
    variables = model_variables(encoder)
    for weight, array in small.random_weights(config).items():
        np.testing.assert_array_equal(variables[weight], array, err_msg=weight)


def test_an_encoder_takes_lower_casing_from_its_source_or_the_argument(huggingface_dir, config):
    assert Encoder.from_pretrained(huggingface_dir).config.do_lower_case is True
    cased = Encoder.from_pretrained(huggingface_dir, do_lower_case=False)
    assert cased.config == dataclasses.replace(config, do_lower_case=False)


def test_an_encoder_from_a_directory_without_a_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no model found; expected a run directory"):
        Encoder.from_pretrained(tmp_path)


def test_a_pretrained_encoder_of_token_ids_alone_saves_and_loads(
    huggingface_dir, inputs_BL, tmp_path
):
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, Encoder.from_pretrained(huggingface_dir)(ids)["pooled"])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("bert")) is Encoder
    assert keras.saving.get_registered_name(Encoder) == "bert_tf>Encoder"
    ids_BL = inputs_BL["input_ids"]
    np.testing.assert_array_equal(loaded(ids_BL), model(ids_BL))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "mixed_bfloat16", "recompute": True, "name": "mine"}]
)
def test_a_pretraining_model_saves_and_loads_with_equal_outputs(
    config, inputs_BL, tmp_path, options
):
    model = PretrainingModel(config, **options)
    weights = small.random_weights(config, parts=("bert", "masked_lm", "next_sentence"))
    variables = model_variables(model)
    for name, array in weights.items():
        variables[name].assign(array)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert keras.saving.get_registered_name(type(loaded)) == "bert_tf>PretrainingModel"
    assert loaded.config == config and loaded.get_config() == model.get_config()
    assert (loaded.name, loaded.encoder.recompute, loaded.encoder.dtype_policy.name) == (
        options.get("name", "pretraining"),
        options.get("recompute", False),
        options.get("dtype", "float32"),
    )
    inputs = {**inputs_BL, "masked_lm_positions": tf.constant([[1, 3], [2, 0]])}
    expected, actual = model(inputs), loaded(inputs)
    for name in ("masked_lm", "next_sentence"):
        np.testing.assert_array_equal(actual[name], expected[name])


def test_a_pretraining_model_is_created_from_a_dict(config):
    assert PretrainingModel(config.to_dict()).config == config
