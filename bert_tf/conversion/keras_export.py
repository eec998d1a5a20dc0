"""Writer of keras-hub BERT presets.

config.json, model.weights.h5            the backbone
tokenizer.json, assets/tokenizer/        the tokenizer
task.json, task.weights.h5               the head, if keras-hub has one like it
metadata.json                            versions
"""

import pathlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from bert_tf.config import strips_accents
from bert_tf.conversion.exported_model import ExportedModel, Written
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system.versions import versions
from bert_tf.weights.heads import BIAS
from bert_tf.weights.keras_preset import (
    BACKBONE_KEYS,
    MAX_INPUT_CHARS_PER_WORD,
    TASK_WEIGHTS,
    VOCABULARY,
    WEIGHTS,
)


def write(model: ExportedModel, directory: pathlib.Path) -> Written:
    """Write a preset to an empty directory.

    Heads of classification and regression become a BertTextClassifier, that of masked language
    modelling a BertMaskedLM.

    Raises:
        UserError: keras-hub computes another activation or epsilon, or a weight is missing.
    """
    pretrained = model.pretrained
    config = pretrained.config
    for name, value in (("hidden_act", "gelu_new"), ("layer_norm_eps", 1e-12)):
        if (actual := getattr(config, name)) != value:
            raise UserError(
                f"{pretrained.source}: {name} is {actual!r}, but keras-hub has {value!r} only; "
                "expected another --format, such as huggingface"
            )
    tensors = model.tensors("keras", ("bert",))
    count = sum(array.size for array in tensors.values())
    backbone = _described(
        "bert_backbone",
        "BertBackbone",
        {
            **{theirs: getattr(config, ours) for ours, theirs in BACKBONE_KEYS.items()},
            "dropout": float(config.hidden_dropout_prob),
            "max_sequence_length": config.max_position_embeddings,
            "num_segments": config.type_vocab_size,
        },
    )
    files.atomic_write_json(directory / "config.json", backbone)
    lower = config.do_lower_case
    strips = strips_accents(lower, config.strip_accents)
    tokenizer = {"lowercase": lower, "strip_accents": strips, "config_file": "tokenizer.json"}
    files.atomic_write_json(
        directory / "tokenizer.json", _described("bert_tokenizer", "BertTokenizer", tokenizer)
    )
    files.makedirs((directory / VOCABULARY).parent)
    pretrained.vocabulary.save(directory / VOCABULARY)
    task, heads, dropped = _task(model, backbone)
    if task:
        tensors |= model.tensors("keras", heads)
        files.atomic_write_json(directory / "task.json", task)
    files.atomic_write_json(
        directory / "metadata.json",
        {
            "keras_version": versions(("keras",))["keras"],
            "parameter_count": count,
            "tasks": ["MaskedLM", "TextClassifier", "TextEmbedder"],
        },
    )
    for file_name, prefix in ((WEIGHTS, "layers/"), (TASK_WEIGHTS, "task/"))[: 1 + bool(task)]:
        with h5py.File(directory / file_name, "w") as file:
            for name, array in tensors.items():
                if name.startswith(prefix):
                    file.create_dataset(name.removeprefix("task/"), data=array)
            if prefix == "task/":
                # keras-hub warns about a task without the state of an optimizer: step and rate.
                file.create_dataset("optimizer/vars/0", data=np.int64(0))
                file.create_dataset("optimizer/vars/1", data=np.float32(1e-3))
    if config.attention_probs_dropout_prob != config.hidden_dropout_prob:
        dropped.append(f"attention_probs_dropout_prob={config.attention_probs_dropout_prob}")
    if config.max_input_chars_per_word != MAX_INPUT_CHARS_PER_WORD:
        dropped.append(
            f"max_input_chars_per_word={config.max_input_chars_per_word}: keras-hub uses "
            f"{MAX_INPUT_CHARS_PER_WORD}"
        )
    return tensors, dropped + model.dropped


def _task(model, backbone):
    """Return task.json, or `None`, the heads that it has, and what is dropped."""
    pretrained, dropped = model.pretrained, []
    common = {"backbone": backbone, "preprocessor": None}
    if model.kind:
        if model.kind not in ("classification", "regression"):
            return None, (), [f"the {model.kind} head, which keras-hub does not have"]
        if labels := pretrained.task.get("labels"):
            dropped.append(f"the names of {len(labels)} labels")
        if pretrained.task.get("multi_label"):
            dropped.append("multi_label")
        options = {"num_classes": len(pretrained.weights[BIAS]), "activation": "linear"}
        options["dropout"] = float(pretrained.config.hidden_dropout_prob)
        task = _described("bert_text_classifier", "BertTextClassifier", {**common, **options})
        return task, model.heads, dropped
    if "next_sentence" in model.heads:
        dropped.append("the next_sentence head, which keras-hub does not have")
    if "masked_lm" not in model.heads:
        return None, (), dropped
    dropped.append("exact outputs of the masked_lm head: keras-hub computes erf and epsilon 1e-5")
    return _described("bert_masked_lm", "BertMaskedLM", common), ("masked_lm",), dropped


def _described(module: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a Keras object."""
    return {
        "module": f"keras_hub.src.models.bert.{module}",
        "class_name": name,
        "config": config,
        "registered_name": f"keras_hub>{name}",
    }


def outputs_in_library(
    directory: pathlib.Path,
) -> Callable[[np.ndarray], dict[str, np.ndarray]] | None:
    """Load the backbone of a preset with keras-hub, if it is installed.

    Returns:
        Function from token ids `(L,)` to float32 outputs "sequence" `(L, H)` and "pooled" `(H,)`.
    """
    try:
        import keras_nlp
    except ImportError:
        return None
    backbone = keras_nlp.models.BertBackbone.from_preset(str(directory))

    def outputs_of(ids):
        outputs = backbone(
            {
                "token_ids": ids[np.newaxis],
                "segment_ids": np.zeros_like(ids)[np.newaxis],
                "padding_mask": np.ones_like(ids)[np.newaxis],
            }
        )
        return {name: np.asarray(outputs[f"{name}_output"])[0] for name in ("sequence", "pooled")}

    return outputs_of
