"""Reader of keras-hub BERT presets.

A directory is read without keras_nlp. It is needed for the names of published presets.
"""

import pathlib
import tempfile
from typing import Any

import numpy as np

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.storage.strict_json import field
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import tensor_files
from bert_tf.weights.name_map import StoredModel
from bert_tf.weights.tokenizer_files import check_settings, object_in

IGNORED = r".*seed_generator.*|(task/)?(optimizer|_optimizer)/.*|task/backbone/.*"
WEIGHTS, TASK_WEIGHTS = "model.weights.h5", "task.weights.h5"
VOCABULARY = pathlib.PurePath("assets", "tokenizer", "vocabulary.txt")
# Names of layers in files of earlier versions.
_FORMER = {
    "_layer_checkpoint_dependencies/": "layers/",
    "_token_embedding/": "layers/reversible_embedding/",
    "layers/token_embedding/": "layers/reversible_embedding/",
}
# Settings of a tokenizer, accepted only with the values that we implement.
_REQUIRED_SETTINGS = {
    "split": True,
    "split_on_cjk": True,
    "suffix_indicator": "##",
    "oov_token": "[UNK]",
    "special_tokens_in_strings": False,
}
# keras-hub counts bytes. The two differ for words with non-ASCII characters only.
MAX_INPUT_CHARS_PER_WORD = 100
# Sizes in the configuration of a backbone, by field of `BertConfig`.
BACKBONE_KEYS = {
    "vocab_size": "vocabulary_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "hidden_dim",
    "intermediate_size": "intermediate_dim",
}
_CLASSIFIERS = ("BertTextClassifier", "BertClassifier")  # The second before keras-nlp 0.14.
# What the outputs of a classifier are, in the terms of Hugging Face, by its activation. Losses of
# Keras take logits or probabilities, so that "linear" says nothing.
_PROBLEM_TYPES = {"linear": None, "softmax": None, "sigmoid": "multi_label_classification"}


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds a keras-hub preset."""
    return (path / WEIGHTS).is_file() and (path / "config.json").is_file()


def max_seq_length(preset: pathlib.Path) -> Any:
    """Return the length of the preprocessor that the task of a preset was saved with, if any."""
    values = object_in(preset / "preprocessor.json").get("config")
    return values.get("sequence_length") if isinstance(values, dict) else None


def read_config(preset: pathlib.Path | str) -> tuple[BertConfig, Vocabulary] | None:
    """Read configuration and vocabulary without the weights; `None` for the name of a preset.

    The backbone's GELU is the tanh form. Its tokenizer keeps accents, also of lower-cased text,
    unless the preset strips them.

    Raises:
        UserError: A file is missing or invalid, or it is not a BERT backbone.
    """
    if isinstance(preset, str):
        return None
    path = preset / "config.json"
    values = read_json_object(path)
    if values.get("class_name") != "BertBackbone":
        raise UserError(
            f"{path}: class_name is {values.get('class_name')!r:.80}, expected BertBackbone"
        )
    backbone = field(values, "config", dict, str(path))
    tokenizer_path = preset / "tokenizer.json"
    tokenizer = field(read_json_object(tokenizer_path), "config", dict, str(tokenizer_path))
    check_settings(tokenizer, _REQUIRED_SETTINGS, tokenizer_path)
    dropout, lower = backbone.get("dropout", 0.1), tokenizer.get("lowercase", False)
    strips = tokenizer.get("strip_accents", False)
    sizes = {name: field(backbone, key, int, str(path)) for name, key in BACKBONE_KEYS.items()}
    config = BertConfig.from_dict(
        {
            **sizes,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "max_position_embeddings": backbone.get("max_sequence_length", 512),
            "type_vocab_size": backbone.get("num_segments", 2),
            "do_lower_case": lower,
            "strip_accents": None if strips == lower else strips,  # None follows the case.
            "max_input_chars_per_word": MAX_INPUT_CHARS_PER_WORD,
        },
        where=str(path),
    )
    vocabulary = Vocabulary.load(preset / VOCABULARY)
    vocabulary.check_size(config.vocab_size, where=str(preset / VOCABULARY))
    return config, vocabulary


def read(preset: pathlib.Path | str) -> StoredModel:
    """Read a preset, a directory or the name of a published one, with the head of its task if any.

    Raises:
        UserError: A file is invalid, keras-hub cannot load the name, or it is not a BERT backbone.
    """
    if isinstance(preset, str):
        with tempfile.TemporaryDirectory() as directory:
            _save_published(preset, pathlib.Path(directory))
            return read(pathlib.Path(directory))._replace(where=preset)
    found = read_config(preset)
    assert found is not None  # Since this is a directory.
    tensors = _read_tensors(preset / WEIGHTS)
    values: dict[str, Any] = {}
    if (preset / TASK_WEIGHTS).is_file():
        head = _read_tensors(preset / TASK_WEIGHTS)
        tensors |= {f"task/{name}": array for name, array in head.items()}
        task = read_json_object(preset / "task.json")
        if task.get("class_name") in _CLASSIFIERS:
            # The names of the labels are not in the preset.
            count = np.size(head.get("layers/dense/vars/1", ()))
            values = {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {str(number): str(number) for number in range(count)},
                "problem_type": _problem_type(task),
            }
    return StoredModel(*found, tensors, "keras", IGNORED, str(preset / WEIGHTS), values)


def _problem_type(task):
    """Return the problem type that the activation in task.json implies; its name if unknown."""
    options = task.get("config")
    name = options.get("activation") if isinstance(options, dict) else None
    name = "linear" if name is None else str(name)
    return _PROBLEM_TYPES.get(name, name)


def _read_tensors(path):
    """Read a file and rename the layers of earlier versions."""
    tensors = {}
    for name, array in tensor_files.read_h5(path, kinds="fiu").items():
        for former, new in _FORMER.items():
            if name.startswith(former):
                name = new + name.removeprefix(former)
        tensors[name] = array
    return tensors


def _save_published(preset, directory):
    """Write a published preset, which keras-hub downloads, to a directory."""
    # Imported here because keras-nlp is an optional dependency and slow to import.
    import keras_nlp

    try:
        keras_nlp.models.BertBackbone.from_preset(preset).save_to_preset(directory)
        keras_nlp.models.BertTokenizer.from_preset(preset).save_to_preset(directory)
    except Exception as error:  # The library, Kaggle and the network raise many types of errors.
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{preset}: no such directory, and keras-hub cannot load this preset: "
            f"{type(error).__name__}: {reason:.300}"
        ) from None
