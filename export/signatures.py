"""A trained pipeline as a SavedModel with named signatures. No second model: the same layers are
traced.

Legend: B texts.
"""

import json
import pathlib

import tensorflow as tf


def write_saved_model(trained, directory):
    """Writes a fine-tuned run as a SavedModel: strings in, the task's answer out.

    Signatures serving_default (the task's inputs -> its answer), tokenize (the same inputs -> what
    the model sees) and embed (text -> pooled, mean); inputs are [B] UTF-8 strings, outputs dicts
    with fixed names. vocab.txt, config.json and task.json go to assets.extra, for people; the graph
    needs no file.
    """
    module = _servable(trained)
    signatures = {
        "serving_default": module.answer,
        "tokenize": module.tokenize,
        "embed": module.embed,
    }
    tf.saved_model.save(module, str(directory), signatures=signatures)
    extra = pathlib.Path(directory) / "assets.extra"
    extra.mkdir()
    trained.run.vocabulary.save(extra / "vocab.txt")
    for name, values in (
        ("config.json", trained.run.config.to_dict()),
        ("task.json", trained.task.to_dict()),
    ):
        (extra / name).write_text(
            json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _servable(trained):
    """A module that holds the variables and the traced functions, and nothing of Keras."""
    pipeline = trained.pipeline
    texts = [tf.TensorSpec([None], tf.string, name=name) for name in pipeline.task.input_names]

    def signature(function, specs):
        def traced(*values):
            return function(**{spec.name: value for spec, value in zip(specs, values, strict=True)})

        return tf.function(traced, input_signature=specs, autograph=False)

    module = tf.Module(name="servable")
    module.weights = [variable.value for variable in pipeline.model.variables]
    module.answer = signature(pipeline.answer, texts)
    module.tokenize = signature(pipeline.tokenize, texts)
    module.embed = signature(pipeline.embed, [tf.TensorSpec([None], tf.string, name="text")])
    return module
