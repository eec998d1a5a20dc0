"""Writer of keras-hub BERT presets.

config.json, model.weights.h5            the backbone
tokenizer.json, assets/tokenizer/        the tokenizer
task.json, task.weights.h5               the head, if keras-hub has one like it
metadata.json                            versions
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from bert_tf.conversion import exported_model
from bert_tf.conversion.exported_model import ExportedModel
from bert_tf.system.versions import versions
from bert_tf.weights.keras_preset import MAX_INPUT_CHARS_PER_WORD

LIBRARY = "keras-hub"
WEIGHTS, TASK_WEIGHTS = "model.weights.h5", "task.weights.h5"


def write(model: ExportedModel, directory: pathlib.Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write a preset.

    Args:
        model: The model. Heads of classification and regression become a BertTextClassifier, that
            of masked language modelling a BertMaskedLM.
        directory: Empty directory.

    Returns:
        Tensors by "file:name", as written, and descriptions of what the format does not hold.

    Raises:
        UserError: keras-hub computes another activation or epsilon, or a weight is missing.
    """
    pretrained = model.pretrained
    config = pretrained.config
    exported_model.check_fixed_values(
        pretrained, LIBRARY, hidden_act="gelu_new", layer_norm_eps=1e-12
    )
    tensors = {WEIGHTS: model.tensors("keras", ("bert",))}
    backbone = _described(
        "bert_backbone",
        "BertBackbone",
        {
            "vocabulary_size": config.vocab_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "hidden_dim": config.hidden_size,
            "intermediate_dim": config.intermediate_size,
            "dropout": float(config.hidden_dropout_prob),
            "max_sequence_length": config.max_position_embeddings,
            "num_segments": config.type_vocab_size,
        },
    )
    _write_json(directory / "config.json", backbone)
    lower = config.do_lower_case
    strips = lower if config.strip_accents is None else config.strip_accents
    tokenizer = {"lowercase": lower, "strip_accents": strips, "config_file": "tokenizer.json"}
    _write_json(
        directory / "tokenizer.json", _described("bert_tokenizer", "BertTokenizer", tokenizer)
    )
    exported_model.write_vocabulary(model, directory / "assets" / "tokenizer" / "vocabulary.txt")
    task, head, dropped = _task(model, backbone)
    if task:
        tensors[TASK_WEIGHTS] = head
        _write_json(directory / "task.json", task)
    count = sum(array.size for array in tensors[WEIGHTS].values())
    _write_json(
        directory / "metadata.json",
        {
            "keras_version": versions(("keras",))["keras"],
            "parameter_count": count,
            "tasks": ["MaskedLM", "TextClassifier", "TextEmbedder"],
        },
    )
    for name, arrays in tensors.items():
        with h5py.File(directory / name, "w") as file:
            for path, array in arrays.items():
                file.create_dataset(path, data=array)
            if name == TASK_WEIGHTS:
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
    return _flat(tensors), dropped + model.dropped


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Read back all tensors by "file:name"."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(directory.glob("*.weights.h5")):
        with h5py.File(path) as file:
            names: list[str] = []
            file["layers"].visit(names.append)
            found[path.name] = {
                f"layers/{name}": file["layers"][name][()]
                for name in names
                if isinstance(file["layers"][name], h5py.Dataset)
            }
    return _flat(found)


def _task(model, backbone):
    """Return task.json, or `None`, the tensors of the head, and what is dropped."""
    head, dropped = model.head, []
    common = {"backbone": backbone, "preprocessor": None}
    if head is not None:
        if head.kind not in ("classification", "regression"):
            return None, {}, [f"the {head.kind} head, which keras-hub does not have"]
        if head.labels:
            dropped.append(f"the names of {len(head.labels)} labels")
        if head.multi_label:
            dropped.append("multi_label")
        options = {"num_classes": len(head.bias), "activation": "linear"}
        options["dropout"] = float(model.pretrained.config.hidden_dropout_prob)
        task = _described("bert_text_classifier", "BertTextClassifier", {**common, **options})
        return task, _of_task(model, head.part), dropped
    if "next_sentence" in model.pretraining_heads:
        dropped.append("the next_sentence head, which keras-hub does not have")
    if "masked_lm" not in model.pretraining_heads:
        return None, {}, dropped
    dropped.append("exact outputs of the masked_lm head: keras-hub computes erf and epsilon 1e-5")
    task = _described("bert_masked_lm", "BertMaskedLM", common)
    return task, _of_task(model, "masked_lm"), dropped


def _of_task(model, part):
    """Return the tensors of a head by their names in task.weights.h5."""
    tensors = model.tensors("keras", (part,))
    return {name.removeprefix("task/"): array for name, array in tensors.items()}


def _described(module: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a Keras object."""
    return {
        "module": f"keras_hub.src.models.bert.{module}",
        "class_name": name,
        "config": config,
        "registered_name": f"keras_hub>{name}",
    }


def _flat(files):
    return {
        f"{file}:{name}": array for file, arrays in files.items() for name, array in arrays.items()
    }


def _write_json(path, values):
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def outputs_in_library(
    directory: pathlib.Path,
) -> Callable[[np.ndarray], dict[str, np.ndarray]] | None:
    """Load the backbone of a preset with keras-hub.

    Args:
        directory: The preset.

    Returns:
        Function from token ids `(L,)` to float32 outputs "sequence" `(L, H)` and "pooled" `(H,)`,
        or `None` if the library is not installed.
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
