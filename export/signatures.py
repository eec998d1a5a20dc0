"""A trained pipeline as a SavedModel. No second model: the same layers are traced.

Legend: B texts.
"""

import json
import pathlib

import tensorflow as tf

from bert_tf.text import unicode_tables


def write_saved_model(trained, directory):
    """Writes a fine-tuned run as a SavedModel: strings in, the task's answer out.

    Signatures serving_default (the task's inputs -> its answer), tokenize (the same inputs -> what
    the model sees) and embed (text -> pooled, mean); inputs are [B] UTF-8 strings, outputs dicts
    with fixed names. The weights stand once, in variables/: TensorFlow joins kernels as it does of
    constants, but those are copied dozens of times while a server loads them. vocab.txt,
    config.json, task.json and tokenizer.json go to assets.extra, for people; the graph needs no
    file.
    """
    module = tf.Module(name="servable")  # Holds variables and functions, and nothing of Keras.
    module.weights = [variable.value for variable in trained.pipeline.model.variables]
    module.functions = trained.pipeline.signatures()
    tf.saved_model.save(module, str(directory), signatures=module.functions)
    extra = pathlib.Path(directory) / "assets.extra"
    extra.mkdir()
    trained.run.vocabulary.save(extra / "vocab.txt")
    for name, values in (
        ("config.json", trained.run.config.to_dict()),
        ("task.json", trained.task.to_dict()),
        (
            "tokenizer.json",
            {"tables_sha256": unicode_tables.sha256(), "unicode": unicode_tables.unicode_version()},
        ),
    ):
        (extra / name).write_text(
            json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
