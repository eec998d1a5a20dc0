"""Export of a trained pipeline as a SavedModel, by tracing the layers that were trained.

Shape suffixes: B texts, H hidden size.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from bert_tf.model.encoder import Encoder
from bert_tf.storage import files, format_versions
from bert_tf.text import unicode_tables
from export.graph import placement
from export.graph.served_encoder import ServedEncoder, has_packed_products

if TYPE_CHECKING:
    from tasks.graph.pipeline import Pipeline
    from tasks.model.task_model import TaskModel


def write_saved_model(
    model: TaskModel,
    directory: os.PathLike | str,
    precision: str = "float32",
    portable: bool = False,
    device: str = "cpu",
) -> Pipeline:
    """Write a trained model as a SavedModel that maps strings to predictions.

    Signatures:

    - serving_default: the task's inputs, strings `(B,)` or `(B, C)` in UTF-8. Returns the task's
      prediction.
    - tokenize: the same inputs. Returns token ids, mask, segments and character offsets.
    - embed: "text" `(B,)`. Returns "pooled" and "mean", float32 `(B, H)`.
    - The others that the pipeline serves, such as next_sentence.

    Copies of vocab.txt, config.json, task.json and tokenizer.json are stored in assets.extra for
    inspection, with export.json, which names device and precision. The graph reads no file.

    The weights are stored in variables/. A graph for CPUs is that of `ServedEncoder` if this
    TensorFlow has packed products, otherwise that of the trained encoder.

    Arguments as for `export.publish`. Outputs are always float32.

    Returns:
        The pipeline that was written.
    """
    # A tf.Module holds variables and functions, but no state of Keras.
    module = tf.Module(name="servable")
    pipeline = served_pipeline(model, precision, portable, device)
    # TensorFlow would trace the tf.functions once more for saving, which takes seconds.
    module.functions = {
        name: function.get_concrete_function() for name, function in pipeline.signatures.items()
    }
    module.weights = [_variables(function) for function in module.functions.values()]
    tf.saved_model.save(module, str(directory), signatures=module.functions)
    placement.pin_saved_model(directory, device)
    extra = pathlib.Path(directory) / "assets.extra"
    extra.mkdir()
    model.vocabulary.save(extra / "vocab.txt")
    for name, values in (
        ("config.json", model.config.to_dict()),
        ("task.json", format_versions.with_version(model.task.to_dict())),
        (
            "export.json",
            format_versions.with_version({"device": device, "precision": precision}),
        ),
        (
            "tokenizer.json",
            {"tables_sha256": unicode_tables.sha256(), "unicode": unicode_tables.unicode_version()},
        ),
    ):
        files.atomic_write_json(extra / name, values)
    return pipeline


class PortableEncoder:
    """The trained encoder as it is, with float32 outputs, for graphs of standard operations.

    Args:
        encoder: The trained encoder.
        precision: "float32"; or "bfloat16" or "float16", in which the weights of products are
            stored too.

    Attributes:
        short_tokens: 0, since no form of the graph is for short texts; see `ServedEncoder`.
    """

    short_tokens = 0

    def __init__(self, encoder: Encoder, precision: str) -> None:
        self._encoder = encoder
        if encoder.dtype_policy.name != precision:
            self._encoder = Encoder(encoder.config, dtype=precision)
            self._encoder.build()
            for variable, trained in zip(self._encoder.weights, encoder.weights, strict=True):
                variable.assign(tf.cast(trained, variable.dtype))
        self.config, self.embeddings = encoder.config, self._encoder.embeddings
        self.dropout_seed = self._encoder.dropout_seed

    def __call__(
        self, inputs: Mapping[str, tf.Tensor], **options: Any
    ) -> dict[str, tf.Tensor | list[tf.Tensor]]:
        """Run the encoder; see `Encoder`."""
        # Not as a layer, of which Keras would round token ids that are floats.
        outputs = self._encoder.call(inputs, **options)
        return tf.nest.map_structure(lambda values: tf.cast(values, tf.float32), outputs)


def served_pipeline(
    model: TaskModel, precision: str, portable: bool = False, device: str = "cpu"
) -> Pipeline:
    """Return the pipeline with the served encoder in its model, which shares all other layers.

    Arguments as for `export.publish`.
    """
    pipeline = model.serving.pipeline
    is_packed = device == "cpu" and not portable and has_packed_products(precision)
    with tf.device(placement.CPU if device == "cpu" else None):
        encoder = (ServedEncoder if is_packed else PortableEncoder)(model.encoder, precision)
    # copy.copy of a Keras model writes and reads all of it, and asks for a complete get_config.
    network = object.__new__(type(pipeline.model))
    vars(network).update(vars(pipeline.model), encoder=encoder)
    served = type(pipeline)(pipeline.task, pipeline.tokenizer, network, encoder.short_tokens)
    served.token_functions = {
        name: placement.on_cpu(function)
        if device == "cpu"
        else placement.on_gpu(function, model.task.max_seq_length)
        for name, function in served.token_functions.items()
    }
    return served


def _variables(function):
    """Return the variables of a function in the order of their capture.

    `function.variables` has another order in each process, and files would differ with it.
    """
    variables = {id(variable.handle): variable for variable in function.variables}
    return [variables[id(of)] for of in function.graph.external_captures if id(of) in variables]
