"""Names in checkpoints of the TensorFlow Model Garden and in TF-Hub SavedModels (version 2).

Such a checkpoint stores the path of each variable in the tree of Python objects. The trees depend
on the version of the Model Garden. A SavedModel of TF-Hub numbers its variables; their names are in
the object graph.
"""

import re
from collections.abc import Mapping

import numpy as np

from bert_tf.errors import UserError

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_IGNORED = re.compile(
    r"save_counter|global_step|(.*/)?\.OPTIMIZER_SLOT/.*|(optimizer|_optimizer)/.*"
)
_ROOT = r"(?:.*/)?"
_LEAF = r"(kernel|bias|gamma|beta)"
_ATTENTION = {"query": "self/query", "key": "self/key", "value": "self/value"}
# Layers of a block: Model Garden, Google.
_BLOCK = {
    **{f"_attention_layer/_{name}_dense": f"attention/{ours}" for name, ours in _ATTENTION.items()},
    "_attention_layer/_output_dense": "attention/output/dense",
    "_attention_output_dense": "attention/output/dense",
    "_attention_layer_norm": "attention/output/LayerNorm",
    "_intermediate_dense": "intermediate/dense",
    "_output_dense": "output/dense",
    "_output_layer_norm": "output/LayerNorm",
}
_TABLES = {
    "_embedding_layer": "word_embeddings",
    "_position_embedding_layer": "position_embeddings",
    "_type_embedding_layer": "token_type_embeddings",
}
_OTHERS = {
    "_embedding_norm_layer": "bert/embeddings/LayerNorm",
    "_pooler_layer": "bert/pooler/dense",
    "masked_lm/dense": "cls/predictions/transform/dense",
    "masked_lm/layer_norm": "cls/predictions/transform/LayerNorm",
}
# Layers of a block in TF-Hub's names of variables.
_HUB_BLOCK = {
    **{f"self_attention/{name}": f"attention/{ours}" for name, ours in _ATTENTION.items()},
    "self_attention/attention_output": "attention/output/dense",
    "self_attention_output": "attention/output/dense",
    "self_attention_layer_norm": "attention/output/LayerNorm",
    "intermediate": "intermediate/dense",
    "output": "output/dense",
    "output_layer_norm": "output/LayerNorm",
}
_HUB = {
    "word_embeddings/embeddings": "bert/embeddings/word_embeddings",
    "position_embedding/embeddings": "bert/embeddings/position_embeddings",
    "position_embedding/position_embeddings": "bert/embeddings/position_embeddings",
    "type_embeddings/embeddings": "bert/embeddings/token_type_embeddings",
    **{
        f"embeddings/layer_norm/{kind}": f"bert/embeddings/LayerNorm/{kind}"
        for kind in ("gamma", "beta")
    },
    **{f"pooler_transform/{kind}": f"bert/pooler/dense/{kind}" for kind in ("kernel", "bias")},
}
# Used for what the encoder does not have, since a shared variable has one path only.
_FALLBACKS = {
    "masked_lm/embedding_table": "bert/embeddings/word_embeddings",
    "next_sentence..pooler_dense/kernel": "bert/pooler/dense/kernel",
    "next_sentence..pooler_dense/bias": "bert/pooler/dense/bias",
}


def to_google(tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Rename the tensors of an object checkpoint to those of google-research/bert.

    Args:
        tensors: Arrays by their name in the checkpoint, with the object graph.
        where: The checkpoint, for error messages.

    Returns:
        Arrays by Google's names, without optimizer slots and counters.

    Raises:
        UserError: A tensor is unknown.
    """
    paths = {
        name.removesuffix(_SUFFIX): array
        for name, array in tensors.items()
        if name != OBJECT_GRAPH and not _IGNORED.fullmatch(name.removesuffix(_SUFFIX))
    }
    if any(re.fullmatch(r"variables/\d+", path) for path in paths):
        paths = _with_full_names(paths, tensors[OBJECT_GRAPH])
    result: dict[str, np.ndarray] = {}
    fallbacks: dict[str, np.ndarray] = {}
    for path, array in paths.items():
        for theirs, name in _FALLBACKS.items():
            if path == theirs or path.endswith(f"/{theirs}"):
                fallbacks[name] = array
                break
        else:
            google = _google(path)
            if google is None or google in result:
                raise UserError(
                    f"{where}: unknown tensor {path:.200}; expected a BERT encoder of the "
                    "TensorFlow Model Garden"
                )
            result[google] = array
    return {**fallbacks, **result}


def _google(path):
    """Return Google's name of the variable at a path, or `None`."""
    if path in _HUB:
        return _HUB[path]
    if match := re.fullmatch(rf"transformer/layer_(\d+)/(.+)/{_LEAF}", path):
        layer = _HUB_BLOCK.get(match[2])
        return layer and f"bert/encoder/layer_{match[1]}/{layer}/{match[3]}"
    if match := re.fullmatch(rf"{_ROOT}layer_with_weights-(\d+)/(.+)", path):
        return _numbered(int(match[1]), match[2])
    if match := re.fullmatch(rf"{_ROOT}_transformer_layers/(\d+)/(.+)/{_LEAF}", path):
        return _in_block(match[1], match[2], match[3])
    if match := re.fullmatch(rf"{_ROOT}({'|'.join(_TABLES)})/\w*embeddings", path):
        return f"bert/embeddings/{_TABLES[match[1]]}"
    if match := re.fullmatch(rf"{_ROOT}({'|'.join(_OTHERS)})/{_LEAF}", path):
        return f"{_OTHERS[match[1]]}/{match[2]}"
    return "cls/predictions/output_bias" if re.fullmatch(rf"{_ROOT}masked_lm/bias", path) else None


def _numbered(number, path):
    """Return Google's name in a functional model: tables, norm, blocks, pooler are numbered."""
    if number < len(_TABLES):
        return f"bert/embeddings/{list(_TABLES.values())[number]}"
    if number == len(_TABLES):
        return f"bert/embeddings/LayerNorm/{path}"
    # The pooler, the last one, has its variables directly.
    if path in ("kernel", "bias"):
        return f"bert/pooler/dense/{path}"
    layer, _, kind = path.rpartition("/")
    return _in_block(number - len(_TABLES) - 1, layer, kind)


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
