"""Export of a trained pipeline as a SavedModel, by tracing the layers that were trained.

Shape suffixes: B texts, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from bert_tf.text import unicode_tables

if TYPE_CHECKING:
    from tasks.task_model import TaskModel

# If the rows of a weight matrix are a multiple of 4,096 bytes apart, they all map to the same few
# lines of the L1 cache. On AVX2, oneDNN then takes up to twice as long for products of up to 300
# rows (benchmarks/few_rows.py). One additional cache line (64 bytes) per row avoids the conflicts.
SLOW_WIDTH, FILLER = 1024, 16  # In float32 columns: 4,096 and 64 bytes.


def write_saved_model(
    model: TaskModel, directory: os.PathLike | str, precision: str = "float32"
) -> None:
    """Write a trained model as a SavedModel that maps strings to predictions.

    Signatures:

    - serving_default: the task's inputs, strings `(B,)` or `(B, C)` in UTF-8. Returns the task's
      prediction.
    - tokenize: the same inputs. Returns token ids, mask, segments and character offsets.
    - embed: "text" `(B,)`. Returns "pooled" and "mean", float32 `(B, H)`.
    - The others that the pipeline serves, such as next_sentence.

    Copies of vocab.txt, config.json, task.json and tokenizer.json are stored in assets.extra for
    inspection. The graph reads no file.

    In float32 the weights are stored in variables/. TensorFlow fuses operations on variables as it
    does on constants, but constants are copied dozens of times while a server loads them. In
    bfloat16 the weights are constants of the graph, since oneDNN then packs them once instead of in
    every matrix product.

    Args:
        model: The trained model.
        directory: Directory to write.
        precision: "float32", or "bfloat16" for the encoder's computation. Outputs are always
            float32.
    """
    # A tf.Module holds variables and functions, but no state of Keras.
    module = tf.Module(name="servable")
    if precision == "float32":
        pipeline = _in_float32(model.serving.pipeline, model.config)
        module.weights = [variable.value for variable in pipeline.model.variables]
    else:
        pipeline = _in_bfloat16(model.serving.pipeline, model.config)
    # TensorFlow would trace the tf.functions once more for saving, which takes seconds.
    module.functions = {
        name: function.get_concrete_function() for name, function in pipeline.signatures.items()
    }
    tf.saved_model.save(module, str(directory), signatures=module.functions)
    extra = pathlib.Path(directory) / "assets.extra"
    extra.mkdir()
    model.vocabulary.save(extra / "vocab.txt")
    for name, values in (
        ("config.json", model.config.to_dict()),
        ("task.json", model.task.to_dict()),
        (
            "tokenizer.json",
            {"tables_sha256": unicode_tables.sha256(), "unicode": unicode_tables.unicode_version()},
        ),
    ):
        (extra / name).write_text(
            json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _in_float32(pipeline, config):
    """Return the pipeline, with `FILLER` zero columns if the feed-forward width would be slow.

    The outputs do not change: the additional activations are gelu(0) = 0, and their rows of the
    second weight matrix are 0 as well.
    """
    if config.intermediate_size % SLOW_WIDTH:
        return pipeline
    wider = dataclasses.replace(config, intermediate_size=config.intermediate_size + FILLER)
    model = pipeline.task.build_model(wider)
    for variable, source in zip(model.variables, pipeline.model.variables, strict=True):
        missing = np.subtract(variable.shape, source.shape)
        variable.assign(np.pad(source.numpy(), [(0, count) for count in missing]))
    return type(pipeline)(pipeline.task, pipeline.tokenizer, model)


def _in_bfloat16(pipeline, config):
    """Return the pipeline with bfloat16 matrix products and with its weights as constants."""
    model = pipeline.task.build_model(config, "mixed_bfloat16")
    rounded = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Dense) and layer.compute_dtype == "bfloat16"
        for variable in (layer.kernel, layer.bias)
    }
    variables = [
        (variable, value.numpy(), tf.bfloat16 if id(variable) in rounded else variable.dtype)
        for variable, value in zip(model.variables, pipeline.model.variables, strict=True)
    ]

    # A separate function, so that the constants are stored once and shared by all signatures.
    @tf.function(input_signature=[], autograph=False)
    def constants():
        return [tf.constant(value, dtype) for _, value, dtype in variables]

    @contextlib.contextmanager
    def weights():
        scope = keras.StatelessScope()
        for (variable, *_), value in zip(variables, constants(), strict=True):
            # StatelessScope's state_mapping argument would cast the value to float32.
            scope.add_update((variable, value))
        with scope:
            yield

    return type(pipeline)(pipeline.task, pipeline.tokenizer, model, weights)
