"""A valid file of each format of pretrained weights and tokenizers, as in tests/fuzzed.py."""

from bert_tf.config import BertConfig
from tests.huggingface_files import (
    tokenizer_json,
    write_json,
    write_tensorflow_h5,
    write_torch_old,
    write_torch_zip,
)
from tests.rows import CONFIG, WORDS


def _model(directory):
    """Write configuration and vocabulary; return tensors by their names at Hugging Face."""
    import numpy as np

    from bert_tf.text.vocabulary import Vocabulary
    from bert_tf.weights import name_map

    config = BertConfig(**CONFIG)
    write_json(directory / "config.json", {**CONFIG, "model_type": "bert"})
    Vocabulary(WORDS).save(directory / "vocab.txt")
    return {
        row.huggingface: np.ones(shape[::-1] if row.ours.endswith("kernel") else shape, "f4")
        for row, shape in zip(
            name_map.table(config), name_map.weight_shapes(config).values(), strict=True
        )
    }


def _read(path):
    from bert_tf.weights.sources import read_pretrained

    return len(read_pretrained(path.parent).weights)


def _save(tensors, path):
    import safetensors.numpy

    safetensors.numpy.save_file(tensors, path)
    return path


def safetensors_file(directory):
    return _save(_model(directory), directory / "model.safetensors"), _read


def index(directory):
    tensors = _model(directory)
    halves = [dict(list(tensors.items())[begin::2]) for begin in (0, 1)]
    weight_map = {}
    for number, half in enumerate(halves):
        name = _save(half, directory / f"model-{number}.safetensors").name
        weight_map |= dict.fromkeys(half, name)
    path = directory / "model.safetensors.index.json"
    return write_json(path, {"metadata": {}, "weight_map": weight_map}), _read


def torch_zip(directory):
    path = directory / "pytorch_model.bin"
    write_torch_zip(path, _model(directory))
    return path, _read


def torch_old(directory):
    path = directory / "pytorch_model.bin"
    write_torch_old(path, _model(directory))
    return path, _read


def tensorflow_h5(directory):
    path = directory / "tf_model.h5"
    write_tensorflow_h5(path, _model(directory))
    return path, _read


def _without_vocab_txt(directory):
    from bert_tf.text.vocabulary import Vocabulary

    _save(_model(directory), directory / "model.safetensors")
    (directory / "vocab.txt").unlink()
    return write_json(directory / "tokenizer.json", tokenizer_json(Vocabulary(WORDS)))


def tokenizer(directory):
    return _without_vocab_txt(directory), _read


def tokenizer_config(directory):
    _without_vocab_txt(directory)
    values = {
        "do_lower_case": True,
        "strip_accents": None,
        "tokenizer_class": "BertTokenizer",
        "unk_token": {"content": "[UNK]", "lstrip": False},
        "added_tokens_decoder": {"4": {"content": "[MASK]"}},
        "additional_special_tokens": ["[CLS]"],
    }
    return write_json(directory / "tokenizer_config.json", values), _read


FORMATS = {
    "safetensors": safetensors_file,
    "safetensors index": index,
    "PyTorch zip": torch_zip,
    "PyTorch before 1.6": torch_old,
    "tf_model.h5": tensorflow_h5,
    "tokenizer.json": tokenizer,
    "tokenizer_config.json": tokenizer_config,
}
