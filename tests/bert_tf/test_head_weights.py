"""Weights of the pretraining heads: loaded completely or not at all, with a report if unused."""

import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Encoder, UserError, convert, read_pretrained
from bert_tf.config import TOKENIZER_SETTINGS
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.runs.checkpoints import model_variables
from bert_tf.runs.run import Run
from bert_tf.weights import name_map
from tests import small
from tests.bert_tf.test_pretraining import heads
from tests.bert_tf.test_weights import edit

MASKED_LM = {
    "cls.predictions.transform.dense.weight": "masked_lm/transform/kernel",
    "cls.predictions.transform.dense.bias": "masked_lm/transform/bias",
    "cls.predictions.transform.LayerNorm.weight": "masked_lm/LayerNorm/gamma",
    "cls.predictions.transform.LayerNorm.bias": "masked_lm/LayerNorm/beta",
    "cls.predictions.bias": "masked_lm/output_bias",
}
NEXT_SENTENCE = {
    "cls.seq_relationship.weight": "next_sentence/output_weights",
    "cls.seq_relationship.bias": "next_sentence/output_bias",
}


def add_heads(directory, config, *tables, **more):
    """Add heads, {Hugging Face name: our name}, and further tensors to a Hugging Face directory."""
    weights = heads(config)

    def change(tensors):
        for table in tables:
            for theirs, ours in table.items():
                array = weights[ours]
                is_kernel = ours.endswith("kernel")
                tensors[theirs] = np.ascontiguousarray(array.T if is_kernel else array)
        for name, array in more.items():
            tensors[name] = array(tensors) if callable(array) else array

    edit(directory, change)
    return weights


def built(config):
    model = PretrainingModel(config)
    return model, {name: variable.numpy() for name, variable in model_variables(model).items()}


def assert_holds(variables, weights):
    for name, array in weights.items():
        np.testing.assert_array_equal(variables[name], array, err_msg=name)


def test_every_variable_of_the_pretraining_model_is_in_the_table_with_its_shape(config):
    _, variables = built(config)
    shapes = {name: array.shape for name, array in variables.items() if "seed" not in name}
    assert shapes == {
        name: shape
        for part in name_map.COMPONENTS
        for name, shape in name_map.weight_shapes(config, part).items()
    }


def test_both_heads_are_read_from_a_hugging_face_directory(huggingface_dir, config):
    weights = add_heads(
        huggingface_dir,
        config,
        MASKED_LM,
        NEXT_SENTENCE,
        **{
            "cls.predictions.decoder.weight": lambda tensors: tensors[
                "bert.embeddings.word_embeddings.weight"
            ],
            "cls.predictions.decoder.bias": lambda tensors: tensors["cls.predictions.bias"],
        },
    )
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.heads == ("masked_lm", "next_sentence")
    model, _ = built(config)
    pretrained.assign_to(model)
    assert_holds(model_variables(model), {**small.random_weights(config), **weights})
    assert pretrained.origin == pretrained.origin_in(model) == "Hugging Face directory huggingface"


def test_one_head_is_loaded_and_the_other_keeps_its_initial_values(huggingface_dir, config):
    weights = add_heads(huggingface_dir, config, MASKED_LM)
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.heads == ("masked_lm",)
    model, before = built(config)
    pretrained.assign_to(model)
    for name, variable in model_variables(model).items():
        if name.startswith("next_sentence/"):
            np.testing.assert_array_equal(variable, before[name], err_msg=name)
        elif name.startswith("masked_lm/"):
            np.testing.assert_array_equal(variable, weights[name], err_msg=name)


def test_an_encoder_loads_no_head_and_the_origin_records_it(huggingface_dir, config):
    add_heads(huggingface_dir, config, MASKED_LM, NEXT_SENTENCE)
    pretrained = read_pretrained(huggingface_dir)
    encoder = Encoder(config)
    encoder.build()
    pretrained.assign_to(encoder)
    assert_holds(model_variables(encoder), small.random_weights(config))
    assert pretrained.origin_in(encoder) == (
        "Hugging Face directory huggingface (not used: masked_lm head, next_sentence head)"
    )


def without(table, name):
    return {theirs: ours for theirs, ours in table.items() if theirs != name}


@pytest.mark.parametrize(
    ("tables", "more", "message"),
    [
        (
            [without(MASKED_LM, "cls.predictions.transform.LayerNorm.bias"), NEXT_SENTENCE],
            {},
            r"model.safetensors: 1 weights are missing, the first "
            r"cls.predictions.transform.LayerNorm.bias; expected a complete masked_lm head or none",
        ),
        (
            [without(NEXT_SENTENCE, "cls.seq_relationship.bias")],
            {},
            "1 weights are missing, the first cls.seq_relationship.bias; expected a complete",
        ),
        (
            [NEXT_SENTENCE],
            {"cls.seq_relationship.weight": np.zeros((12, 2), np.float32)},
            r"cls.seq_relationship.weight: shape mismatch. Expected: \(2, 12\). "
            r"Received: \(12, 2\)",
        ),
        (
            [MASKED_LM],
            {"cls.predictions.decoder.weight": np.zeros((29, 12), np.float32)},
            "cls.predictions.decoder.weight differs from embeddings.word_embeddings.weight",
        ),
        (
            [MASKED_LM],
            {"cls.predictions.decoder.bias": np.zeros(29, np.float32)},
            "cls.predictions.decoder.bias differs from cls.predictions.bias; expected equal",
        ),
    ],
)
def test_an_incomplete_misshapen_or_untied_head_is_rejected(
    huggingface_dir, config, tables, more, message
):
    add_heads(huggingface_dir, config, *tables, **more)
    with pytest.raises(UserError, match=message) as caught:
        read_pretrained(huggingface_dir)
    assert "\n" not in str(caught.value)


def test_both_heads_are_read_from_a_google_release(tmp_path, config, vocabulary):
    theirs = {
        "masked_lm/transform/kernel": "cls/predictions/transform/dense/kernel",
        "masked_lm/transform/bias": "cls/predictions/transform/dense/bias",
        "masked_lm/LayerNorm/gamma": "cls/predictions/transform/LayerNorm/gamma",
        "masked_lm/LayerNorm/beta": "cls/predictions/transform/LayerNorm/beta",
        "masked_lm/output_bias": "cls/predictions/output_bias",
        "next_sentence/output_weights": "cls/seq_relationship/output_weights",
        "next_sentence/output_bias": "cls/seq_relationship/output_bias",
    }
    weights, encoder = heads(config), small.random_weights(config)
    tensors = {theirs[name]: array for name, array in weights.items()}
    tensors |= {row.google: encoder[row.ours] for row in name_map.table(config)}
    tensors["cls/predictions/output_bias/adam_m"] = np.zeros(29, np.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "bert_model.ckpt"),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    values = {
        key: value for key, value in config.to_dict().items() if key not in TOKENIZER_SETTINGS
    }
    (tmp_path / "bert_config.json").write_text(json.dumps(values))
    vocabulary.save(tmp_path / "vocab.txt")
    pretrained = read_pretrained(tmp_path)
    assert pretrained.heads == ("masked_lm", "next_sentence")
    assert_holds(pretrained.weights, {**encoder, **weights})
    assert pretrained.origin.endswith("(not used: cls/predictions/output_bias/adam_m)")


def test_a_converted_run_keeps_the_heads(huggingface_dir, config, tmp_path, capsys):
    weights = add_heads(huggingface_dir, config, MASKED_LM, NEXT_SENTENCE)
    convert.main(convert.ConvertSettings(str(huggingface_dir), str(tmp_path / "run")))
    assert capsys.readouterr().err.endswith("heads: masked_lm, next_sentence\n")
    again = read_pretrained(tmp_path / "run")
    assert again.heads == ("masked_lm", "next_sentence")
    assert_holds(again.weights, {**small.random_weights(config), **weights})


def test_a_run_with_an_incomplete_head_is_rejected(config, vocabulary, tmp_path):
    weights = small.random_weights(config, parts=name_map.COMPONENTS)
    del weights["masked_lm/output_bias"]
    run = Run.create(tmp_path / "run", config, vocabulary, train={})
    run.checkpoints.save(0, weights)
    with pytest.raises(
        UserError, match="step-00000000: 1 weights are missing, the first masked_lm/output_bias"
    ):
        read_pretrained(tmp_path / "run")


def test_without_heads_in_the_source_the_initial_values_stay(huggingface_dir, config):
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.heads == ()
    model, before = built(config)
    pretrained.assign_to(model)
    for name, variable in model_variables(model).items():
        if name.startswith(name_map.HEADS):
            np.testing.assert_array_equal(variable, before[name], err_msg=name)
