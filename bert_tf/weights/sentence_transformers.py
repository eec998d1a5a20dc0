"""Reader of sentence-transformers directories: embedders and cross-encoders of any age.

    modules.json                          modules in their order, with their directories
    config.json, model.safetensors, ...   encoder: in the root, or in the directory of its module
    1_Pooling/config.json, 2_Dense/...    settings and weights of the others
    config_sentence_transformers.json     prompts, similarity function; activation of cross-encoders
    sentence_bert_config.json             maximum length and case, beside the encoder

A setting that changes vectors is honoured or rejected by name. An embedder is described by the
fields of task.json of the task type similarity, a cross-encoder by the activation of its head.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.storage import files, strict_json
from bert_tf.storage.strict_json import field
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import huggingface, tensor_files
from bert_tf.weights.name_map import StoredModel
from bert_tf.weights.tokenizer_files import check_settings, object_in

ENCODERS = ("Transformer", "BERT")
KIND = "similarity"  # Task type of embedders.
MODULES, CONFIG = "modules.json", "config_sentence_transformers.json"
ENCODER_CONFIG = "sentence_bert_config.json"
# Fields of task.json that an embedder's vectors depend on, beside maximum length and columns.
FIELDS = (
    *("layers", "pooling", "dense_units", "dense_activations", "normalize"),
    *("prompts", "default_prompt", "similarity", "truncation"),
)
# Names of pooling there and here, in the order in which versions before 6 concatenate them.
POOLING = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity"}  # Of dense layers.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Settings of a module or encoder, accepted only with the values that we implement.
_OF_POOLING = {"include_prompt": True}
_OF_NORMALIZE = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
_OF_DENSE = {**_OF_NORMALIZE, "use_residual": False}
_OF_ENCODER = {
    "transformer_task": "feature-extraction",
    "modality_config": {
        "text": {"method": "forward", "method_output_name": "last_hidden_state"},
    },
    "module_output_name": "token_embeddings",
    "processing_kwargs": {},
    "tokenizer_name_or_path": None,
    **dict.fromkeys(("query_length", "document_length", "query_expansion")),
}
# Arguments for transformers, by their names in versions before and from 6 on.
_ARGUMENTS: dict[str, Any] = {
    **{f"{name}_args": {} for name in ("config", "model", "tokenizer")},
    **{f"{name}_kwargs": {} for name in ("config", "model", "processor")},
}
# Those of them that leave vectors as they are, but for rounding.
_HARMLESS = {
    *("add_pooling_layer", "attn_implementation", "dtype", "torch_dtype", "trust_remote_code"),
    *("cache_dir", "device_map", "local_files_only", "low_cpu_mem_usage", "revision"),
    *("subfolder", "token", "use_fast", "use_safetensors"),
}
_SEQUENCE = "expected Transformer, Pooling, any number of Dense, and at most one Normalize at last"


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds an embedder."""
    return (path / MODULES).is_file() and _model_type(path) != "CrossEncoder"


def encoder_directory(path: pathlib.Path) -> pathlib.Path:
    """Return the directory of an embedder's encoder, whether or not the modules after it are known.

    Raises:
        UserError: The first module is no encoder.
    """
    if huggingface.is_directory_of(path):
        return path
    kind, directory = next(iter(_listed_modules(path)), ("none", path))
    if kind not in ENCODERS:
        raise UserError(f"{path / MODULES}: the first module is {kind:.80}; {_SEQUENCE}")
    return directory


def read_config(path: pathlib.Path) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary of the encoder; see `huggingface.read_config`."""
    return huggingface.read_config(encoder_directory(path))


def read(path: pathlib.Path) -> StoredModel:
    """Read the encoder. Raise `UserError` if a file is invalid."""
    return huggingface.read(encoder_directory(path))


def settings_of(path: pathlib.Path) -> dict[str, Any]:
    """Return the settings of an embedder, as in task.json.

    Returns:
        "kind" and `FIELDS`, without "layers" and "truncation", which sentence-transformers does not
        have. "max_seq_length" is there if the directory limits it.

    Raises:
        UserError: A setting is invalid or cannot be honoured.
    """
    modules = _modules(path)
    encoder, pooling = modules[0][1], modules[1][1]
    dense = [_dense_config(where) for kind, where in modules if kind == "Dense"]
    if modules[-1][0] == "Normalize":
        file = modules[-1][1] / "config.json"
        check_settings(object_in(file), _OF_NORMALIZE, file, "vectors")
    settings = {
        "kind": KIND,
        "pooling": _pooling(read_json_object(pooling / "config.json"), pooling),
        "dense_units": [field(values, "out_features", int, where) for values, where in dense],
        "dense_activations": [_dense_activation(values, where) for values, where in dense],
        "normalize": modules[-1][0] == "Normalize",
        **_of_model(path),
    }
    length = _encoder_settings(encoder, _OF_ENCODER, "vectors").get("max_seq_length")
    if length is not None and (type(length) is not int or length < 4):
        raise UserError(
            f"{encoder / ENCODER_CONFIG}: max_seq_length={length!r:.40}: expected an integer >= 4"
        )
    return settings if length is None else {**settings, "max_seq_length": length}


def _encoder_settings(directory, required, changed):
    """Return the settings beside an encoder, checked; `changed` is what others would change."""
    file = directory / ENCODER_CONFIG
    values = object_in(file)
    for name, arguments in values.items():
        if name in _ARGUMENTS and isinstance(arguments, dict):
            values[name] = {key: arguments[key] for key in arguments.keys() - _HARMLESS}
    check_settings(values, {**required, **_ARGUMENTS}, file, changed)
    return values


def dense_weights(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the weights of an embedder's dense layers, by our names: dense_0/kernel `(in, out)`.

    Raises:
        UserError: A file is missing or invalid, or a shape is not that of the settings.
    """
    weights: dict[str, np.ndarray] = {}
    directories = [where for kind, where in _modules(path) if kind == "Dense"]
    for number, directory in enumerate(directories):
        values, where = _dense_config(directory)
        size, units = (field(values, name, int, where) for name in ("in_features", "out_features"))
        tensors = _tensors(directory)
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (units, size)}
        if values.get("bias", True):
            shapes["linear.bias"] = (units,)
        found = {name: array.shape for name, array in tensors.items()}
        if found != shapes:
            raise UserError(
                f"{directory}: tensors do not match config.json. Expected: {shapes}. "
                f"Received: {found}"
            )
        kernel = np.asarray(tensors["linear.weight"], np.float32).T
        weights[f"dense_{number}/kernel"] = np.ascontiguousarray(kernel)
        weights[f"dense_{number}/bias"] = np.asarray(
            tensors.get("linear.bias", np.zeros(units)), np.float32
        )
    return weights


def dense_names(settings: Mapping[str, Any]) -> list[str]:
    """Return our names of the weights of an embedder's dense layers."""
    return [
        f"dense_{number}/{part}"
        for number in range(len(settings.get("dense_units", ())))
        for part in ("kernel", "bias")
    ]


def pooled_size(config: BertConfig, layers: str, pooling: str) -> int:
    """Return the size of an embedder's vectors before dense layers, from its settings."""
    num_layers = 4 if layers == "concat_last_4" else 1
    return config.hidden_size * num_layers * len(pooling.split("+"))


def match_dense(
    source: Mapping[str, Any] | None,
    weights: Mapping[str, np.ndarray],
    task: Mapping[str, Any],
    config: BertConfig,
) -> dict[str, np.ndarray]:
    """Return the weights of an embedder's dense layers for another embedder.

    `source` are the settings of the embedder, or `None`, and `task` those of the other one, as in
    task.json. `weights` are arrays by our names. Both have the encoder of `config`.

    Raises:
        UserError: Its dense layers are others; the message says which.
    """
    theirs, ours = (
        list(zip(of.get("dense_units", ()), of.get("dense_activations", ()), strict=False))
        for of in (source or {}, task)
    )
    if ours != theirs:
        raise UserError(
            f"expected dense layers with (units, activation) {ours or 'none'}, received "
            f"{theirs or 'none'}"
        )
    if source and theirs:
        size, expected = (pooled_size(config, of["layers"], of["pooling"]) for of in (source, task))
        if size != expected:
            raise UserError(
                f"expected dense layers of vectors of {expected} numbers, received those of {size}"
            )
    return {name: weights[name] for name in dense_names(task)}


def head_activation(path: pathlib.Path, values: Mapping[str, Any]) -> str | None:
    """Return the activation of a cross-encoder, or `None` if the directory holds none.

    It is "sigmoid", "identity", or the name of another one in lower case. `values` are those of
    config.json, where versions before 6 have it.

    Raises:
        UserError: A setting or module of the cross-encoder changes its scores and cannot be
            honoured.
    """
    settings = object_in(path / CONFIG) if _model_type(path) == "CrossEncoder" else {}
    if settings:
        check_settings(settings, {"default_prompt_name": None}, path / CONFIG, "scores")
        _encoder_settings(path, {"processing_kwargs": {}}, "scores")
        kinds = [kind for kind, _ in _listed_modules(path)] if (path / MODULES).is_file() else []
        if others := kinds[1:]:
            raise UserError(
                f"{path / MODULES}: module {', '.join(others):.200} is not supported; expected a "
                "cross-encoder of one Transformer, whose model has the head"
            )
    entry = values.get("sentence_transformers")
    found = [
        settings.get("activation_fn"),
        entry.get("activation_fn") if isinstance(entry, dict) else None,
        values.get("sbert_ce_default_activation_function"),
    ]
    name = next((str(one) for one in found if one is not None), None)
    # Such as torch.nn.modules.activation.Sigmoid.
    return None if name is None else name.rpartition(".")[2].lower()


def _model_type(path):
    """Return the class of the model in versions from 5 on, otherwise `None`."""
    return object_in(path / CONFIG).get("model_type") if path.is_dir() else None


def _modules(path):
    """Return (kind, directory) of each module that computes something in inference, checked."""
    file, model_type = path / MODULES, _model_type(path)
    if model_type not in (None, "SentenceTransformer"):
        raise UserError(
            f"{path / CONFIG}: model_type is {model_type!r:.80}; expected SentenceTransformer or "
            "CrossEncoder"
        )
    modules = [(kind, where) for kind, where in _listed_modules(path) if kind != "Dropout"]
    kinds = ["Transformer" if kind in ENCODERS else kind for kind, _ in modules]
    known = {"Transformer", "Pooling", "Dense", "Normalize"}
    if unknown := sorted(set(kinds) - known):
        raise UserError(f"{file}: module {', '.join(unknown):.200} is not supported; {_SEQUENCE}")
    inner = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(inner) - {"Dense"}:
        raise UserError(f"{file}: modules are {', '.join(kinds) or 'none'}; {_SEQUENCE}")
    return list(zip(kinds, (where for _, where in modules), strict=True))


def _listed_modules(path):
    """Return (last name of the type, directory) of each module."""
    file = path / MODULES
    try:
        entries = strict_json.parse(files.read_text(file))
        found = [(str(entry["type"]), str(entry["path"]), entry.get("kwargs")) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: expected a list of modules with type and path: {error}") from None
    modules = []
    for name, directory, options in found:
        if not name.startswith("sentence_transformers."):
            raise UserError(f"{file}: module {name!r:.80} is code of the model, which is not run")
        if options:
            raise UserError(f"{file}: module {name:.80}: kwargs are not supported")
        relative = pathlib.PurePosixPath(directory)
        if relative.is_absolute() or ".." in relative.parts or "\\" in directory:
            raise UserError(f"{file}: path {directory!r:.80}: expected one inside of {path}")
        modules.append((name.rpartition(".")[2], path / directory))
    return modules


def _pooling(values, directory):
    """Return the field "pooling" of the configuration of a Pooling module."""
    where = directory / "config.json"
    check_settings(values, _OF_POOLING, where, "vectors")
    names = values.get("pooling_mode")
    if names is None:
        names = [name for key, name in _OLD_POOLING.items() if values.get(key)] or ["mean"]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not set(map(str, names)) <= set(POOLING):
        raise UserError(
            f"{where}: pooling {names!r:.80} is not supported; expected {', '.join(POOLING)}"
        )
    return "+".join(POOLING[name] for name in names)


def _dense_config(directory):
    """Return the configuration of a Dense module, and its path."""
    where = directory / "config.json"
    values = read_json_object(where)
    check_settings(values, _OF_DENSE, where, "vectors")
    return values, str(where)


def _dense_activation(values, where):
    name = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UserError(
            f"{where}: activation_function {name!r:.80} is not supported; expected one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _tensors(directory):
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).is_file():
            return tensor_files.read(directory / name)
    raise UserError(f"{directory}: expected model.safetensors or pytorch_model.bin")


def _of_model(path):
    """Return the fields that are in the configuration of the model."""
    where = path / CONFIG
    values = object_in(where)
    check_settings(values, {"truncate_dim": None}, where, "vectors")
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{where}: prompts: expected texts by name")
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UserError(f"{where}: default_prompt_name={default!r:.80}: expected one of prompts")
    if default is not None:
        # encode_query and encode_document put nothing before a text if they find no prompt.
        prompts.setdefault("query", "")
        if not {"passage", "corpus"} & prompts.keys():
            prompts.setdefault("document", "")
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise UserError(
            f"{where}: similarity_fn_name={similarity!r:.80}: expected one of "
            f"{', '.join(SIMILARITIES)}"
        )
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity}
