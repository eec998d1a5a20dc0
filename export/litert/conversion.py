"""Conversion of a trained model for LiteRT (TensorFlow Lite), from token ids to head outputs.

Shape suffixes: B texts, L tokens of the longest text.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

INPUTS = ("input_ids", "input_mask", "segment_ids")
QUANTIZATIONS = ("none", "float16", "dynamic")


def convert(model: TaskModel, quantize: str = "none") -> bytes:
    """Convert the token functions of a trained model (`Pipeline.token_functions`).

    The signatures have the inputs input_ids, input_mask and segment_ids, int32 `(B, L)`. B and L
    may be resized. They consist of built-in operations and share their weights.

    With `quantize`, weights are stored in float16 ("float16"), or weight matrices are stored and
    multiplied in int8 ("dynamic").
    """
    functions = model.serving.pipeline.token_functions
    signatures = {name: _traced(function) for name, function in functions.items()}
    with tempfile.TemporaryDirectory() as directory:
        module = tf.Module(name="litert")
        module.functions = signatures
        module.weights = [variable.value for variable in model.network.variables]
        tf.saved_model.save(module, directory, signatures=signatures)
        converter = tf.lite.TFLiteConverter.from_saved_model(
            directory, signature_keys=list(signatures)
        )
        if quantize != "none":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantize == "float16":
            converter.target_spec.supported_types = [tf.float16]
        return converter.convert()


def _traced(function):
    """Return the concrete function of token ids, mask and segments, as positional arguments."""
    # With `jit_compile`, layers choose the forms that XLA compiles. LiteRT has the operations of
    # these; it has neither tf.cond nor batch normalization of any number of channels.
    return tf.function(
        lambda *tokens: function(dict(zip(INPUTS, tokens, strict=True))),
        input_signature=[tf.TensorSpec([None, None], tf.int32, name=name) for name in INPUTS],
        autograph=False,
        jit_compile=True,
    ).get_concrete_function()
