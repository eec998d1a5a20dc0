"""Directories of sentence-transformers, written without it."""

import json

import numpy as np
import safetensors.numpy

from tests import small
from tests.huggingface_files import write_torch_zip

LONG = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
POOLING = {"embedding_dimension": 12, "pooling_mode": "mean", "include_prompt": True}
OLD_POOLING = {
    "word_embedding_dimension": 12,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
DENSE = {
    "in_features": 12,
    "out_features": 5,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
MODEL = {
    "__version__": {"sentence_transformers": "6.2.0"},
    "model_type": "SentenceTransformer",
    "prompts": {"query": "the bill ", "document": ""},
    "default_prompt_name": None,
    "similarity_fn_name": "cosine",
}


def dense_tensors(size=12, units=5, seed=0):
    """Return the tensors of a Dense module."""
    rng = np.random.default_rng(seed)
    return {
        "linear.weight": rng.normal(size=(units, size)).astype(np.float32),
        "linear.bias": rng.normal(size=units).astype(np.float32),
    }


def write_json(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def write(
    directory,
    config,
    vocabulary,
    *,
    kinds=("Transformer", "Pooling"),
    pooling=POOLING,
    dense=DENSE,
    normalize=None,
    tensors=None,
    encoder=None,
    model=MODEL,
    names=LONG,
    first="",
    is_pickle=False,
):
    """Write an embedder.

    Args:
        directory: Directory to create.
        config: Configuration of the encoder.
        vocabulary: Vocabulary of the encoder.
        kinds: Modules.
        pooling: Configuration of Pooling.
        dense: Configuration of Dense.
        normalize: Configuration of Normalize, or None for no file.
        tensors: Tensors of Dense.
        encoder: Content of sentence_bert_config.json, or None for no file.
        model: Content of config_sentence_transformers.json, or None for no file.
        names: Types by module, as in modules.json.
        first: Directory of the encoder.
        is_pickle: Whether the weights of Dense are a pytorch_model.bin.
    """
    small.write_huggingface(directory / first, config, vocabulary)
    modules = []
    for number, kind in enumerate(kinds):
        path = f"{number}_{kind}" if number else first
        modules.append({"idx": number, "name": str(number), "path": path, "type": names[kind]})
        if kind == "Pooling":
            write_json(directory / path / "config.json", pooling)
        elif kind == "Normalize" and normalize is not None:
            write_json(directory / path / "config.json", normalize)
        elif kind == "Dense":
            write_json(directory / path / "config.json", dense)
            arrays = dense_tensors() if tensors is None else tensors
            if is_pickle:
                write_torch_zip(directory / path / "pytorch_model.bin", arrays)
            else:
                safetensors.numpy.save_file(arrays, directory / path / "model.safetensors")
    write_json(directory / "modules.json", modules)
    if encoder is not None:
        write_json(directory / first / "sentence_bert_config.json", encoder)
    if model is not None:
        write_json(directory / "config_sentence_transformers.json", model)
    return directory
