"""Presets of keras-hub, read without it: names of all versions, heads of tasks."""

import dataclasses
import json

import h5py
import ml_dtypes
import numpy as np
import pytest

from bert_tf import BertConfig, Tokenizer, UserError, read_pretrained
from bert_tf.config import strips_accents
from bert_tf.text.vocabulary import SPECIALS
from bert_tf.weights import name_map
from tests import small
from tests.bert_tf.test_head_weights import assert_holds
from tests.conftest import WORDS

FORMER = {
    "layers/": "_layer_checkpoint_dependencies/",
    "layers/reversible_embedding/": "_token_embedding/",
}


def write(
    directory, config, weights, parts=("bert",), task=None, change=lambda name: name, **options
):
    """Write a preset with h5py only; `options` are those of its task."""
    (directory / "assets" / "tokenizer").mkdir(parents=True)
    (directory / "assets" / "tokenizer" / "vocabulary.txt").write_text("\n".join(WORDS) + "\n")
    backbone = {
        "vocabulary_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "hidden_dim": config.hidden_size,
        "intermediate_dim": config.intermediate_size,
        "dropout": 0.2,
        "max_sequence_length": config.max_position_embeddings,
        "num_segments": config.type_vocab_size,
    }
    for name, values in (
        ("config.json", {"class_name": "BertBackbone", "config": backbone}),
        ("tokenizer.json", {"class_name": "BertTokenizer", "config": {"lowercase": True}}),
        ("task.json", {"class_name": task, "config": options}),
    ):
        (directory / name).write_text(json.dumps(values))
    tensors = name_map.export_tensors(config, "keras", weights, parts)
    with h5py.File(directory / "model.weights.h5", "w") as model:
        for name, array in tensors.items():
            if not name.startswith("task/"):
                model[change(name)] = array
    if task:
        with h5py.File(directory / "task.weights.h5", "w") as head:
            head["optimizer/vars/0"] = np.int64(3)
            for name, array in tensors.items():
                if name.startswith("task/"):
                    head[name.removeprefix("task/")] = array
    return tensors


def test_values_in_bfloat16_are_read(tmp_path):
    config = small_config()
    weights = small.random_weights(config)
    write(tmp_path / "preset", config, weights)
    with h5py.File(tmp_path / "preset" / "model.weights.h5", "a") as model:
        for name in name_map.export_tensors(config, "keras", weights, ("bert",)):
            values = model[name][()].astype(ml_dtypes.bfloat16)
            del model[name]
            model[name] = values
            model[name].attrs["dtype"] = "bfloat16"  # As Keras writes it.
    rounded = {
        name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in weights.items()
    }
    assert_holds(read_pretrained(tmp_path / "preset").weights, rounded)


@pytest.mark.parametrize("former", [(), *FORMER.items()])
def test_names_of_all_versions_are_read(tmp_path, former):
    config = small_config(num_hidden_layers=12)
    weights = small.random_weights(config)
    new, old = former or ("", "")
    tensors = write(
        tmp_path / "preset",
        config,
        weights,
        change=lambda name: name.replace(new, old, 1) if former and name.startswith(new) else name,
    )
    kernel = tensors["layers/transformer_encoder_11/_self_attention_layer/query_dense/vars/0"]
    assert kernel.shape == (12, 3, 4)
    pretrained = read_pretrained(tmp_path / "preset")
    assert_holds(pretrained.weights, weights)
    assert set(pretrained.weights) == set(weights)
    assert (pretrained.config.hidden_act, pretrained.config.hidden_dropout_prob) == (
        "gelu_new",
        0.2,
    )
    assert (pretrained.task, pretrained.config.do_lower_case) == (None, True)


def small_config(**changes):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    return BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix_indicator", "@@"), ("special_tokens_in_strings", True), ("split", False)],
)
def test_what_changes_token_ids_is_refused_by_name(tmp_path, name, value):
    config = small_config()
    write(tmp_path / "preset", config, small.random_weights(config))
    path = tmp_path / "preset" / "tokenizer.json"
    usual = {"lowercase": True, "suffix_indicator": "##", "split": True, "special_tokens": None}
    for settings in (usual, {**usual, name: value}):
        path.write_text(json.dumps({"class_name": "BertTokenizer", "config": settings}))
        if settings is usual:
            assert read_pretrained(tmp_path / "preset").config.do_lower_case
    with pytest.raises(UserError, match=f"tokenizer.json: {name}={value!r} is not supported"):
        read_pretrained(tmp_path / "preset")


@pytest.mark.parametrize("name", ["BertTextClassifier", "BertClassifier"])
def test_a_classifier_and_a_masked_language_model_keep_their_heads(tmp_path, config, name):
    parts = ("bert", "classifier")
    weights = small.random_weights(config, parts=parts)  # Two outputs.
    write(tmp_path / "classifier", config, weights, parts, name)
    pretrained = read_pretrained(tmp_path / "classifier", labels=("no", "yes"))
    assert (pretrained.task["kind"], pretrained.task["labels"]) == ("classification", ["no", "yes"])
    kernel = weights["classifier/kernel"]
    np.testing.assert_array_equal(
        pretrained.weights["classifier/kernel"], kernel[:, 1:] - kernel[:, :1]
    )
    assert pretrained.unused_tensors == ("task/optimizer/vars/0",)
    parts = ("bert", "masked_lm")
    weights = small.random_weights(config, parts=parts)
    write(tmp_path / "masked", config, weights, parts, "BertMaskedLM")
    pretrained = read_pretrained(tmp_path / "masked")
    assert (pretrained.heads, pretrained.task) == (("masked_lm",), None)
    assert_holds(pretrained.weights, weights)


@pytest.mark.parametrize(
    ("activation", "is_multi_label"),
    [("sigmoid", True), ("softmax", False), ("linear", False), (None, False)],
)
def test_the_activation_of_a_classifier_says_what_its_outputs_are(
    tmp_path, config, activation, is_multi_label
):
    parts = ("bert", "classifier")
    weights = small.random_weights(config, parts=parts)  # Two outputs.
    write(tmp_path / "preset", config, weights, parts, "BertTextClassifier", activation=activation)
    pretrained = read_pretrained(tmp_path / "preset")
    assert pretrained.task["multi_label"] is is_multi_label
    assert pretrained.weights["classifier/kernel"].shape[1] == 1 + is_multi_label


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lowercase": True}, (True, False)),
        ({"lowercase": True, "strip_accents": False}, (True, False)),
        ({"lowercase": True, "strip_accents": True}, (True, True)),
        ({"lowercase": False, "strip_accents": True}, (False, True)),
        ({}, (False, False)),
    ],
)
def test_a_preset_says_whether_accents_are_stripped(tmp_path, config, settings, expected):
    write(tmp_path / "preset", config, small.random_weights(config))
    values = {"class_name": "BertTokenizer", "config": settings}
    (tmp_path / "preset" / "tokenizer.json").write_text(json.dumps(values))
    read = read_pretrained(tmp_path / "preset").config
    lower, strips = expected
    assert read.do_lower_case is lower and strips_accents(lower, read.strip_accents) is strips


@pytest.mark.medium
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("lower", [True, False])
def test_ids_of_accents_are_those_of_keras_hub(tmp_path, config, lower, strips):
    keras_hub = pytest.importorskip("keras_hub", reason="keras-hub is not installed")
    words = [*SPECIALS, *"cafe café Café angstrom ångström Angstrom Ångström".split()]
    config = dataclasses.replace(config, vocab_size=len(words))
    write(tmp_path / "preset", config, small.random_weights(config))
    theirs = keras_hub.models.BertTokenizer(words, lowercase=lower, strip_accents=strips)
    theirs.save_to_preset(tmp_path / "preset")
    pretrained = read_pretrained(tmp_path / "preset")
    read = pretrained.config
    ours = Tokenizer(pretrained.vocabulary, read.do_lower_case, read.strip_accents)
    text = "café Café Ångström ångström"
    assert ours.tokenize([text]).ids[0].numpy().tolist() == np.asarray(theirs(text)).tolist()


@pytest.mark.parametrize(
    ("preprocessor", "expected"), [({"sequence_length": 9}, 9), ({}, 16), (None, 16)]
)
def test_the_length_is_that_of_the_preprocessor(tmp_path, config, preprocessor, expected):
    """Longer texts would have other predictions than in keras-hub."""
    parts = ("bert", "classifier")
    weights = small.random_weights(config, parts=parts)
    write(tmp_path / "preset", config, weights, parts, "BertTextClassifier")
    values = {"class_name": "BertTextClassifierPreprocessor", "config": preprocessor}
    (tmp_path / "preset" / "preprocessor.json").write_text(json.dumps(values))
    assert config.max_position_embeddings == 16
    assert read_pretrained(tmp_path / "preset").task["max_seq_length"] == expected


def test_a_classifier_with_another_activation_is_no_task(tmp_path, config):
    parts = ("bert", "classifier")
    weights = small.random_weights(config, parts=parts)
    write(tmp_path / "preset", config, weights, parts, "BertTextClassifier", activation="tanh")
    pretrained = read_pretrained(tmp_path / "preset")
    assert pretrained.task is None
    assert "classifier head, problem_type is 'tanh'" in pretrained.origin


def test_a_missing_tensor_another_class_and_a_damaged_file_are_rejected(tmp_path, config):
    weights = small.random_weights(config)
    write(tmp_path / "preset", config, weights)
    with h5py.File(tmp_path / "preset" / "model.weights.h5", "a") as file:
        del file["layers/dense/vars/1"]
    with pytest.raises(UserError, match="1 weights are missing, the first layers/dense/vars/1"):
        read_pretrained(tmp_path / "preset")
    (tmp_path / "preset" / "model.weights.h5").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="model.weights.h5: not a readable HDF5 file"):
        read_pretrained(tmp_path / "preset")
    (tmp_path / "preset" / "config.json").write_text(json.dumps({"class_name": "GPT2Backbone"}))
    with pytest.raises(UserError, match="class_name is 'GPT2Backbone', expected BertBackbone"):
        read_pretrained(tmp_path / "preset")


@pytest.mark.slow
def test_a_classifier_saved_by_keras_nlp_has_its_head(tmp_path):
    keras_nlp = pytest.importorskip("keras_nlp")
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=2,
        num_heads=3,
        hidden_dim=12,
        intermediate_dim=20,
        max_sequence_length=16,
    )
    tokenizer = keras_nlp.models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=12)
    model = keras_nlp.models.BertTextClassifier(backbone, num_classes=3, preprocessor=preprocessor)
    model.save_to_preset(tmp_path / "preset")
    pretrained = read_pretrained(tmp_path / "preset")
    assert pretrained.task["labels"] == ["0", "1", "2"]
    names = {"classifier/kernel": 0, "classifier/bias": 1}
    for name, index in names.items():
        np.testing.assert_array_equal(
            pretrained.weights[name], model.output_dense.weights[index], err_msg=name
        )
