"""Client of a LiteRT file, whose tokenizer and postprocessing run in TensorFlow.

Shape suffixes: W windows, L tokens of the longest window.
"""

import os
import threading

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from bert_tf.storage import paths
from bert_tf.system.processes import count_processors
from bert_tf.text.encoder_inputs import flat_to_padded
from bert_tf.text.tokenizer import Tokenizer
from export.clients.client import ModelClient
from export.clients.signatures import Signature, Tensor
from export.litert.archive import INPUTS, Contents, check_runtime
from tasks.base.task import task_from_dict
from tasks.data.examples import as_tensor
from tasks.data.readers.memory import jsonable
from tasks.graph.pipeline import Pipeline
from tasks.model.loading import model_class


class LiteRTClient(ModelClient):
    """Client of a LiteRT file, with the requests and responses of the published SavedModel."""

    @argument_names()
    def __init__(self, path: str | os.PathLike) -> None:
        """Load the file.

        Args:
            path: File of bert-tf export_litert.

        Raises:
            UserError: If it is not such a file, or if ai-edge-litert is not installed.
        """
        self.path = paths.path_argument("path", path, "a file of bert-tf export_litert")
        self._pipeline = load_pipeline(self.path)
        super().__init__(signatures_of(self._pipeline))

    def _predict(self, inputs, signature):
        tensors = [as_tensor(inputs[name], spec.rank) for name, spec in signature.inputs.items()]
        try:
            outputs = self._pipeline.signatures[signature.name](*tensors)
        except tf.errors.OpError as error:
            raise UserError(f"{self.path}: {tensorflow_reason(error)}") from None
        return {name: jsonable(values) for name, values in outputs.items()}


def load_pipeline(path: str | os.PathLike) -> Pipeline:
    """Return the pipeline of a LiteRT file, from strings to predictions.

    Raises:
        UserError: If it is not such a file, or if ai-edge-litert is not installed.
    """
    check_runtime(f"--litert={path}")
    from ai_edge_litert.interpreter import Interpreter

    contents = Contents.read(path)
    try:
        interpreter = Interpreter(model_path=os.fspath(path), num_threads=count_processors())
    except ValueError as error:
        raise UserError(f"{path}: not a loadable LiteRT model: {error}") from None
    task = task_from_dict(contents.task)
    tokenizer = Tokenizer.from_config(contents.config, contents.vocabulary)
    pipeline = model_class(task).pipeline_class(task, tokenizer, None)
    lock = threading.Lock()
    pipeline.token_functions = {
        name: _token_function(interpreter.get_signature_runner(name), lock)
        for name in interpreter.get_signature_list()
    }
    return pipeline


def signatures_of(pipeline: Pipeline) -> tuple[Signature, ...]:
    """Return the signatures of a pipeline."""
    return tuple(
        Signature(
            name,
            _tensors({spec.name: spec for spec in function.input_signature}),
            _tensors(function.get_concrete_function().structured_outputs),
        )
        for name, function in pipeline.signatures.items()
    )


def _tensors(specs):
    return {
        name: Tensor(name, spec.dtype.name, tuple(spec.shape.as_list()))
        for name, spec in specs.items()
    }


def _token_function(runner, lock):
    """Return the function of a LiteRT signature, from flat inputs to outputs `(W, ...)` by name.

    An interpreter keeps the tensors of one call, of any signature. The lock makes calls of several
    threads wait for each other; otherwise they would receive outputs of each other's inputs.
    """
    specs = runner.get_output_details()

    def run(*tokens_WL):
        if not len(tokens_WL[0]):  # LiteRT has no tensors without elements.
            shapes = [np.maximum(spec["shape_signature"], 0) for spec in specs.values()]
            return [
                np.zeros(shape, spec["dtype"])
                for shape, spec in zip(shapes, specs.values(), strict=True)
            ]
        with lock:
            outputs = runner(**dict(zip(INPUTS, tokens_WL, strict=True)))
        return [outputs[name] for name in specs]

    def function(inputs):
        padded = flat_to_padded(inputs)
        outputs = tf.numpy_function(
            run,
            [padded[name] for name in INPUTS],
            [tf.as_dtype(spec["dtype"]) for spec in specs.values()],
        )
        return {
            name: tf.ensure_shape(
                output, [None if size < 0 else size for size in spec["shape_signature"]]
            )
            for (name, spec), output in zip(specs.items(), outputs, strict=True)
        }

    return function
