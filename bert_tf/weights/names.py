"""What each of the encoder's weights is called here, in Google's releases, at Hugging Face and in keras-nlp presets.

The table is total: `rename` fails on a tensor that it does not name and on a weight that finds no tensor, except for
what the caller lists as ignored.
"""

import re
from typing import NamedTuple

import numpy as np

from bert_tf.errors import UserError


class Names(NamedTuple):
    ours: str
    google: str
    huggingface: str
    keras: str


_OUTSIDE_LAYERS = (
    Names("embeddings/word_embeddings", "embeddings/word_embeddings", "embeddings.word_embeddings.weight", "token_embedding/embeddings"),
    Names("embeddings/position_embeddings", "embeddings/position_embeddings", "embeddings.position_embeddings.weight", "position_embedding/embeddings"),
    Names("embeddings/token_type_embeddings", "embeddings/token_type_embeddings", "embeddings.token_type_embeddings.weight", "segment_embedding/embeddings"),
    Names("embeddings/LayerNorm/gamma", "embeddings/LayerNorm/gamma", "embeddings.LayerNorm.weight", "embeddings_layer_norm/gamma"),
    Names("embeddings/LayerNorm/beta", "embeddings/LayerNorm/beta", "embeddings.LayerNorm.bias", "embeddings_layer_norm/beta"),
    Names("pooler/kernel", "pooler/dense/kernel", "pooler.dense.weight", "pooled_dense/kernel"),
    Names("pooler/bias", "pooler/dense/bias", "pooler.dense.bias", "pooled_dense/bias"),
)
_IN_A_LAYER = (
    Names("attention/query/kernel", "attention/self/query/kernel", "attention.self.query.weight", "self_attention_layer/query/kernel"),
    Names("attention/query/bias", "attention/self/query/bias", "attention.self.query.bias", "self_attention_layer/query/bias"),
    Names("attention/key/kernel", "attention/self/key/kernel", "attention.self.key.weight", "self_attention_layer/key/kernel"),
    Names("attention/key/bias", "attention/self/key/bias", "attention.self.key.bias", "self_attention_layer/key/bias"),
    Names("attention/value/kernel", "attention/self/value/kernel", "attention.self.value.weight", "self_attention_layer/value/kernel"),
    Names("attention/value/bias", "attention/self/value/bias", "attention.self.value.bias", "self_attention_layer/value/bias"),
    Names("attention/output/kernel", "attention/output/dense/kernel", "attention.output.dense.weight", "self_attention_layer/attention_output/kernel"),
    Names("attention/output/bias", "attention/output/dense/bias", "attention.output.dense.bias", "self_attention_layer/attention_output/bias"),
    Names("attention_norm/gamma", "attention/output/LayerNorm/gamma", "attention.output.LayerNorm.weight", "self_attention_layer_norm/gamma"),
    Names("attention_norm/beta", "attention/output/LayerNorm/beta", "attention.output.LayerNorm.bias", "self_attention_layer_norm/beta"),
    Names("intermediate/kernel", "intermediate/dense/kernel", "intermediate.dense.weight", "feedforward_intermediate_dense/kernel"),
    Names("intermediate/bias", "intermediate/dense/bias", "intermediate.dense.bias", "feedforward_intermediate_dense/bias"),
    Names("output/kernel", "output/dense/kernel", "output.dense.weight", "feedforward_output_dense/kernel"),
    Names("output/bias", "output/dense/bias", "output.dense.bias", "feedforward_output_dense/bias"),
    Names("output_norm/gamma", "output/LayerNorm/gamma", "output.LayerNorm.weight", "feedforward_layer_norm/gamma"),
    Names("output_norm/beta", "output/LayerNorm/beta", "output.LayerNorm.bias", "feedforward_layer_norm/beta"),
)


def table(config):
    """One Names for each weight of the encoder."""
    rows = [Names("bert/" + row.ours, "bert/" + row.google, row.huggingface, row.keras) for row in _OUTSIDE_LAYERS]
    for layer in range(config.num_hidden_layers):
        rows += [Names(f"bert/layer_{layer}/{row.ours}", f"bert/encoder/layer_{layer}/{row.google}",
                       f"encoder.layer.{layer}.{row.huggingface}", f"transformer_layer_{layer}/{row.keras}")
                 for row in _IN_A_LAYER]
    return rows


def shapes(config):
    """{our name: shape} of the encoder's weights, kernels [in, out]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {"word_embeddings": config.vocab_size, "position_embeddings": config.max_position_embeddings,
              "token_type_embeddings": config.type_vocab_size}
    result = {}
    for row in table(config):
        *_, owner, kind = row.ours.split("/")
        if kind in tables:
            result[row.ours] = (tables[kind], hidden)
        elif owner == "intermediate":
            result[row.ours] = (hidden, inner) if kind == "kernel" else (inner,)
        elif kind == "kernel":
            is_feed_forward = "/attention/" not in row.ours and owner == "output"
            result[row.ours] = (inner if is_feed_forward else hidden, hidden)
        else:
            result[row.ours] = (hidden,)
    return result


def rename(tensors, config, column, ignored, where):
    """{their name: array} -> ({our name: float32 array}, the names passed over because they match `ignored`).

    `column` is "google", "huggingface" or "keras". Raises UserError naming a tensor that nothing here uses, a weight
    that is missing there, or a shape that is not the configuration's.
    """
    ours = {getattr(row, column): row.ours for row in table(config)}
    wanted = shapes(config)
    passed_over = sorted(name for name in tensors if name not in ours and re.fullmatch(ignored, name))
    left_over = sorted(set(tensors) - set(ours) - set(passed_over))
    missing = sorted(set(ours) - set(tensors))
    if left_over:
        raise UserError(f"{where}: {len(left_over)} tensors that no part of this model uses, the first {left_over[0]}; "
                        f"is num_hidden_layers={config.num_hidden_layers} right?")
    if missing:
        raise UserError(f"{where}: {len(missing)} weights are missing, the first {missing[0]}")
    result = {}
    for theirs, name in ours.items():
        array = np.asarray(tensors[theirs], dtype=np.float32)
        if column == "huggingface" and name.endswith("/kernel"):
            array = array.T  # PyTorch keeps [out, in].
        elif column == "keras" and array.ndim != len(wanted[name]) and array.size == np.prod(wanted[name]):
            array = array.reshape(wanted[name])  # keras-nlp keeps heads as an axis, [in, N, D] and [N, D, out].
        if array.shape != wanted[name]:
            raise UserError(f"{where}: {theirs} has shape {tuple(tensors[theirs].shape)}, but the configuration makes it "
                            f"{wanted[name]}")
        result[name] = array
    return result, passed_over
