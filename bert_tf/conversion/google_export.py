"""Writer of releases in the form of google-research/bert."""

import pathlib

from bert_tf.config import strips_accents
from bert_tf.conversion.exported_model import ExportedModel, Written
from bert_tf.conversion.huggingface_export import class_name, encoder_values
from bert_tf.runs.checkpoints import write_bundle
from bert_tf.storage import files
from bert_tf.weights.google import RELEASED


def write(model: ExportedModel, directory: pathlib.Path) -> Written:
    """Write bert_config.json, vocab.txt and bert_model.ckpt.* to an empty directory.

    A head is named as in run_classifier.py, or run_squad.py for spans.
    """
    pretrained = model.pretrained
    tensors = model.tensors("google", ("bert", *model.heads))
    write_bundle(directory / RELEASED, dict(sorted(tensors.items())))
    config, dropped = pretrained.config, [] if model.kind else model.dropped
    # Read back by bert_tf; ignored by the released code.
    values = encoder_values(config) | config.tokenizer_settings
    if config.hidden_act == "gelu_new":
        values["hidden_act"] = "gelu"  # The released code computes the tanh form.
    else:
        # Unknown to the released code: better an error there than the tanh form without notice.
        values["hidden_act"] = "gelu_python"
        dropped.append("hidden_act=gelu (erf), which google-research/bert does not know")
    if config.layer_norm_eps != 1e-12:
        dropped.append(f"layer_norm_eps={config.layer_norm_eps}: google-research/bert uses 1e-12")
    strips = strips_accents(config.do_lower_case, config.strip_accents)
    if strips != config.do_lower_case:
        dropped.append(f"strip_accents={strips}: google-research/bert strips accents of lower case")
    if config.max_input_chars_per_word != 200:
        dropped.append(
            f"max_input_chars_per_word={config.max_input_chars_per_word}: google-research/bert "
            "uses 200"
        )
    if model.kind:
        # Ignored by the released code.
        values |= {"architectures": [class_name(model)], **model.config_values()}
    files.atomic_write_json(directory / "bert_config.json", values)
    pretrained.vocabulary.save(directory / "vocab.txt")
    return tensors, dropped
