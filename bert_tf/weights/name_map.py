"""Names of each weight: ours, in Google's releases, at Hugging Face and in keras-nlp.

The mapping is total in both directions: `rename` fails on an unknown tensor and on a missing
weight, except for tensors that the caller ignores, and `export_tensors` fails on a weight without a
name. Our names start with the component of a weight: the encoder, which every source has, or a
head, which is either complete or absent. The pooler belongs to the encoder; models at Hugging Face
whose head does not use it have none.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.text.vocabulary import Vocabulary

HEADS = ("masked_lm", "next_sentence")
COMPONENTS = ("bert", *HEADS)  # Of a pretraining model.
# Heads of fine-tuned models. Both are "classifier/kernel" and "classifier/bias" here.
CLASSIFIERS = ("classifier", "span_classifier")
# Models at Hugging Face whose head uses the pooler.
_WITH_POOLER = frozenset(
    f"BertFor{name}"
    for name in (
        *("PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice"),
    )
)


class Names(NamedTuple):
    """Names of one weight.

    Attributes:
        ours: Name in this package, such as "bert/layer_0/output/kernel".
        google: Name in a released TensorFlow checkpoint.
        huggingface: Name in model.safetensors, without the prefix "bert.".
        keras: Path in the model.weights.h5 of a keras-nlp preset; with the prefix "task/" in its
            task.weights.h5; `None` for weights that presets do not have.
    """

    ours: str
    google: str
    huggingface: str
    keras: str | None


class StoredModel(NamedTuple):
    """A model as its source stores it.

    Attributes:
        config: Configuration of the model.
        vocabulary: Vocabulary of the model.
        tensors: Arrays by their name in the source.
        column: Field of `Names` with the source's names.
        ignored: Regular expression of tensors to ignore if unknown.
        where: Name of the source, for error messages.
        values: Raw values of the source's configuration file; what other formats store of their
            head, in the terms of Hugging Face (architectures, id2label).
    """

    config: BertConfig
    vocabulary: Vocabulary
    tensors: Mapping[str, np.ndarray]
    column: str
    ignored: str
    where: str
    values: Mapping[str, Any] = MappingProxyType({})


_LAYER = re.compile(r"(?:layer_|layer\.)(\d+)\b")
_ADAPTER = re.compile(r"lora_|\badapters?\b")
_QUANTIZED = re.compile(
    r"(qweight|qzeros|\.scales|_scale|zero_point|absmax|quant_map|SCB)$|quant_state"
)

# Names of each layer: ours, Google's and keras-nlp's. Hugging Face's are derived from Google's.
_TABLES = (
    ("embeddings/word_embeddings", "embeddings/word_embeddings", "reversible_embedding"),
    ("embeddings/position_embeddings", "embeddings/position_embeddings", "position_embedding"),
    ("embeddings/token_type_embeddings", "embeddings/token_type_embeddings", "embedding"),
)
_OUTSIDE_LAYERS = (
    ("embeddings/LayerNorm", "embeddings/LayerNorm", "layer_normalization"),
    ("pooler", "pooler/dense", "dense"),
)
_IN_A_LAYER = (
    ("attention/query", "attention/self/query", "_self_attention_layer/query_dense"),
    ("attention/key", "attention/self/key", "_self_attention_layer/key_dense"),
    ("attention/value", "attention/self/value", "_self_attention_layer/value_dense"),
    ("attention/output", "attention/output/dense", "_self_attention_layer/output_dense"),
    ("attention_norm", "attention/output/LayerNorm", "_self_attention_layer_norm"),
    ("intermediate", "intermediate/dense", "_feedforward_intermediate_dense"),
    ("output", "output/dense", "_feedforward_output_dense"),
    ("output_norm", "output/LayerNorm", "_feedforward_layer_norm"),
)
# Names of each head's weights: ours, Google's and keras-nlp's.
_HEADS = {
    "masked_lm": (
        (
            "masked_lm/transform/kernel",
            "cls/predictions/transform/dense/kernel",
            "masked_lm_head/_intermediate_dense/vars/0",
        ),
        (
            "masked_lm/transform/bias",
            "cls/predictions/transform/dense/bias",
            "masked_lm_head/_intermediate_dense/vars/1",
        ),
        (
            "masked_lm/LayerNorm/gamma",
            "cls/predictions/transform/LayerNorm/gamma",
            "masked_lm_head/_intermediate_layer_norm/vars/0",
        ),
        (
            "masked_lm/LayerNorm/beta",
            "cls/predictions/transform/LayerNorm/beta",
            "masked_lm_head/_intermediate_layer_norm/vars/1",
        ),
        ("masked_lm/output_bias", "cls/predictions/output_bias", "masked_lm_head/vars/0"),
    ),
    "next_sentence": (
        ("next_sentence/output_weights", "cls/seq_relationship/output_weights", None),
        ("next_sentence/output_bias", "cls/seq_relationship/output_bias", None),
    ),
    "classifier": (
        ("classifier/kernel", "output_weights", "dense/vars/0"),
        ("classifier/bias", "output_bias", "dense/vars/1"),
    ),
    "span_classifier": (
        ("classifier/kernel", "cls/squad/output_weights", None),
        ("classifier/bias", "cls/squad/output_bias", None),
    ),
}
# Owners of the heads at Hugging Face whose names differ from Google's.
_HUGGINGFACE_OWNERS = {"classifier": ["classifier"], "span_classifier": ["qa_outputs"]}
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
        part: "bert", or one of `HEADS` and `CLASSIFIERS`.
    """
    if part in _HEADS:
        return [
            Names(
                ours,
                google,
                _huggingface(google, _HUGGINGFACE_OWNERS.get(part)),
                keras and f"task/layers/{keras}",
            )
            for ours, google, keras in _HEADS[part]
        ]
    rows = [
        Names(
            f"bert/{ours}",
            f"bert/{google}",
            google.replace("/", ".") + ".weight",
            f"layers/{keras}/vars/0",
        )
        for ours, google, keras in _TABLES
    ]
    parts = list(_OUTSIDE_LAYERS)
    for layer in range(config.num_hidden_layers):
        block = f"transformer_encoder_{layer}" if layer else "transformer_encoder"
        parts += [
            (f"layer_{layer}/{ours}", f"encoder/layer_{layer}/{google}", f"{block}/{keras}")
            for ours, google, keras in _IN_A_LAYER
        ]
    for ours, google, keras in parts:
        kinds = ("gamma", "beta") if google.endswith("LayerNorm") else ("kernel", "bias")
        for number, kind in enumerate(kinds):
            rows.append(
                Names(
                    f"bert/{ours}/{kind}",
                    f"bert/{google}/{kind}",
                    _huggingface(f"{google}/{kind}"),
                    f"layers/{keras}/vars/{number}",
                )
            )
    return rows


def _huggingface(google, owners=None):
    """Derive the Hugging Face name of a weight from Google's, unless its owners differ."""
    *google_owners, kind = google.replace("layer_", "layer.").split("/")
    return ".".join([*(owners or google_owners), _HUGGINGFACE[kind]])


def weight_shapes(
    config: BertConfig, part: str = "bert", units: int = 2
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a component, by our names.

    Args:
        config: Determines the sizes.
        part: "bert", or one of `HEADS` and `CLASSIFIERS`.
        units: Outputs of a classifier.

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
        elif owner == "classifier":
            result[row.ours] = (hidden, units) if kind == "kernel" else (units,)
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


def pooler_names(config: BertConfig) -> set[str]:
    """Return our names of the pooler's weights."""
    return {row.ours for row in table(config) if row.ours.startswith("bert/pooler/")}


def export_tensors(
    config: BertConfig, column: str, weights: Mapping[str, np.ndarray], parts: Iterable[str]
) -> dict[str, np.ndarray]:
    """Convert weights to the names, orientation and shapes of a format; the reverse of `rename`.

    Args:
        config: Configuration of the weights.
        column: Field of `Names` with the names of the format.
        weights: Arrays by our names. A pooler that is missing is left out.
        parts: Components to export: "bert", and any of `HEADS` and `CLASSIFIERS`.

    Returns:
        Dict from names to contiguous float32 arrays.

    Raises:
        UserError: The format has no name for a weight, or a weight is missing or of the wrong
            shape.
    """
    result = {}
    optional = pooler_names(config)
    for part in parts:
        units = np.size(weights.get("classifier/bias", ()))
        shapes = weight_shapes(config, part, units)
        for row in table(config, part):
            if row.ours in optional and optional.isdisjoint(weights):
                continue
            theirs = getattr(row, column)
            if theirs is None:
                raise UserError(f"{column}: has no {part} head; expected a model without it")
            if row.ours not in weights or weights[row.ours].shape != shapes[row.ours]:
                found = weights[row.ours].shape if row.ours in weights else "none"
                raise UserError(
                    f"{row.ours}: expected an array of shape {shapes[row.ours]}, received {found}"
                )
            array = weights[row.ours].T if _is_transposed(column, row.ours) else weights[row.ours]
            if column == "keras":
                array = array.reshape(_with_heads(config, row.ours, array.shape))
            result[theirs] = np.ascontiguousarray(array, np.float32)
    return result


def _is_transposed(column, ours):
    """Return True if a format stores a kernel as (out, in)."""
    if column == "google":
        return ours == "classifier/kernel"
    return column == "huggingface" and ours.endswith("/kernel")


def _with_heads(config, ours, shape):
    """Return a shape in keras-nlp, which has attention heads as an axis: (H, N, D), (N, D, H)."""
    heads = (config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    if "/attention/" not in ours:
        return shape
    if "/output/" in ours:
        return (*heads, shape[-1]) if len(shape) == 2 else shape
    return (*shape[:-1], *heads)


def rename(model: StoredModel) -> tuple[dict[str, np.ndarray], list[str]]:
    """Rename the tensors of a model to our names and convert them to our shapes.

    Returns:
        Tuple of a dict from our names to float32 arrays, and the sorted names of ignored tensors.
        The pooler is missing if the model has none and needs none.

    Raises:
        UserError: A tensor is unknown or of the wrong shape, a weight of the encoder is missing, or
            a head is incomplete.
    """
    config, _, tensors, column, ignored, where, values = model
    columns: dict[str, dict[str, str]] = {}
    for part in ("bert", *HEADS, *CLASSIFIERS[: 1 if column == "ours" else None]):
        names = {getattr(row, column): row.ours for row in table(config, part)}
        if None not in names:
            columns[part] = names
    known = {theirs for names in columns.values() for theirs in names}
    unused_tensors = sorted(
        name for name in tensors if name not in known and re.fullmatch(ignored, name)
    )
    left_over = sorted(set(tensors) - known - set(unused_tensors))
    if left_over:
        raise UserError(
            f"{where}: {len(left_over)} unknown tensors, the first {left_over[0]:.200}; "
            f"{_remedy(left_over, config, next(iter(columns['bert'])))}"
        )
    if column == "huggingface" and not _WITH_POOLER & set(architectures(values)):
        pooler = {theirs for theirs, name in columns["bert"].items() if "/pooler/" in name}
        if pooler.isdisjoint(tensors):
            columns["bert"] = {k: v for k, v in columns["bert"].items() if k not in pooler}
    result: dict[str, np.ndarray] = {}
    for part, names in columns.items():
        missing = sorted(set(names) - set(tensors))
        # Heads are optional, but an incomplete one is an error.
        if part != "bert" and len(missing) == len(names):
            continue
        if missing:
            rest = f"; expected a complete {part} head or none" if part != "bert" else ""
            raise UserError(
                f"{where}: {len(missing)} weights are missing, the first {missing[0]}{rest}"
            )
        if not result.keys().isdisjoint(names.values()):
            raise UserError(
                f"{where}: two task heads, {', '.join(names)} is the second; expected "
                "one; remove the other"
            )
        bias = next((theirs for theirs, name in names.items() if name == "classifier/bias"), None)
        shapes = weight_shapes(config, part, np.size(tensors[bias]) if bias else 2)
        for theirs, name in names.items():
            result[name] = _converted(column, name, tensors[theirs], shapes[name], theirs, where)
    return result, unused_tensors


def _remedy(unknown, config, example):
    """Return what to do about tensors that are not of the model."""
    layers = [int(found[1]) for name in unknown if (found := _LAYER.search(name))]
    if len(layers) == len(unknown) and min(layers) >= config.num_hidden_layers:
        return (
            f"num_hidden_layers is {config.num_hidden_layers} in the configuration, which does not "
            f"belong to these weights, with {max(layers) + 1} layers"
        )
    if any(_ADAPTER.search(name) for name in unknown):
        return "an adapter is not merged; merge it into the model and save the model again"
    if any(_QUANTIZED.search(name) for name in unknown):
        return "the weights are quantized; expected the model in floating-point numbers"
    return f"expected the names of a BERT model, such as {example}"


def architectures(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the model classes in a Hugging Face configuration, without "TF"."""
    found = values.get("architectures")
    return [str(name).removeprefix("TF") for name in found] if isinstance(found, list) else []


def _converted(column, name, array, shape, theirs, where):
    """Return a tensor as a float32 array in our orientation and shape."""
    array = np.asarray(array, dtype=np.float32)
    received = array.shape
    if _is_transposed(column, name):
        array = array.T
    elif array.ndim == len(shape) + 1 and array.size == np.prod(shape):
        # keras-nlp and the Model Garden have attention heads as an axis: (H, N, D) and (N, D, H).
        array = array.reshape(shape)
    if array.shape != shape:
        raise UserError(
            f"{where}: {theirs}: shape mismatch. Expected: {shape}. Received: "
            f"{received}. Check that the config belongs to these weights."
        )
    return array
