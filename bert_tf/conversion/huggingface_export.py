"""Writer of Hugging Face directories, as transformers loads them without a warning.

config.json               sizes, class of the model, labels
model.safetensors         exactly the tensors of the class
vocab.txt, tokenizer.json, tokenizer_config.json, special_tokens_map.json
"""

import json
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy

from bert_tf.config import TOKENIZER_SETTINGS, BertConfig
from bert_tf.conversion.exported_model import ExportedModel
from bert_tf.text.vocabulary import SPECIALS, Vocabulary

WEIGHTS = "model.safetensors"
# Classes of transformers by task type, and by the pretraining heads that the model has.
_TASK_CLASSES = {
    "classification": "BertForSequenceClassification",
    "regression": "BertForSequenceClassification",
    "tagging": "BertForTokenClassification",
    "span_qa": "BertForQuestionAnswering",
    "multiple_choice": "BertForMultipleChoice",
}
_PRETRAINING_CLASSES = {
    (): "BertModel",
    ("masked_lm",): "BertForMaskedLM",
    ("next_sentence",): "BertForNextSentencePrediction",
    ("masked_lm", "next_sentence"): "BertForPreTraining",
}
_BERT_TOKENIZER_CHARACTERS = 100  # max_input_chars_per_word of BertTokenizer, whatever files say.
_WITHOUT_POOLER = ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering")


def class_name(model: ExportedModel) -> str:
    """Return the name of the model's class in transformers."""
    if model.head is not None:
        return _TASK_CLASSES[model.head.kind]
    return _PRETRAINING_CLASSES[model.pretraining_heads]


def write(model: ExportedModel, directory: pathlib.Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write a model.

    Args:
        model: The model.
        directory: Empty directory.

    Returns:
        Tensors by name, as written, and descriptions of what the format does not hold.
    """
    name = class_name(model)
    has_head = name != "BertModel"
    heads = (model.head.part,) if model.head else model.pretraining_heads
    tensors = {
        # Only models with a head have the prefix.
        f"bert.{theirs}" if has_head and _is_of_encoder(theirs) else theirs: array
        for theirs, array in model.tensors("huggingface", ("bert", *heads)).items()
        if not (theirs.startswith("pooler.") and name in _WITHOUT_POOLER)
    }
    safetensors.numpy.save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(model, name))
    _write_tokenizer(model, directory)
    dropped = [f"the pooler, which {name} does not have"] if name in _WITHOUT_POOLER else []
    return tensors, dropped + ([] if model.head else model.dropped)


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Read back all tensors by name."""
    return safetensors.numpy.load_file(directory / WEIGHTS)


def _is_of_encoder(name):
    return name.startswith(("embeddings.", "encoder.", "pooler."))


def _config(model, name):
    config, vocabulary = model.pretrained.config, model.pretrained.vocabulary
    return {
        "architectures": [name],
        "model_type": "bert",
        **encoder_values(config),
        "pad_token_id": vocabulary["[PAD]"],
        **model.config_values(),
    }


def encoder_values(config: BertConfig) -> dict[str, Any]:
    """Return the configuration of the encoder without the settings of the tokenizer."""
    values = config.to_dict()
    for name in TOKENIZER_SETTINGS:
        del values[name]
    # transformers accepts no integer for these.
    return values | {
        name: float(values[name])
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "initializer_range",
            "layer_norm_eps",
        )
    }


def _write_tokenizer(model, directory):
    config, vocabulary = model.pretrained.config, model.pretrained.vocabulary
    (directory / "vocab.txt").write_bytes(vocabulary.to_bytes())
    specials = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
    normalizer = {
        "strip_accents": config.strip_accents,
        "tokenize_chinese_chars": True,
        "do_lower_case": config.do_lower_case,
    }
    length = model.max_seq_length or config.max_position_embeddings
    tokenizer_class: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
    if config.max_input_chars_per_word != _BERT_TOKENIZER_CHARACTERS:
        # The class without a constant of its own, which takes all settings from tokenizer.json.
        tokenizer_class = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
    _write_json(
        directory / "tokenizer_config.json",
        {
            **tokenizer_class,
            **normalizer,
            "model_max_length": length,
            **specials,
        },
    )
    _write_json(directory / "special_tokens_map.json", specials)
    _write_json(directory / "tokenizer.json", tokenizer(config, vocabulary))


def tokenizer(config: BertConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json."""

    def special(name, type_id):
        return {"SpecialToken": {"id": name, "type_id": type_id}}

    def sequence(name, type_id):
        return {"Sequence": {"id": name, "type_id": type_id}}

    first = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary[name],
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name in sorted(SPECIALS, key=vocabulary.__getitem__)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": config.strip_accents,
            "lowercase": config.do_lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, sequence("B", 1), special("[SEP]", 1)],
            "special_tokens": {
                name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]}
                for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": config.max_input_chars_per_word,
            # Unlike Google, transformers strips line ends only.
            "vocab": {line: number for number, line in enumerate(vocabulary.lines)},
        },
    }


def _write_json(path, values):
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
