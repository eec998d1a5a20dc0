"""Reads a Hugging Face directory: config.json, model.safetensors, vocab.txt, tokenizer_config.json.

Pickles (pytorch_model.bin) are never opened: opening one runs what it holds.
"""

import struct

import ml_dtypes
import numpy as np
import safetensors

from bert_tf import strict_json
from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import name_map

# Position ids are a constant; heads of other tasks give way to the head of the task at hand.
IGNORED = r"embeddings\.position_ids|cls\..*|classifier\..*|qa_outputs\..*"
# Weights that some of their releases save twice.
_COPIES = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
}
_FLOATS = ("F64", "F32", "F16", "BF16")


def is_directory_of(path):
    return (path / "model.safetensors").is_file() or (path / "pytorch_model.bin").is_file()


def read_config(path):
    """-> (BertConfig, Vocabulary), without the weights."""
    weights_path = path / "model.safetensors"
    if not weights_path.is_file():
        raise UserError(
            f"{path}: holds pytorch_model.bin, a pickle, which is never opened here; save it "
            "once with "
            "save_pretrained(..., safe_serialization=True) and give that directory"
        )
    # Their class' default activation is the erf form; a file without the key means that.
    values = {"hidden_act": "gelu", **read_json_object(path / "config.json")}
    config = BertConfig.from_dict(values, where=str(path / "config.json"))
    tokenizer_path = path / "tokenizer_config.json"
    vocabulary = Vocabulary.load(path / "vocab.txt")
    tokenizer = read_json_object(tokenizer_path) if tokenizer_path.is_file() else {}
    lower = tokenizer.get("do_lower_case")
    config = BertConfig.from_dict(
        {
            **config.to_dict(),
            "do_lower_case": not vocabulary.looks_cased() if lower is None else lower,
            "strip_accents": tokenizer.get("strip_accents"),
        },
        where=str(tokenizer_path),
    )
    vocabulary.check_size(config.vocab_size, where=str(path / "vocab.txt"))
    return config, vocabulary


def read(path):
    """-> (BertConfig, Vocabulary, {our name: array}, names passed over)."""
    config, vocabulary = read_config(path)
    weights_path = path / "model.safetensors"
    tensors = _canonical(read_safetensors(weights_path))
    _drop_copies(tensors, where=str(weights_path))
    weights, unused_tensors = name_map.rename(
        tensors, config, "huggingface", IGNORED, where=str(weights_path)
    )
    return config, vocabulary, weights, unused_tensors


def _canonical(tensors):
    """Without the "bert." of models with a head, and LayerNorm's parts by their newer names."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in tensors.items()
    }


def _drop_copies(tensors, where):
    """Raises UserError if a copy is not what it is a copy of: here the two are one weight."""
    for copy, original in _COPIES.items():
        if copy in tensors and original in tensors:
            if not np.array_equal(tensors.pop(copy), tensors[original]):
                raise UserError(
                    f"{where}: {copy} differs from {original}, wanted the same values, as the two "
                    "are one weight here; tie them and save the model again"
                )


def read_safetensors(path):
    """{name: array} of a .safetensors file, floating-point numbers as float32.

    By hand, as the library's reader lacks bfloat16, and tensor by tensor: what is in memory is the
    result, and one tensor as it is in the file.
    """
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # The library checks that the header is one, and fits the file.
        with open(path, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = strict_json.parse_object(stream.read(size).decode("utf-8"))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                if entry["dtype"] not in _DTYPES:
                    raise UserError(
                        f"{path}: holds tensors of type {entry['dtype']}, wanted one of "
                        f"{', '.join(_DTYPES)}"
                    )
                begin, end = entry["data_offsets"]
                stream.seek(8 + size + begin)
                array = np.frombuffer(stream.read(end - begin), _DTYPES[entry["dtype"]])
                if entry["dtype"] in _FLOATS:
                    array = array.astype(np.float32, copy=False)
                tensors[name] = array.reshape(entry["shape"])
            return tensors
    except (safetensors.SafetensorError, struct.error, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
