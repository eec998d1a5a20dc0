"""Writer of Hugging Face directories, as transformers loads them without a warning.

config.json               sizes, class of the model, labels
model.safetensors         exactly the tensors of the class
vocab.txt, tokenizer.json, tokenizer_config.json, special_tokens_map.json
"""

import pathlib
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bert_tf.config import TOKENIZER_SETTINGS, BertConfig
from bert_tf.conversion.exported_model import ExportedModel, Written
from bert_tf.storage import files
from bert_tf.text.vocabulary import SPECIALS
from bert_tf.weights import tokenizer_files
from bert_tf.weights.heads import CLASSES
from bert_tf.weights.name_map import WITH_POOLER

# Classes of transformers by the pretraining heads that the model has.
_PRETRAINING_CLASSES = {
    (): "BertModel",
    ("masked_lm",): "BertForMaskedLM",
    ("next_sentence",): "BertForNextSentencePrediction",
    ("masked_lm", "next_sentence"): "BertForPreTraining",
}


def class_name(model: ExportedModel) -> str:
    """Return the name of the model's class in transformers."""
    return CLASSES[model.kind] if model.kind else _PRETRAINING_CLASSES[model.heads]


def write(model: ExportedModel, directory: pathlib.Path) -> Written:
    """Write a model to an empty directory."""
    name = class_name(model)
    has_head = name != "BertModel"
    has_pooler = name in WITH_POOLER or not has_head
    tensors = {
        theirs: array
        for theirs, array in model.tensors("huggingface", ("bert", *model.heads)).items()
        if has_pooler or not theirs.startswith("pooler.")
    }
    # Only models with a head have the prefix.
    of_encoder = ("embeddings.", "encoder.", "pooler.") if has_head else ()
    written = {
        f"bert.{theirs}" if theirs.startswith(of_encoder) else theirs: array
        for theirs, array in tensors.items()
    }
    save_tensors(written, directory)
    files.atomic_write_json(directory / "config.json", _config(model, name))
    _write_tokenizer(model, directory)
    dropped = [] if has_pooler else [f"the pooler, which {name} does not have"]
    return tensors, dropped + ([] if model.kind else model.dropped)


def save_tensors(tensors: dict[str, np.ndarray], directory: pathlib.Path) -> None:
    """Write model.safetensors in a directory, as readable as other new files."""
    path = directory / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # The library replaces the file by one that only its owner can read.


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
    vocabulary.save(directory / "vocab.txt")
    normalizer = {
        "strip_accents": config.strip_accents,
        "tokenize_chinese_chars": True,
        "do_lower_case": config.do_lower_case,
    }
    task = model.pretrained.task
    length = task["max_seq_length"] if task else config.max_position_embeddings
    tokenizer_class: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
    if config.max_input_chars_per_word != tokenizer_files.MAX_INPUT_CHARS_PER_WORD:
        # The class without a constant of its own, which takes all settings from tokenizer.json.
        tokenizer_class = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
    files.atomic_write_json(
        directory / "tokenizer_config.json",
        {
            **tokenizer_class,
            **normalizer,
            "model_max_length": length,
            **tokenizer_files.SPECIAL_TOKENS,
        },
    )
    files.atomic_write_json(directory / "special_tokens_map.json", tokenizer_files.SPECIAL_TOKENS)
    text = _tokenizer(config, vocabulary).to_str(pretty=True)
    files.atomic_write_text(directory / "tokenizer.json", text)


def _tokenizer(config, vocabulary):
    """Return BERT's tokenizer as the library of tokenizer.json has it."""
    # Unlike Google, transformers strips line ends only.
    entries = {line: number for number, line in enumerate(vocabulary.lines)}
    limit = config.max_input_chars_per_word
    model = models.WordPiece(entries, unk_token="[UNK]", max_input_chars_per_word=limit)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        strip_accents=config.strip_accents, lowercase=config.do_lower_case
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer
