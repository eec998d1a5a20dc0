"""Reader of Hugging Face directories: configuration, tokenizer and weights of any age.

huggingface_hub downloads a model of the hub to such a directory, in its cache.

The weights are in PyTorch or TensorFlow files, and in one file or several. All get the names and
the orientation of PyTorch.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping

import numpy as np

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.storage.strict_json import field
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import tensor_files, tokenizer_files
from bert_tf.weights.name_map import KINDS, StoredModel

# Position ids are a constant; task heads are initialized anew for the current task.
IGNORED = r"embeddings\.position_ids|cls\..*|classifier\..*|qa_outputs\..*"
# Tied weights that some releases save twice, or only under this name.
_COPIES = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OF_ENCODER = "embeddings.position_embeddings.weight"  # A tensor that every encoder has once.
_INDEX = ".index.json"
# Of a model of the hub, perhaps with a revision: a branch, a tag or a commit.
_ID = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w./-]*))?")
_PRESET = re.compile(r"bert_\w+")  # Name of a preset of keras-hub.
# Files of a model of the hub that are read beside its weights. Modules of an embedder are in
# directories such as 1_Pooling, in old ones also its encoder: 0_Transformer or 0_BERT.
_HUB_FILES = (
    *(
        f"{parent}{name}"
        for parent in ("", "0_*/")
        for name in (
            *("config.json", "bert_config.json", "vocab.txt", "tokenizer.json"),
            *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
            "sentence_bert_config.json",
        )
    ),
    *("modules.json", "config_sentence_transformers.json", "?_*/config.json"),
    *("?_Dense/model.safetensors", "?_Dense/pytorch_model.bin", "adapter_config.json"),
    *("task.json", "preprocessor.json", "assets/tokenizer/vocabulary.txt"),  # Of keras-hub.
)
# Weights there by format, in the order of preference: only the first one that there is is read.
_HUB_WEIGHTS = (
    ("model.safetensors", f"model.safetensors{_INDEX}", "model-*.safetensors"),
    ("pytorch_model.bin", f"pytorch_model.bin{_INDEX}", "pytorch_model-*.bin"),
    ("tf_model.h5",),
    ("model.weights.h5", "task.weights.h5"),
    ("bert_model.ckpt*", "model.ckpt*"),
)
# Files of weights in the order of preference of transformers.
_FILES = (
    "model.safetensors",
    f"model.safetensors{_INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
    "tf_model.h5",
)
# Layers of TensorFlow models and their names in PyTorch. In tf_model.h5 they are below the names of
# the layers and models that contain them; model.safetensors has the same names without those.
_LAYERS = {
    "bert": "",
    "mlm___cls": "cls.",
    "nsp___cls": "cls.",
    "classifier": "classifier.",
    "qa_outputs": "qa_outputs.",
}


def is_directory_of(path: pathlib.Path) -> bool:
    """Return True if the directory holds weights in a format of Hugging Face."""
    return any((path / name).is_file() for name in _FILES)


def read_config(path: pathlib.Path) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary without the weights; raises UserError."""
    return _read_config(path)[:2]


def read(path: pathlib.Path) -> StoredModel:
    """Read a model. Raise `UserError` if a file is invalid."""
    config, vocabulary, values = _read_config(path)
    file = next(path / name for name in _FILES if (path / name).is_file())
    where = str(file)
    found = _read_shards(file) if file.suffix == ".json" else tensor_files.read(file)
    # Names of PyTorch have no slash.
    if file.suffix == ".h5" or any("/" in theirs for theirs in found):
        found = to_pytorch(found, where)
    tensors = _canonical(found, where)
    _check_tied(values, tensors, where)
    _merge_copies(tensors, where)
    return StoredModel(config, vocabulary, tensors, "huggingface", IGNORED, where, values)


def _read_config(path):
    """Return configuration, vocabulary and the raw values of the configuration."""
    file, old = path / "config.json", path / "bert_config.json"
    if old.is_file() and not file.is_file():
        file = old  # Its name before transformers 2.
    # The default of Hugging Face is the erf form, so a config without the key means "gelu".
    values = {"hidden_act": "gelu", **read_json_object(file)}
    # Whether the output layer is tied is decided by the weights, if there is one.
    encoder = {name: value for name, value in values.items() if name != "tie_word_embeddings"}
    config = BertConfig.from_dict(encoder, where=str(file), is_foreign=True)
    tokenizer_class = values.get("tokenizer_class")
    vocabulary, settings = tokenizer_files.read(path, config.vocab_size, tokenizer_class)
    where = f"{path}: tokenizer"
    return BertConfig.from_dict({**config.to_dict(), **settings}, where), vocabulary, values


def _read_shards(path):
    """Read the tensors of all files that an index names."""
    weight_map = field(read_json_object(path), "weight_map", dict, str(path))
    suffix = path.with_suffix("").with_suffix("").suffix
    shards = sorted(set(map(str, weight_map.values())))
    for shard in shards:
        # Only names of files beside the index, so that no name leads out of the directory.
        relative = pathlib.PurePath(shard)
        if relative.name != shard or "\\" in shard or relative.suffix != suffix:
            raise UserError(f"{path}: names the file {shard!r:.80}; expected NAME{suffix}")
        if not (path.parent / shard).is_file():
            raise UserError(
                f"{path}: names the file {shard:.80}, which is missing; expected all files of the "
                "model in this directory; download it again"
            )
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        for name, array in tensor_files.read(path.parent / shard).items():
            if weight_map.get(name) != shard:
                raise UserError(
                    f"{path.parent / shard}: holds the tensor {name!r:.200}, which {path.name} "
                    "does not assign to this file; download the model again"
                )
            tensors[name] = array
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise UserError(
            f"{path}: names {len(missing)} tensors that are in no file, the first "
            f"{missing[0]!r:.200}; download the model again"
        )
    return tensors


def to_pytorch(tensors: Mapping[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    """Convert the tensors of a TensorFlow model to PyTorch's names and orientation.

    Names such as "bert/pooler/dense/kernel:0" become those of Hugging Face without "bert.". Raise
    UserError if there is a tensor of an unknown layer, or one twice with different values.
    """
    result: dict[str, np.ndarray] = {}
    for name, stored in tensors.items():
        theirs, array = _converted(name, stored, path)
        if not np.array_equal(result.setdefault(theirs, array), array):
            raise UserError(f"{path}: holds {theirs:.200} twice, with different values")
    return result


def _converted(name, array, path):
    """Return the PyTorch name and the float32 array of a dataset."""
    parts = name.removesuffix(":0").split("/")
    begin = max((index for index, part in enumerate(parts) if part in _LAYERS), default=None)
    if begin is None or parts[-1] not in KINDS:
        raise UserError(
            f"{path}: unknown tensor {name:.200}; expected layers of a BERT model: "
            f"{', '.join(_LAYERS)}"
        )
    *owners, kind = parts[begin + 1 :]
    theirs = _LAYERS[parts[begin]] + ".".join([*owners, KINDS[kind]]).replace("layer_._", "layer.")
    array = np.asarray(array, np.float32)
    # Versions of about December 2020 have the attention heads as an axis: (H, N, D) or (N, D, H).
    if array.ndim == 3:
        is_output = owners[-3:] == ["attention", "output", "dense"]
        array = array.reshape((-1, array.shape[2]) if is_output else (array.shape[0], -1))
    elif kind == "bias" and array.ndim == 2:
        array = array.reshape(-1)
    # Stored as (in, out).
    return theirs, array.T if kind == "kernel" else array


def _canonical(tensors, where):
    """Remove prefixes of models with a head and of wrappers, and rename gamma and beta.

    Whatever contains the encoder puts a prefix before the names of its tensors, such as "bert.",
    "module.bert." or "_orig_mod.bert."; a head has the part of it that is not the encoder's own.

    Raises:
        UserError: There are two encoders, or two tensors get the same name.
    """
    prefixes = sorted(
        {
            name.removesuffix(_OF_ENCODER)
            for name in tensors
            if f".{name}".endswith(f".{_OF_ENCODER}")
        }
    )
    if len(prefixes) > 1:
        raise UserError(
            f"{where}: holds {len(prefixes)} encoders, {' and '.join(map(repr, prefixes)):.200}; "
            "expected one model per file"
        )
    parts = prefixes[0].split(".")[:-1] if prefixes else ["bert"]
    result: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        canonical = (
            _without(name, parts)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias")
        )
        if canonical in result:
            raise UserError(
                f"{where}: {name:.200} and another tensor both are {canonical:.200}; expected one "
                "model per file"
            )
        result[canonical] = tensor
    return result


def _without(name, parts):
    """Remove the components of a prefix from a name, up to the first one that differs."""
    for part in parts:
        if not name.startswith(f"{part}."):
            break
        name = name.removeprefix(f"{part}.")
    return name


def _check_tied(values, tensors, where):
    """Check that an output layer that is not tied to the word embeddings has its own weights."""
    if (
        values.get("tie_word_embeddings") is False
        and "cls.predictions.bias" in tensors
        and "cls.predictions.decoder.weight" not in tensors
    ):
        raise UserError(
            f"{where}: cls.predictions.decoder.weight is missing; expected it, because "
            "tie_word_embeddings is false in the configuration"
        )


def _merge_copies(tensors, where):
    """Keep one tensor of tied weights, which are one weight here; they must not differ."""
    for copy, original in _COPIES.items():
        if copy in tensors:
            array = tensors.pop(copy)
            if not np.array_equal(tensors.setdefault(original, array), array):
                raise UserError(
                    f"{where}: {copy} differs from {original}; expected equal values, because "
                    "they are one weight here; tie them and save the model again"
                )


@functools.cache  # In a process, an id is looked up once and is one commit.
def download(path: str) -> tuple[pathlib.Path, str] | None:
    """Download the model of the hub that an id names, owner/name[@revision], unless it is cached.

    A name alone is that of a keras-hub preset if it begins with "bert_". Otherwise it is looked up
    as it is, which the hub redirects for its oldest models, and then under sentence-transformers/.

    Returns:
        Its directory, whose name is the commit, and its id; `None` for a keras-hub preset.

    Raises:
        UserError: It is a path and no id, or there is no such model, or none for this user, or none
            in the cache while there is no network, or its configuration is not supported.
    """
    matched, missing = _ID.fullmatch(path), f"{path}: no such directory"
    if not matched or os.path.lexists(path.partition("/")[0]):
        raise UserError(missing)
    name, revision = matched.groups()
    if _PRESET.fullmatch(name):
        return None
    from huggingface_hub import errors  # Imported here, since it takes a second.

    names = [name] if "/" in name else [name, f"sentence-transformers/{name}"]
    for model_id in names:
        try:
            return _download(model_id, revision), model_id
        except UserError:
            raise
        except Exception as raised:  # The library, the network and the disk raise many types.
            error = raised
        is_gated = isinstance(error, errors.GatedRepoError)
        absent = (errors.RepositoryNotFoundError, errors.LocalEntryNotFoundError)
        if is_gated or not isinstance(error, absent):
            break
    reason = _reason(error, revision)
    raise UserError(f"{missing}; {' or '.join(names)} of the Hugging Face hub {reason}")


def _download(model_id, revision):
    """Download the files of a model that are read: weights of one format, after the others."""
    from huggingface_hub import errors, snapshot_download

    for weights in ((), *_HUB_WEIGHTS):
        patterns = [*_HUB_FILES, *weights, *(f"0_*/{name}" for name in weights)]
        try:
            found = snapshot_download(model_id, revision=revision, allow_patterns=patterns)
        except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError):
            raise
        except Exception:  # Version 1 does not look into the cache for a commit without a network.
            found = snapshot_download(
                model_id, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        directory = pathlib.Path(found)
        revision = directory.name  # The same commit for all files.
        if not weights and "model_type" in tokenizer_files.object_in(directory / "config.json"):
            _read_config(directory)  # Of another architecture, no weights are downloaded.
        if any(any((*directory.glob(name), *directory.glob(f"0_*/{name}"))) for name in weights):
            break
    return directory


def _reason(error, revision):
    """Return what is wrong with a model of the hub, after its name, as one line."""
    from huggingface_hub import constants, errors

    reasons = {
        errors.GatedRepoError: "is gated: ask for access on its page, then run hf auth login",
        errors.RepositoryNotFoundError: "does not exist, or is private and needs hf auth login",
        errors.RevisionNotFoundError: f"has no revision {revision}",
        errors.LocalEntryNotFoundError: f"is not in the cache {constants.HF_HUB_CACHE}, and the "
        f"hub cannot be reached: {error.__cause__ or error}",
    }
    other = f"cannot be downloaded: {type(error).__name__}: {error}"
    found = next((text for kind, text in reasons.items() if isinstance(error, kind)), other)
    return f"{' '.join(found.split()):.400}"
