"""Object checkpoints of the Model Garden and TF-Hub SavedModels, on generated files."""

import numpy as np
import pytest
from tensorflow.core.protobuf import trackable_object_graph_pb2

from bert_tf import UserError, read_pretrained
from bert_tf.weights import name_map
from tests import small
from tests.bert_tf.test_google import save, write_files
from tests.bert_tf.test_head_weights import assert_holds

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
BLOCK = {
    "attention/self/query": "_attention_layer/_query_dense",
    "attention/self/key": "_attention_layer/_key_dense",
    "attention/self/value": "_attention_layer/_value_dense",
    "attention/output/dense": "_attention_layer/_output_dense",
    "attention/output/LayerNorm": "_attention_layer_norm",
    "intermediate/dense": "_intermediate_dense",
    "output/dense": "_output_dense",
    "output/LayerNorm": "_output_layer_norm",
}
NUMBERED = {
    "bert/embeddings/word_embeddings": "model/layer_with_weights-0/embeddings",
    "bert/embeddings/position_embeddings": "model/layer_with_weights-1/embeddings",
    "bert/embeddings/token_type_embeddings": "model/layer_with_weights-2/embeddings",
    "bert/embeddings/LayerNorm": "model/layer_with_weights-3",
    "bert/pooler/dense": "model/layer_with_weights-6",
}
NAMED = {
    "bert/embeddings/word_embeddings": "encoder/_embedding_layer/embeddings",
    "bert/embeddings/position_embeddings": "encoder/_position_embedding_layer/embeddings",
    "bert/embeddings/token_type_embeddings": "encoder/_type_embedding_layer/embeddings",
    "bert/embeddings/LayerNorm": "encoder/_embedding_norm_layer",
    "bert/pooler/dense": "encoder/_pooler_layer",
}
HUB = {
    "bert/embeddings/word_embeddings": "word_embeddings/embeddings",
    "bert/embeddings/position_embeddings": "position_embedding/embeddings",
    "bert/embeddings/token_type_embeddings": "type_embeddings/embeddings",
    "bert/embeddings/LayerNorm": "embeddings/layer_norm",
    "bert/pooler/dense": "pooler_transform",
}
HUB_BLOCK = {
    "attention/self/query": "self_attention/query",
    "attention/self/key": "self_attention/key",
    "attention/self/value": "self_attention/value",
    "attention/output/dense": "self_attention/attention_output",
    "attention/output/LayerNorm": "self_attention_layer_norm",
    "intermediate/dense": "intermediate",
    "output/dense": "output",
    "output/LayerNorm": "output_layer_norm",
}


def theirs(google, outside, block, layers):
    """Return the path of the variable that Google names `google`; `layers` has "{}"."""
    if google in outside:
        return outside[google]
    owner, _, kind = google.rpartition("/")
    if owner in outside:
        return f"{outside[owner]}/{kind}"
    _, _, layer, inner = owner.split("/", 3)
    return f"{layers(int(layer.removeprefix('layer_')))}/{block[inner]}/{kind}"


def encoder(config, *names):
    """Return weights by our names, and by path with the attention heads as an axis."""
    weights = small.random_weights(config)
    shaped = name_map.export_tensors(config, "keras", weights, ["bert"])
    return weights, {
        theirs(row.google, *names): shaped[row.keras] for row in name_map.table(config)
    }


def graph(names=()):
    """Return an object graph with these (key, full name) pairs."""
    proto = trackable_object_graph_pb2.TrackableObjectGraph()
    for key, full_name in names:
        proto.nodes.add().attributes.add(
            name="VARIABLE_VALUE", checkpoint_key=key, full_name=full_name
        )
    return np.array(proto.SerializeToString(), object)


def write(directory, config, vocabulary, paths, prefix="bert_model.ckpt-1"):
    write_files(directory, config, vocabulary)
    tensors = {path + SUFFIX: array for path, array in paths.items()}
    tensors |= {
        "save_counter" + SUFFIX: np.int64(1),
        f"x/kernel/.OPTIMIZER_SLOT/optimizer/m{SUFFIX}": np.zeros(2, np.float32),
        "optimizer/iter" + SUFFIX: np.int64(1),
    }
    save(directory / prefix, {**tensors, "_CHECKPOINTABLE_OBJECT_GRAPH": graph()})


NUMBERED_NAMES = (NUMBERED, BLOCK, lambda layer: f"model/layer_with_weights-{4 + layer}")
NAMED_NAMES = (NAMED, BLOCK, "encoder/_transformer_layers/{}".format)
OLD_BLOCK = {**BLOCK, "attention/output/dense": "_attention_output_dense"}


@pytest.mark.parametrize("names", [NUMBERED_NAMES, NAMED_NAMES, (NAMED, OLD_BLOCK, NAMED_NAMES[2])])
def test_both_layouts_and_old_names_are_read(tmp_path, config, vocabulary, names):
    weights, paths = encoder(config, *names)
    write(tmp_path, config, vocabulary, paths)
    pretrained = read_pretrained(tmp_path)
    assert set(pretrained.weights) == set(weights)
    assert_holds(pretrained.weights, weights)
    assert pretrained.unused_tensors == ()


def test_a_pretrainer_has_shared_variables_under_its_heads(tmp_path, config, vocabulary):
    weights, paths = encoder(config, *NAMED_NAMES)
    paths["masked_lm/embedding_table"] = paths.pop(NAMED["bert/embeddings/word_embeddings"])
    for kind in ("kernel", "bias"):
        pooler = paths.pop(f"encoder/_pooler_layer/{kind}")
        paths[f"next_sentence..pooler_dense/{kind}"] = pooler
    head = small.random_weights(config, seed=4, parts=("masked_lm",))
    for name, path in (
        ("transform/kernel", "dense/kernel"),
        ("transform/bias", "dense/bias"),
        ("LayerNorm/gamma", "layer_norm/gamma"),
        ("LayerNorm/beta", "layer_norm/beta"),
        ("output_bias", "bias"),
    ):
        paths[f"masked_lm/{path}"] = head[f"masked_lm/{name}"]
    write(tmp_path, config, vocabulary, paths)
    pretrained = read_pretrained(tmp_path)
    assert_holds(pretrained.weights, {**weights, **head})
    assert pretrained.heads == ("masked_lm",)


def test_a_saved_model_of_tf_hub_is_read(tmp_path, config, vocabulary):
    weights, by_name = encoder(config, HUB, HUB_BLOCK, "transformer/layer_{}".format)
    names = [(f"variables/{n}{SUFFIX}", name) for n, name in enumerate(by_name)]
    tensors = {key: by_name[name] for key, name in names}
    write_files(tmp_path, config, vocabulary)
    (tmp_path / "assets").mkdir()
    (tmp_path / "vocab.txt").rename(tmp_path / "assets" / "vocab.txt")
    (tmp_path / "saved_model.pb").touch()
    save(
        tmp_path / "variables" / "variables",
        {**tensors, "_CHECKPOINTABLE_OBJECT_GRAPH": graph(names)},
    )
    pretrained = read_pretrained(tmp_path)
    assert_holds(pretrained.weights, weights)
    assert set(pretrained.weights) == set(weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update({"encoder/other/kernel": np.zeros(2)}), "unknown tensor encoder/other"),
        (lambda p: p.pop("encoder/_pooler_layer/bias"), "the first bert/pooler/dense/bias"),
    ],
)
def test_unknown_and_missing_tensors_are_named(tmp_path, config, vocabulary, change, message):
    _, paths = encoder(config, *NAMED_NAMES)
    change(paths)
    write(tmp_path, config, vocabulary, paths)
    with pytest.raises(UserError, match=message):
        read_pretrained(tmp_path)
