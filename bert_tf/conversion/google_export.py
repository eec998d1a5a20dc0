"""Writer of releases in the form of google-research/bert."""

import json
import pathlib

import numpy as np

from bert_tf.conversion.exported_model import ExportedModel, write_vocabulary
from bert_tf.conversion.huggingface_export import class_name, encoder_values
from bert_tf.runs.checkpoints import read_bundle

PREFIX = "bert_model.ckpt"


def write(model: ExportedModel, directory: pathlib.Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write bert_config.json, vocab.txt and bert_model.ckpt.*.

    Args:
        model: The model. Its head is named as in run_classifier.py, or run_squad.py for spans.
        directory: Empty directory.

    Returns:
        Tensors by name, as written, and descriptions of what the format does not hold.
    """
    import tensorflow as tf

    pretrained = model.pretrained
    heads = (model.head.part,) if model.head else model.pretraining_heads
    tensors = model.tensors("google", ("bert", *heads))
    names = sorted(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(directory / PREFIX),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tensors[name] for name in names],
    )
    config, dropped = pretrained.config, [] if model.head else model.dropped
    values = encoder_values(config)
    if config.hidden_act == "gelu_new":
        values["hidden_act"] = "gelu"  # The released code computes the tanh form.
    else:
        # Unknown to the released code: better an error there than the tanh form without notice.
        values["hidden_act"] = "gelu_python"
        dropped.append("hidden_act=gelu (erf), which google-research/bert does not know")
    if config.layer_norm_eps != 1e-12:
        dropped.append(f"layer_norm_eps={config.layer_norm_eps}: google-research/bert uses 1e-12")
    looks_lower_case = not pretrained.vocabulary.looks_cased()
    if config.do_lower_case != looks_lower_case:
        dropped.append(f"do_lower_case={config.do_lower_case}")
    if config.strip_accents not in (None, config.do_lower_case):
        dropped.append(f"strip_accents={config.strip_accents}")
    if config.max_input_chars_per_word != 200:
        # Read back by bert_tf; ignored by the released code.
        values["max_input_chars_per_word"] = config.max_input_chars_per_word
        dropped.append(
            f"max_input_chars_per_word={config.max_input_chars_per_word}: google-research/bert "
            "uses 200"
        )
    if model.head is not None:
        # Ignored by the released code.
        values |= {"architectures": [class_name(model)], **model.config_values()}
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (directory / "bert_config.json").write_text(text, encoding="utf-8")
    write_vocabulary(model, directory / "vocab.txt")
    return tensors, dropped


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Read back all tensors by name, with TensorFlow's checksums."""
    return read_bundle(directory / PREFIX)
