"""Reader of TensorFlow checkpoints of google-research/bert, released or fine-tuned.

Needed are the checkpoint, bert_config.json and vocab.txt. The checkpoint is in either format of
TensorFlow: V2 (PREFIX.index and PREFIX.data-*) or V1 (one file PREFIX).

Checkpoints of the TensorFlow Model Garden and TF-Hub SavedModels (version 2) have other names: the
path of each variable in the tree of Python objects. The trees depend on the version of the Model
Garden. A SavedModel of TF-Hub numbers its variables; their names are in the object graph.
"""

import glob
import os
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.runs.checkpoints import read_bundle
from bert_tf.storage import files
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import heads, huggingface
from bert_tf.weights.name_map import StoredModel, architectures

# Optimizer slots and step counters belong to the training of the checkpoint, position ids are a
# constant.
IGNORED = (
    r".*/adam_[mv]|.*/Adam(_1)?|.*/AdamWeightDecayOptimizer(_1)?|beta[12]_power|global_step|"
    r"bert/embeddings/position_ids"
)
RELEASED = "bert_model.ckpt"
_SAVED_MODEL = "saved_model.pb"
# Classes of the heads, in the terms of Hugging Face, by the tensor that counts the outputs.
_CLASSES = {
    "output_bias": "BertForSequenceClassification",
    "cls/squad/output_bias": "BertForQuestionAnswering",
}
# Ends of the files of a checkpoint, also as far as a shell completes them.
_ENDS = re.compile(r"(?<=[^./])\.(index|meta|data-\d{5}-of-\d{5})?$")
_OF_HEAD = ("architectures", "id2label", "problem_type", "task_specific_params")

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_IGNORED_PATHS = re.compile(
    r"save_counter|global_step|(.*/)?\.OPTIMIZER_SLOT/.*|(optimizer|_optimizer)/.*"
)
_ROOT = r"(?:.*/)?"
_LEAF = r"(kernel|bias|gamma|beta)"
# Layers of a block, by their paths in the Model Garden, or their names on TF-Hub: Google's names.
_BLOCK = {
    **{
        theirs.format(name): f"attention/self/{name}"
        for name in ("query", "key", "value")
        for theirs in ("_attention_layer/_{}_dense", "self_attention/{}")
    },
    "_attention_layer/_output_dense": "attention/output/dense",
    "_attention_output_dense": "attention/output/dense",
    "self_attention/attention_output": "attention/output/dense",
    "self_attention_output": "attention/output/dense",
    "_attention_layer_norm": "attention/output/LayerNorm",
    "self_attention_layer_norm": "attention/output/LayerNorm",
    "_intermediate_dense": "intermediate/dense",
    "intermediate": "intermediate/dense",
    "_output_dense": "output/dense",
    "output": "output/dense",
    "_output_layer_norm": "output/LayerNorm",
    "output_layer_norm": "output/LayerNorm",
}
# The same of all others.
_TABLES = {
    "_embedding_layer": "word_embeddings",
    "_position_embedding_layer": "position_embeddings",
    "_type_embedding_layer": "token_type_embeddings",
    "word_embeddings": "word_embeddings",
    "position_embedding": "position_embeddings",
    "type_embeddings": "token_type_embeddings",
}
_OTHERS = {
    "_embedding_norm_layer": "bert/embeddings/LayerNorm",
    "embeddings/layer_norm": "bert/embeddings/LayerNorm",
    "_pooler_layer": "bert/pooler/dense",
    "pooler_transform": "bert/pooler/dense",
    "masked_lm/dense": "cls/predictions/transform/dense",
    "masked_lm/layer_norm": "cls/predictions/transform/LayerNorm",
}
# The first layers of a functional model, whose layers are numbered: tables, norm, blocks, pooler.
_NUMBERED = ("word_embeddings", "position_embeddings", "token_type_embeddings")
# Used for what the encoder does not have, since a shared variable has one path only.
_FALLBACKS = {
    "masked_lm/embedding_table": "bert/embeddings/word_embeddings",
    "next_sentence..pooler_dense/kernel": "bert/pooler/dense/kernel",
    "next_sentence..pooler_dense/bias": "bert/pooler/dense/bias",
}


class Location(NamedTuple):
    """Paths of the parts of a model."""

    prefix: pathlib.Path
    config: pathlib.Path
    vocabulary: pathlib.Path


def find(
    path: pathlib.Path, config: str | None = None, vocabulary: str | None = None
) -> Location | None:
    """Find the parts of a model.

    Args:
        path: Directory with a checkpoint, prefix of a checkpoint, such as DIR/model.ckpt-343, also
            without the step if there is one, one of its files, or SavedModel.
        config: Path of bert_config.json; by default beside the checkpoint or one level up.
        vocabulary: Path of vocab.txt, likewise.

    Returns:
        The paths, or `None` if there is no checkpoint.

    Raises:
        UserError: The directory has several checkpoints, and none is named bert_model.ckpt or by
            the file "checkpoint", or those of a prefix differ in their steps.
    """
    prefix = _prefix_in(path) if path.is_dir() else _prefix_of(path)
    if prefix is None or not _exists(prefix):
        # A release whose checkpoint is missing is reported as such.
        if not (path / "bert_config.json").is_file() or huggingface.is_directory_of(path):
            return None
        prefix = path / RELEASED
    if not vocabulary and (path / _SAVED_MODEL).is_file():
        vocabulary = str(path / "assets" / "vocab.txt")
    return Location(
        prefix,
        pathlib.Path(config) if config else _beside(prefix, "bert_config.json"),
        pathlib.Path(vocabulary) if vocabulary else _beside(prefix, "vocab.txt"),
    )


def has_config(directory: pathlib.Path) -> bool:
    """Return True if a directory, or the one above, has the configuration of a checkpoint."""
    return _beside(directory / RELEASED, "bert_config.json").is_file()


def read_config(location: Location) -> tuple[BertConfig, Vocabulary]:
    """Read configuration and vocabulary without the weights; raises UserError."""
    for flag, path in (("config_file", location.config), ("vocab_file", location.vocabulary)):
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; expected it in the directory of the checkpoint or one "
                "level up; if it is elsewhere, run: bert-tf convert --from=PATH --to=RUN "
                f"--{flag}=FILE"
            )
    # Unlike Hugging Face, Google calls the tanh form "gelu", whatever the file's name.
    values = read_json_object(location.config)
    config = BertConfig.from_google(values, where=str(location.config), is_foreign=True)
    vocabulary = Vocabulary.load(location.vocabulary)
    vocabulary.check_size(config.vocab_size, where=str(location.vocabulary))
    # A release does not record how text is normalized; its vocabulary shows it.
    shown = vocabulary.normalization().items()
    missing = {name: value for name, value in shown if name not in values}
    return BertConfig.from_dict({**config.to_dict(), **missing}), vocabulary


def read(location: Location) -> StoredModel:
    """Read a model. Raise `UserError` if a file is invalid."""
    config, vocabulary = read_config(location)
    tensors = read_bundle(location.prefix)
    if _OBJECT_GRAPH in tensors:
        tensors = _renamed(tensors, str(location.prefix))
    values = {}
    for bias, name in _CLASSES.items():
        if bias in tensors:
            # run_classifier.py does not save the names of the labels; bert-tf convert does.
            labels = {str(number): str(number) for number in range(np.size(tensors[bias]))}
            values = {"architectures": [name], "id2label": labels}
            values |= _saved_head(read_json_object(location.config), name)
    return StoredModel(config, vocabulary, tensors, "google", IGNORED, str(location.prefix), values)


def _saved_head(saved, name):
    """Return what bert_config.json says about a head whose tensors are those of a class.

    Nothing if its class does not fit them, as in a copy of the config.json of the encoder.
    """
    found, spans = next(iter(architectures(saved)), name), heads.CLASSES["span_qa"]
    fits = found in heads.CLASSES.values() and (found == spans) == (name == spans)
    return {key: saved[key] for key in _OF_HEAD if key in saved} if fits else {}


def _prefix_in(directory):
    """Return the prefix of the checkpoint of a directory, or `None`."""
    if (directory / _SAVED_MODEL).is_file():
        return directory / "variables" / "variables"
    if _exists(directory / RELEASED):
        return directory / RELEASED
    state = directory / "checkpoint"  # Written by TensorFlow, names the newest.
    if state.is_file():
        found = re.search(r'^model_checkpoint_path: "(.+)"', files.read_text(state), re.MULTILINE)
        # The path may be that of another machine, so only the name counts.
        if found and _exists(directory / pathlib.PurePosixPath(found[1]).name):
            return directory / pathlib.PurePosixPath(found[1]).name
    return _only(directory, "*.index")


def _prefix_of(path):
    """Return the prefix of a checkpoint from a file or from the prefix without its step.

    The path if it is neither.
    """
    prefix = pathlib.Path(_ENDS.sub("", str(path)))
    if _exists(prefix):
        return prefix
    return _only(prefix.parent, f"{glob.escape(prefix.name.removesuffix('-'))}-*.index") or path


def _only(directory, pattern):
    """Return the prefix of the checkpoint whose index has a name of a pattern, or `None`."""
    prefixes = sorted(path.with_suffix("") for path in directory.glob(pattern))
    if len(prefixes) > 1:
        newest = max(prefixes, key=lambda prefix: int(re.search(r"\d*$", prefix.name)[0] or -1))
        raise UserError(
            f"{directory}: {len(prefixes)} checkpoints; name one of them, such as {newest}"
        )
    return prefixes[0] if prefixes else None


def _exists(prefix):
    """Return True if there is a checkpoint of either format."""
    if prefix.with_name(f"{prefix.name}.index").is_file():
        return True
    is_v1 = prefix.is_file() and ".ckpt" in prefix.name
    return is_v1 or any(prefix.parent.glob(f"{glob.escape(prefix.name)}-?????-of-?????"))


def _beside(prefix, name):
    """Return the path of a file beside a checkpoint or, if it is only there, one level up."""
    beside = prefix.parent / name
    above = pathlib.Path(os.path.abspath(prefix.parent)).parent / name  # Of "." and ".." too.
    return above if above.is_file() and not beside.is_file() else beside


def _renamed(tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Return the tensors of an object checkpoint by the names of google-research/bert.

    Optimizer slots and counters are left out. Raise `UserError` if a tensor is unknown.
    """
    paths = {
        name.removesuffix(_SUFFIX): array
        for name, array in tensors.items()
        if name != _OBJECT_GRAPH and not _IGNORED_PATHS.fullmatch(name.removesuffix(_SUFFIX))
    }
    if any(re.fullmatch(r"variables/\d+", path) for path in paths):
        paths = _with_full_names(paths, tensors[_OBJECT_GRAPH])
    result: dict[str, np.ndarray] = {}
    fallbacks: dict[str, np.ndarray] = {}
    for path, array in paths.items():
        ends = (name for end, name in _FALLBACKS.items() if f"/{path}".endswith(f"/{end}"))
        if fallback := next(ends, None):
            fallbacks[fallback] = array
            continue
        google = _google_name(path)
        if google is None or google in result:
            raise UserError(
                f"{where}: unknown tensor {path:.200}; expected a BERT encoder of the TensorFlow "
                "Model Garden"
            )
        result[google] = array
    return {**fallbacks, **result}


def _google_name(path):
    """Return Google's name of the variable at a path, or `None`."""
    if match := re.fullmatch(rf"{_ROOT}layer_with_weights-(\d+)/(?:(.+)/)?(\w+)", path):
        number, layer, kind = int(match[1]), match[2], match[3]
        if number < len(_NUMBERED):
            return f"bert/embeddings/{_NUMBERED[number]}"
        if number == len(_NUMBERED):
            return f"bert/embeddings/LayerNorm/{kind}"
        # The pooler, the last one, has its variables directly.
        if layer is None and kind in ("kernel", "bias"):
            return f"bert/pooler/dense/{kind}"
        return _in_block(number - len(_NUMBERED) - 1, layer, kind)
    block = rf"(?:{_ROOT}_transformer_layers/|transformer/layer_)(\d+)/(.+)/{_LEAF}"
    if match := re.fullmatch(block, path):
        return _in_block(*match.groups())
    if match := re.fullmatch(rf"{_ROOT}({'|'.join(_TABLES)})/\w*embeddings", path):
        return f"bert/embeddings/{_TABLES[match[1]]}"
    if match := re.fullmatch(rf"{_ROOT}({'|'.join(_OTHERS)})/{_LEAF}", path):
        return f"{_OTHERS[match[1]]}/{match[2]}"
    return "cls/predictions/output_bias" if re.fullmatch(rf"{_ROOT}masked_lm/bias", path) else None


def _in_block(number, layer, kind):
    return f"bert/encoder/layer_{number}/{_BLOCK[layer]}/{kind}" if layer in _BLOCK else None


def _with_full_names(paths, graph):
    """Replace numbered paths by the variables' names, which are in the object graph."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    nodes = trackable_object_graph_pb2.TrackableObjectGraph.FromString(bytes(graph)).nodes
    names = {
        attribute.checkpoint_key.removesuffix(_SUFFIX): attribute.full_name
        for node in nodes
        for attribute in node.attributes
    }
    return {names.get(path) or path: array for path, array in paths.items()}
