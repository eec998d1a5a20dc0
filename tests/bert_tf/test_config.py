"""The configuration: accepted keys, rejected values and published model sizes."""

import json

import pytest

from bert_tf import MODEL_SIZES, BertConfig, UserError
from bert_tf.config import FIXED_KEYS, IGNORED_KEYS
from bert_tf.weights import name_map

PUBLISHED = {
    "tiny": 4_385_920,
    "mini": 11_170_560,
    "small": 28_763_648,
    "medium": 41_373_184,
    "base": 109_482_240,
    "large": 335_141_888,
}


@pytest.mark.parametrize("model_size", PUBLISHED)
def test_model_sizes_have_the_published_number_of_parameters(model_size):
    total = 0
    for shape in name_map.weight_shapes(MODEL_SIZES[model_size]).values():
        size = 1
        for axis in shape:
            size *= axis
        total += size
    assert total == PUBLISHED[model_size]


def test_gelu_is_tanh_in_google_files_and_erf_elsewhere(tmp_path):
    for name, expected in (("bert_config.json", "gelu_new"), ("config.json", "gelu")):
        (tmp_path / name).write_text(json.dumps({"vocab_size": 11, "hidden_act": "gelu"}))
        assert BertConfig.load(tmp_path / name).hidden_act == expected


def test_irrelevant_keys_are_ignored_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "vocab_size": 11,
                "model_type": "bert",
                "pooler_fc_size": 9,
                "directionality": "bidi",
                "torch_dtype": "float32",
                "id2label": {"0": "a"},
                "position_embedding_type": "absolute",
                "hidden_size": 24,
            }
        )
    )
    config = BertConfig.load(path)
    assert (config.vocab_size, config.hidden_size, config.layer_norm_eps) == (11, 24, 1e-12)
    assert BertConfig.from_dict(config.to_dict()) == config


def test_keys_of_released_transformers_are_ignored():
    assert IGNORED_KEYS >= {
        *("_attn_implementation_autoset", "transformers.js_config", "unsloth_fixed"),
        *("pretraining_tp", "summary_type", "label_smoothing"),
    }


@pytest.mark.parametrize("name", sorted(IGNORED_KEYS))
def test_each_key_without_an_effect_is_ignored(name):
    expected = BertConfig(vocab_size=11)
    value = "bert" if name == "model_type" else 0.1
    assert BertConfig.from_dict({"vocab_size": 11, name: value}) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(({"unknown": value}, {}) for value in (None, False, {}, [])),
        *(({name: fixed.value}, {}) for name, fixed in FIXED_KEYS.items()),
        *(({name: None}, {}) for name in FIXED_KEYS),
        ({"vocab_size_or_config_json_file": 11}, {}),
        ({"hidden_size": 24, "embedding_size": 24}, {"hidden_size": 24}),
        ({"hidden_act": "gelu_python"}, {"hidden_act": "gelu"}),
        *(
            ({"hidden_act": name}, {"hidden_act": "gelu_new"})
            for name in ("gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh", "gelu_fast")
        ),
    ],
)
def test_neutral_values_and_other_names_are_accepted(values, expected):
    found = BertConfig.from_dict({"vocab_size": 11, **values})
    assert found == BertConfig(vocab_size=11, **expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hiden_size": 3}, "unknown key hiden_size"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_act": "gelu_10"}, "hidden_act is 'gelu_10'"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act is \\['gelu'\\]"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads={'0': \\[1\\]} is not supported"),
        ({"hidden_size": 24, "embedding_size": 12}, "embedding_size=12 is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map=.* is not supported .*code of its own"),
        ({"use_rope": True}, "use_rope=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ({"vocab_size_or_config_json_file": 12}, "two sizes of the vocabulary"),
        ({"hidden_size": 10}, "hidden_size is 10; expected a multiple of"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
        ({"do_lower_case": "false"}, "do_lower_case='false'"),
        ({"strip_accents": "no"}, "strip_accents='no'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        ({"initializer_range": float("inf")}, "initializer_range is inf"),
        ({"initializer_range": True}, "initializer_range is True"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob is nan"),
        ({"strip_accents": 0}, "strip_accents=0"),
        ({"hidden_size": 12 * 10**11}, "hidden_size 1200000000000 .* parameters; expected at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 .* expected at most 1000"),
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
    ],
)
def test_invalid_values_are_rejected_by_name(values, message):
    with pytest.raises(UserError, match=message):
        BertConfig.from_dict({"vocab_size": 11, **values})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object, received list"),
        ("{}", "vocab_size is missing"),
        ('{"vocab_size": 11, "layer_norm_eps": NaN}', "NaN is not a JSON number"),
        ('{"vocab_size": 11, "layer_norm_eps": 1e999}', "the number 1e999 is too large"),
        ('{"vocab_size": %s}' % ("1" * 5_000), "the number 1111.* is too large"),
        ('{"vocab_size": 1%s}' % ("0" * 100), r"configuration: vocab_size is 1e\+100"),
        ('{"vocab_size": ' + "[" * 90_000, "over 100 levels"),
        ('{"vocab_size": ' + "[" * 100 + "]" * 100 + "}", "over 100 levels"),
        ('{"vocab_size": 11, "vocab_size": 12}', "an object has the key 'vocab_size' twice"),
        (r'{"vocab_size": 11, "name": "\ud800"}', "contains half of a surrogate pair"),
        (" " * (64 << 20) + "{}", "67108866 bytes; expected a JSON object of at most 67108864"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_configuration_is_reported(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UserError, match=f"config.json: {message}") as raised:
        BertConfig.load(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_a_configuration_of_google_splits_words_of_200_characters():
    """It has no key for that; Hugging Face directories are read in test_tokenizer_files.py."""
    values = BertConfig(vocab_size=11).to_dict()
    del values["max_input_chars_per_word"]
    assert BertConfig.from_dict(values).max_input_chars_per_word == 200
