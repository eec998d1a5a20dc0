"""Names of each weight: ours, in Google's releases, at Hugging Face and in keras-nlp.

The mapping is total: `rename` fails on an unknown tensor and on a missing weight, except for
tensors that the caller ignores. Our names start with the component of a weight: the encoder, which
every source has, or a head, which is either complete or absent.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary

HEADS = ("masked_lm", "next_sentence")
COMPONENTS = ("bert", *HEADS)


class Names(NamedTuple):
    """Names of one weight.

    Attributes:
        ours: Name in this package, such as "bert/layer_0/output/kernel".
        google: Name in a released TensorFlow checkpoint.
        huggingface: Name in model.safetensors, without the prefix "bert.".
        keras: Path in a keras-nlp backbone, or `None` for weights of heads.
    """

    ours: str
    google: str
    huggingface: str
    keras: str | None  # Presets have no heads.


class StoredModel(NamedTuple):
    """A model as its source stores it.

    Attributes:
        config: Configuration of the model.
        vocabulary: Vocabulary of the model.
        tensors: Arrays by their name in the source.
        column: Field of `Names` with the source's names.
        ignored: Regular expression of tensors to ignore if unknown.
        where: Name of the source, for error messages.
        values: Raw values of the source's configuration file.
    """

    config: BertConfig
    vocabulary: Vocabulary
    tensors: Mapping[str, np.ndarray]
    column: str
    ignored: str
    where: str
    values: Mapping[str, Any] = MappingProxyType({})


# Names of each layer: ours, Google's and keras-nlp's. Hugging Face's are derived from Google's.
_TABLES = (
    ("embeddings/word_embeddings", "embeddings/word_embeddings", "token_embedding"),
    ("embeddings/position_embeddings", "embeddings/position_embeddings", "position_embedding"),
    ("embeddings/token_type_embeddings", "embeddings/token_type_embeddings", "segment_embedding"),
)
_OUTSIDE_LAYERS = (
    ("embeddings/LayerNorm", "embeddings/LayerNorm", "embeddings_layer_norm"),
    ("pooler", "pooler/dense", "pooled_dense"),
)
_IN_A_LAYER = (
    ("attention/query", "attention/self/query", "self_attention_layer/query"),
    ("attention/key", "attention/self/key", "self_attention_layer/key"),
    ("attention/value", "attention/self/value", "self_attention_layer/value"),
    ("attention/output", "attention/output/dense", "self_attention_layer/attention_output"),
    ("attention_norm", "attention/output/LayerNorm", "self_attention_layer_norm"),
    ("intermediate", "intermediate/dense", "feedforward_intermediate_dense"),
    ("output", "output/dense", "feedforward_output_dense"),
    ("output_norm", "output/LayerNorm", "feedforward_layer_norm"),
)
# Names of each head's weights: ours and Google's.
_HEADS = {
    "masked_lm": (
        ("transform/kernel", "predictions/transform/dense/kernel"),
        ("transform/bias", "predictions/transform/dense/bias"),
        ("LayerNorm/gamma", "predictions/transform/LayerNorm/gamma"),
        ("LayerNorm/beta", "predictions/transform/LayerNorm/beta"),
        ("output_bias", "predictions/output_bias"),
    ),
    "next_sentence": (
        ("output_weights", "seq_relationship/output_weights"),
        ("output_bias", "seq_relationship/output_bias"),
    ),
}
_HUGGINGFACE = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "output_weights": "weight",
    "output_bias": "bias",
}


def table(config: BertConfig, part: str = "bert") -> list[Names]:
    """Return the names of all weights of a component.

    Args:
        config: Determines the number of layers.
        part: "bert", "masked_lm" or "next_sentence".
    """
    if part in HEADS:
        return [
            Names(f"{part}/{ours}", f"cls/{google}", _huggingface(f"cls/{google}"), None)
            for ours, google in _HEADS[part]
        ]
    rows = [
        Names(
            f"bert/{ours}",
            f"bert/{google}",
            google.replace("/", ".") + ".weight",
            keras + "/embeddings",
        )
        for ours, google, keras in _TABLES
    ]
    parts = list(_OUTSIDE_LAYERS)
    for layer in range(config.num_hidden_layers):
        parts += [
            (
                f"layer_{layer}/{ours}",
                f"encoder/layer_{layer}/{google}",
                f"transformer_layer_{layer}/{keras}",
            )
            for ours, google, keras in _IN_A_LAYER
        ]
    for ours, google, keras in parts:
        for kind in ("gamma", "beta") if google.endswith("LayerNorm") else ("kernel", "bias"):
            rows.append(
                Names(
                    f"bert/{ours}/{kind}",
                    f"bert/{google}/{kind}",
                    _huggingface(f"{google}/{kind}"),
                    f"{keras}/{kind}",
                )
            )
    return rows


def _huggingface(google):
    """Derive the Hugging Face name of a weight from Google's."""
    *owners, kind = google.replace("layer_", "layer.").split("/")
    return ".".join([*owners, _HUGGINGFACE[kind]])


def weight_shapes(config: BertConfig, part: str = "bert") -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a component, by our names.

    Args:
        config: Determines the sizes.
        part: "bert", "masked_lm" or "next_sentence".

    Returns:
        Dict from names to shapes; kernels are `(in, out)`.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {
        "word_embeddings": config.vocab_size,
        "position_embeddings": config.max_position_embeddings,
        "token_type_embeddings": config.type_vocab_size,
    }
    result: dict[str, tuple[int, ...]] = {}
    for row in table(config, part):
        *_, owner, kind = row.ours.split("/")
        if kind in tables:
            result[row.ours] = (tables[kind], hidden)
        elif owner == "intermediate":
            result[row.ours] = (hidden, inner) if kind == "kernel" else (inner,)
        elif kind == "kernel":
            is_feed_forward = "/attention/" not in row.ours and owner == "output"
            result[row.ours] = (inner if is_feed_forward else hidden, hidden)
        elif kind == "output_weights":
            result[row.ours] = (2, hidden)
        elif kind == "output_bias":
            result[row.ours] = (config.vocab_size if owner == "masked_lm" else 2,)
        else:
            result[row.ours] = (hidden,)
    return result


def rename(model: StoredModel) -> tuple[dict[str, np.ndarray], list[str]]:
    """Rename the tensors of a model to our names and convert them to our shapes.

    Returns:
        Tuple of a dict from our names to float32 arrays, and the sorted names of ignored tensors.

    Raises:
        UserError: A tensor is unknown or of the wrong shape, a weight of the encoder is missing, or
            a head is incomplete.
    """
    config, _, tensors, column, ignored, where, _ = model
    columns = {
        part: {getattr(row, column): row.ours for row in table(config, part)} for part in COMPONENTS
    }
    known = {theirs for names in columns.values() for theirs in names}
    unused_tensors = sorted(
        name for name in tensors if name not in known and re.fullmatch(ignored, name)
    )
    left_over = sorted(set(tensors) - known - set(unused_tensors))
    if left_over:
        raise UserError(
            f"{where}: {len(left_over)} unknown tensors, the first {left_over[0]}; "
            f"check num_hidden_layers={config.num_hidden_layers} in the config"
        )
    ours: dict[str, str] = {}
    expected_shapes: dict[str, tuple[int, ...]] = {}
    for part, names in columns.items():
        missing = sorted(set(names) - set(tensors))
        # Heads are optional, but an incomplete one is an error.
        if part in HEADS and len(missing) == len(names):
            continue
        if missing:
            rest = f"; expected a complete {part} head or none" if part in HEADS else ""
            raise UserError(
                f"{where}: {len(missing)} weights are missing, the first {missing[0]}{rest}"
            )
        ours |= names
        expected_shapes |= weight_shapes(config, part)
    result = {}
    for theirs, name in ours.items():
        array = np.asarray(tensors[theirs], dtype=np.float32)
        if column == "huggingface" and name.endswith("/kernel"):
            array = array.T  # PyTorch stores (out, in).
        elif (
            column == "keras"
            and array.ndim != len(expected_shapes[name])
            and array.size == np.prod(expected_shapes[name])
        ):
            # keras-nlp stores attention heads as an axis: (in, N, D) and (N, D, out).
            array = array.reshape(expected_shapes[name])
        if array.shape != expected_shapes[name]:
            raise UserError(
                f"{where}: {theirs}: shape mismatch. Expected: {expected_shapes[name]}. Received: "
                f"{tuple(tensors[theirs].shape)}. Check that the config belongs to these weights."
            )
        result[name] = array
    return result, unused_tensors
