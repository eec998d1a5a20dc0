"""A trained pipeline as a SavedModel. No second model: the same layers are traced.

Legend: B texts.
"""

import contextlib
import dataclasses
import json
import pathlib

import keras
import numpy as np
import tensorflow as tf

from bert_tf.text import unicode_tables

# Where a weight's rows are a multiple of 4,096 bytes apart they all share the same few lines of a
# processor's first cache: oneDNN's product of up to 300 rows takes up to twice as long on AVX2
# (benchmarks/few_rows.py). One line more between them, and each has its own.
SLOW_WIDTH, FILLER = 1024, 16  # Of float32.


def write_saved_model(trained, directory, precision="float32"):
    """Writes a run as a SavedModel: strings in, the task's answer out.

    Signatures serving_default (the task's inputs -> its answer), tokenize (the same inputs -> what
    the model sees), embed (text -> pooled, mean) and what else the pipeline serves; inputs are [B]
    UTF-8 strings, outputs dicts with fixed names. vocab.txt, config.json, task.json and
    tokenizer.json go to assets.extra, for people; the graph needs no file.

    In float32 the weights stand in variables/: TensorFlow joins kernels as it does of constants,
    but those are copied dozens of times while a server loads them. In "bfloat16" products and what
    stands between them are computed in that, outputs are float32, and the weights are constants of
    the graph, which oneDNN lays out once instead of at each product.
    """
    module = tf.Module(name="servable")  # Holds variables and functions, and nothing of Keras.
    if precision == "float32":
        pipeline = _in_float32(trained)
        module.weights = [variable.value for variable in pipeline.model.variables]
    else:
        pipeline = _in_bfloat16(trained)
    module.functions = pipeline.signatures()
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


def _in_float32(trained):
    """The trained pipeline; its feed-forward part a little wider, if that makes it faster.

    Zeros fill the new places, so that nothing changes: gelu(0) is 0, and that by zeros adds 0.
    """
    config = trained.run.config
    if config.intermediate_size % SLOW_WIDTH:
        return trained.pipeline
    wider = dataclasses.replace(config, intermediate_size=config.intermediate_size + FILLER)
    model = trained.task.build_model(wider)
    for variable, source in zip(model.variables, trained.pipeline.model.variables, strict=True):
        missing = np.subtract(variable.shape, source.shape)
        variable.assign(np.pad(source.numpy(), [(0, count) for count in missing]))
    return type(trained.pipeline)(trained.task, trained.pipeline.tokenizer, model)


def _in_bfloat16(trained):
    """The trained pipeline with its products in bfloat16 and its weights as constants."""
    model = trained.task.build_model(trained.run.config, "mixed_bfloat16")
    rounded = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Dense) and layer.compute_dtype == "bfloat16"
        for variable in (layer.kernel, layer.bias)
    }
    variables = [
        (variable, value.numpy(), tf.bfloat16 if id(variable) in rounded else variable.dtype)
        for variable, value in zip(model.variables, trained.pipeline.model.variables, strict=True)
    ]

    # A function of its own, so that they stand in the file once for all signatures.
    @tf.function(input_signature=[], autograph=False)
    def constants():
        return [tf.constant(value, dtype) for _, value, dtype in variables]

    @contextlib.contextmanager
    def weights():
        scope = keras.StatelessScope()
        for (variable, *_), value in zip(variables, constants(), strict=True):
            # Not as its argument, which would turn it into the variable's float32.
            scope.add_update((variable, value))
        with scope:
            yield

    return type(trained.pipeline)(trained.task, trained.pipeline.tokenizer, model, weights)
