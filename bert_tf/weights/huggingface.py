"""Reader of Hugging Face directories: config, safetensors, vocab.txt and tokenizer config.

Pickles (pytorch_model.bin) are never opened, because unpickling runs arbitrary code.
"""

import os
import pathlib

import ml_dtypes  # noqa: F401  Registers bfloat16 with numpy, which safetensors needs.
import numpy as np
import safetensors

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights.name_map import StoredModel

# Position ids are a constant; task heads are initialized anew for the current task.
IGNORED = r"embeddings\.position_ids|cls\..*|classifier\..*|qa_outputs\..*"
# Tied weights that some releases save twice.
_COPIES = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_FLOATS = ("F64", "F32", "F16", "BF16")


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds a PyTorch model of Hugging Face."""
    return (path / "model.safetensors").is_file() or (path / "pytorch_model.bin").is_file()


def read_config(path: pathlib.Path) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary without the weights.

    Args:
        path: Directory.

    Raises:
        UserError: A file is missing or invalid, or the two do not fit together.
    """
    weights_path = path / "model.safetensors"
    if not weights_path.is_file():
        raise UserError(
            f"{path}: holds pytorch_model.bin, a pickle, which is never opened; expected "
            "model.safetensors. Save the model again with save_pretrained(..., "
            "safe_serialization=True)."
        )
    # Hugging Face's default is the erf form, so a config without the key means "gelu".
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


def read(path: pathlib.Path) -> StoredModel:
    """Read a model. Raise `UserError` if a file is invalid."""
    config, vocabulary = read_config(path)
    where = str(path / "model.safetensors")
    tensors = _canonical(read_safetensors(where))
    _drop_copies(tensors, where)
    return StoredModel(config, vocabulary, tensors, "huggingface", IGNORED, where)


def _canonical(tensors):
    """Remove the "bert." prefix of models with a head and rename gamma and beta of old releases."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in tensors.items()
    }


def _drop_copies(tensors, where):
    """Remove copies of tied weights, which are one weight here.

    Raises:
        UserError: A copy differs from its original.
    """
    for copy, original in _COPIES.items():
        if copy in tensors and original in tensors:
            if not np.array_equal(tensors.pop(copy), tensors[original]):
                raise UserError(
                    f"{where}: {copy} differs from {original}; expected equal values, because "
                    "they are one weight here; tie them and save the model again"
                )


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read all tensors of a .safetensors file.

    Tensors are read and converted one by one, so memory holds the result and a single unconverted
    tensor.

    Args:
        path: Local file.

    Returns:
        Dict from tensor names to arrays; floating-point tensors become float32.

    Raises:
        UserError: The file is damaged or has a tensor of an unsupported dtype.
    """
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as stored:
            for name in stored.keys():
                dtype = stored.get_slice(name).get_dtype()
                if dtype not in (*_FLOATS, "I64"):
                    raise UserError(
                        f"{path}: holds a tensor of dtype {dtype}; expected one of "
                        f"{', '.join(_FLOATS)}, I64"
                    )
                array = stored.get_tensor(name)
                tensors[name] = array.astype(np.float32, copy=False) if dtype in _FLOATS else array
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    return tensors
