"""Writer of sentence-transformers directories: embedders, and cross-encoders with a head.

Versions from 2 on read the files. Prompts need 2.4, dense layers 3.0.1, and several poolings in an
order of their own 6.

config.json, model.safetensors, tokenizer files    the encoder, as for transformers
modules.json, 1_Pooling, 2_Dense, ...              the modules of an embedder
sentence_bert_config.json                          its maximum length
config_sentence_transformers.json                  its prompts and similarity function
"""

import dataclasses
import pathlib

import numpy as np

from bert_tf.config import read_json_object
from bert_tf.conversion import huggingface_export
from bert_tf.conversion.exported_model import ExportedModel, Written
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.weights import heads
from bert_tf.weights import sentence_transformers as reader

_TYPE = "sentence_transformers.models."
_ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}
_POOLING = {ours: theirs for theirs, ours in reader.POOLING.items()}
# Fields of an embedder that the format has no place for, with the values that it implies.
_IMPLIED = {"layers": "last", "truncation": "head"}


def write(model: ExportedModel, directory: pathlib.Path) -> Written:
    """Write an embedder or a cross-encoder to an empty directory.

    Raises:
        UserError: The model is neither, or the format cannot hold its vectors.
    """
    if model.pretrained.embedder is not None:
        return _write_embedder(model.pretrained, model.pretrained.embedder, directory), []
    if model.kind not in ("classification", "regression", "ranking"):
        raise UserError(
            f"{model.pretrained.source}: sentence-transformers has no such model; expected the "
            "task similarity, classification, regression or ranking. Run: bert-tf finetune "
            "--task=similarity --train=FILE --init_from=PATH --output_dir=RUN, then: bert-tf "
            "convert --from=RUN --to=DIR --format=sentence-transformers"
        )
    return _write_cross_encoder(model, directory)


def _write_embedder(pretrained, settings, directory):
    for name, implied in _IMPLIED.items():
        if settings.get(name, implied) != implied:
            raise UserError(
                f"{name}={settings[name]}: sentence-transformers has {implied!r} only; expected "
                "another --format"
            )
    if len(settings.get("text_columns", ())) > 1:
        raise UserError("text_columns: sentence-transformers has no vectors of pairs of texts")
    weights = {name: array for name, array in pretrained.weights.items() if name[:5] == "bert/"}
    encoder = dataclasses.replace(pretrained, weights=weights, embedder=None)
    tensors, _ = huggingface_export.write(ExportedModel(encoder, None), directory)
    length = {"max_seq_length": settings["max_seq_length"], "do_lower_case": False}
    files.atomic_write_json(directory / reader.ENCODER_CONFIG, length)
    config = {
        "model_type": "SentenceTransformer",
        "prompts": settings.get("prompts", {}),
        "default_prompt_name": settings.get("default_prompt"),
        "similarity_fn_name": settings.get("similarity", "cosine"),
    }
    files.atomic_write_json(directory / reader.CONFIG, config)
    modules = [("", "Transformer")]

    def add(kind, config):
        path = f"{len(modules)}_{kind}"
        (directory / path).mkdir()
        modules.append((path, kind))
        files.atomic_write_json(directory / path / "config.json", config)
        return directory / path

    pools, units = settings.get("pooling", "mean").split("+"), settings.get("dense_units", ())
    size = pretrained.config.hidden_size
    add("Pooling", _pooling(pools, size))
    size *= len(pools)
    for number, activation in enumerate(settings.get("dense_activations", ())):
        config = {
            "in_features": size,
            "out_features": units[number],
            "bias": True,
            "activation_function": _ACTIVATIONS[activation],
        }
        path = add("Dense", config)
        kernel, bias = (pretrained.weights[f"dense_{number}/{part}"] for part in ("kernel", "bias"))
        dense = {"linear.weight": np.ascontiguousarray(kernel.T), "linear.bias": bias}
        huggingface_export.save_tensors(dense, path)
        size = units[number]
    if settings.get("normalize"):
        add("Normalize", {})
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": _TYPE + kind}
        for number, (path, kind) in enumerate(modules)
    ]
    files.atomic_write_json(directory / reader.MODULES, entries)
    for name, array in reader.dense_weights(directory).items():
        if not np.array_equal(array, pretrained.weights[name]):
            raise UserError(f"{directory}: {name} reads back differently; check the disk")
    return tensors


def _pooling(pools, size):
    """Return the configuration of a Pooling module."""
    names = [_POOLING[name] for name in pools]
    if names == [name for name in reader.POOLING if name in names]:
        flags = {f"pooling_mode_{name}_tokens": name in names for name in ("mean", "max")}
        return {
            "word_embedding_dimension": size,
            "pooling_mode_cls_token": "cls" in names,
            **flags,
            "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens" in names,
        }
    return {"embedding_dimension": size, "pooling_mode": names}


def _write_cross_encoder(model, directory):
    task, weights, dropped = model.task, dict(model.pretrained.weights), []
    activation, is_binary = task.get("activation", "identity"), heads.is_binary(task)
    if task["kind"] == "classification":
        activation = "sigmoid" if is_binary or task.get("multi_label") else "identity"
    if is_binary:
        for name in (heads.KERNEL, heads.BIAS):  # The two logits are [-x/2, x/2].
            weights[name] = weights[name][..., 1:] - weights[name][..., :1]
        held = ("max_seq_length=", "text_columns=")
        dropped = [field for field in model.dropped if not field.startswith(held)]
        dropped.append(f"the labels {', '.join(task['labels'])}")
    if is_binary or task["kind"] == "ranking":
        task = {
            "kind": "regression",
            **heads.TEMPLATES["regression"],
            "max_seq_length": task["max_seq_length"],
            "text_columns": ["text_a", "text_b"] if heads.reads_pairs(task) else ["text"],
            "activation": activation,
        }
    pretrained = dataclasses.replace(model.pretrained, weights=weights, task=task)
    tensors, _ = huggingface_export.write(ExportedModel(pretrained, task), directory)
    path, function = directory / "config.json", _ACTIVATIONS[activation]
    entries = {
        "sentence_transformers": {"activation_fn": function},
        "sbert_ce_default_activation_function": function,  # Of versions before 4.
    }
    files.atomic_write_json(path, {**read_json_object(path), **entries})
    return tensors, dropped
