"""Names of each weight: ours, in Google's releases, at Hugging Face and in keras-hub.

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
POOLER = frozenset(("bert/pooler/kernel", "bert/pooler/bias"))  # Which some models do not have.
# Heads of fine-tuned models. Both are "classifier/kernel" and "classifier/bias" here.
CLASSIFIERS = ("classifier", "span_classifier")
# Models at Hugging Face whose head uses the pooler.
WITH_POOLER = frozenset(
    f"BertFor{name}"
    for name in (
        *("PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice"),
    )
)


class Names(NamedTuple):
    """Names and shape of one weight."""

    ours: str  # Name in this package, such as "bert/layer_0/output/kernel".
    google: str  # Name in a released TensorFlow checkpoint.
    huggingface: str  # Name in model.safetensors, without the prefix "bert.".
    # Path in the model.weights.h5 of a keras-hub preset; with the prefix "task/" in its
    # task.weights.h5; `None` for weights that presets do not have.
    keras: str | None
    shape: tuple[int, ...]  # Shape here; kernels are `(in, out)`.


class StoredModel(NamedTuple):
    """A model as its source stores it."""

    config: BertConfig
    vocabulary: Vocabulary
    tensors: Mapping[str, np.ndarray]  # Arrays by their name in the source.
    column: str  # Field of `Names` with the source's names.
    ignored: str  # Regular expression of tensors to ignore if unknown.
    where: str  # Name of the source, for error messages.
    # Raw values of the source's configuration file; what other formats store of their head,
    # in the terms of Hugging Face (architectures, id2label).
    values: Mapping[str, Any] = MappingProxyType({})


_LAYER = re.compile(r"(?:layer_|layer\.)(\d+)\b")
_ADAPTER = re.compile(r"lora_|\badapters?\b")
_QUANTIZED = re.compile(
    r"(qweight|qzeros|\.scales|_scale|zero_point|absmax|quant_map|SCB)$|quant_state"
)


def _dense(ours, google, keras, shape):
    """Return the rows of a kernel and a bias."""
    return (
        (f"{ours}/kernel", f"{google}/kernel", f"{keras}/vars/0", shape),
        (f"{ours}/bias", f"{google}/bias", f"{keras}/vars/1", shape[-1]),
    )


def _norm(ours, google, keras):
    """Return the rows of a LayerNorm."""
    return (
        (f"{ours}/gamma", f"{google}/gamma", f"{keras}/vars/0", "H"),
        (f"{ours}/beta", f"{google}/beta", f"{keras}/vars/1", "H"),
    )


# Each weight: our, Google's and keras-hub's name without the prefix of its part, and its shape.
# Letters of shapes: V entries, P positions, S segments, H hidden size, F feed-forward size, C
# outputs of a classifier. Hugging Face's names are derived from Google's.
_OUTSIDE_LAYERS = (
    *(
        (f"embeddings/{name}", f"embeddings/{name}", f"{keras}/vars/0", shape)
        for name, keras, shape in (
            ("word_embeddings", "reversible_embedding", "VH"),
            ("position_embeddings", "position_embedding", "PH"),
            ("token_type_embeddings", "embedding", "SH"),
        )
    ),
    *_norm("embeddings/LayerNorm", "embeddings/LayerNorm", "layer_normalization"),
    *_dense("pooler", "pooler/dense", "dense", "HH"),
)
_IN_A_LAYER = (
    *_dense("attention/query", "attention/self/query", "_self_attention_layer/query_dense", "HH"),
    *_dense("attention/key", "attention/self/key", "_self_attention_layer/key_dense", "HH"),
    *_dense("attention/value", "attention/self/value", "_self_attention_layer/value_dense", "HH"),
    *_dense(
        "attention/output", "attention/output/dense", "_self_attention_layer/output_dense", "HH"
    ),
    *_norm("attention_norm", "attention/output/LayerNorm", "_self_attention_layer_norm"),
    *_dense("intermediate", "intermediate/dense", "_feedforward_intermediate_dense", "HF"),
    *_dense("output", "output/dense", "_feedforward_output_dense", "FH"),
    *_norm("output_norm", "output/LayerNorm", "_feedforward_layer_norm"),
)
_CLASSIFIER = (
    ("kernel", "output_weights", "dense/vars/0", "HC"),
    ("bias", "output_bias", "dense/vars/1", "C"),
)
_HEADS = {
    "masked_lm": (
        *_dense("transform", "transform/dense", "_intermediate_dense", "HH"),
        *_norm("LayerNorm", "transform/LayerNorm", "_intermediate_layer_norm"),
        ("output_bias", "output_bias", "vars/0", "V"),
    ),
    "next_sentence": (
        ("output_weights", "output_weights", "", "2H"),
        ("output_bias", "output_bias", "", "2"),
    ),
    **dict.fromkeys(CLASSIFIERS, _CLASSIFIER),
}
# Prefixes of the names of each part: ours, Google's, Hugging Face's and keras-hub's.
_PREFIXES = {
    "bert": ("bert/", "bert/", "", "layers/"),
    "masked_lm": (
        "masked_lm/",
        "cls/predictions/",
        "cls.predictions.",
        "task/layers/masked_lm_head/",
    ),
    "next_sentence": ("next_sentence/", "cls/seq_relationship/", "cls.seq_relationship.", None),
    "classifier": ("classifier/", "", "classifier.", "task/layers/"),
    "span_classifier": ("classifier/", "cls/squad/", "qa_outputs.", None),
}
# Kinds of weights in TensorFlow, and in PyTorch.
KINDS = {
    **dict.fromkeys(("kernel", "gamma", "output_weights", "embeddings", "weight"), "weight"),
    **dict.fromkeys(("bias", "beta", "output_bias"), "bias"),
}


def table(config: BertConfig, part: str = "bert", units: int = 2) -> list[Names]:
    """Return all weights of a component.

    Args:
        config: Determines the number of layers and the sizes.
        part: "bert", or one of `HEADS` and `CLASSIFIERS`.
        units: Outputs of a classifier.
    """
    sizes = {
        "V": config.vocab_size,
        "P": config.max_position_embeddings,
        "S": config.type_vocab_size,
        "H": config.hidden_size,
        "F": config.intermediate_size,
        "C": units,
        "2": 2,
    }
    rows = list(_HEADS.get(part, _OUTSIDE_LAYERS))
    for number in range(config.num_hidden_layers if part == "bert" else 0):
        block = f"transformer_encoder_{number}" if number else "transformer_encoder"
        rows += [
            (f"layer_{number}/{ours}", f"encoder/layer_{number}/{google}", f"{block}/{keras}", of)
            for ours, google, keras, of in _IN_A_LAYER
        ]
    of_ours, of_google, of_huggingface, of_keras = _PREFIXES[part]
    return [
        Names(
            of_ours + ours,
            of_google + google,
            of_huggingface + _huggingface(google),
            None if of_keras is None else of_keras + keras,
            tuple(sizes[letter] for letter in shape),
        )
        for ours, google, keras, shape in rows
    ]


def _huggingface(google):
    """Derive the Hugging Face name of a weight from Google's."""
    *owners, kind = google.replace("layer_", "layer.").split("/")
    # A table is the weight of a layer with its name.
    return ".".join([*owners, KINDS.get(kind, f"{kind}.weight")])


def weight_shapes(
    config: BertConfig, part: str = "bert", units: int = 2
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a component by our names; arguments as of `table`."""
    return {row.ours: row.shape for row in table(config, part, units)}


def export_tensors(
    config: BertConfig, column: str, weights: Mapping[str, np.ndarray], parts: Iterable[str]
) -> dict[str, np.ndarray]:
    """Convert weights to the names, orientation and shapes of a format; the reverse of `rename`.

    Args:
        config: Configuration of the weights.
        column: Field of `Names` with the names of the format.
        weights: Arrays by our names. A pooler that is missing is left out.
        parts: Components to export: "bert", and any of `HEADS` and `CLASSIFIERS`.

    Raises:
        UserError: The format has no name for a weight, or a weight is missing or of the wrong
            shape.
    """
    result = {}
    units = np.size(weights.get("classifier/bias", ()))
    for part in parts:
        for row in table(config, part, units):
            if row.ours in POOLER and POOLER.isdisjoint(weights):
                continue
            theirs = getattr(row, column)
            if theirs is None:
                raise UserError(f"{column}: has no {part} head; expected a model without it")
            if row.ours not in weights or weights[row.ours].shape != row.shape:
                found = weights[row.ours].shape if row.ours in weights else "none"
                raise UserError(
                    f"{row.ours}: expected an array of shape {row.shape}, received {found}"
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
    """Return a shape in keras-hub, which has attention heads as an axis: (H, N, D), (N, D, H)."""
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
    for part in (*COMPONENTS, *CLASSIFIERS[: 1 if column == "ours" else None]):
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
    if column == "huggingface" and not WITH_POOLER & set(architectures(values)):
        pooler = {theirs for theirs, name in columns["bert"].items() if name in POOLER}
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
        # keras-hub and the Model Garden have attention heads as an axis: (H, N, D) and (N, D, H).
        array = array.reshape(shape)
    if array.shape != shape:
        raise UserError(
            f"{where}: {theirs}: shape mismatch. Expected: {shape}. Received: "
            f"{received}. Check that the config belongs to these weights."
        )
    return array
