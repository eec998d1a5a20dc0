"""Traced functions from strings to predictions, called with Python strings.

Shape suffixes: N rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations of published tokenizers.

from bert_tf.errors import UserError
from bert_tf.runs.checkpoints import load_saved_model
from bert_tf.system.processes import FirstCalls
from bert_tf.text.encoder_inputs import to_padded
from bert_tf.text.packing import Packed
from tasks.base.task import Task, task_from_dict
from tasks.data.examples import Examples
from tasks.data.readers.memory import jsonable
from tasks.graph.pipeline import Pipeline
from tasks.graph.published import published_device, published_task

ROWS_PER_CALL = 1024  # Bounds memory.


class Serving:
    """The signatures of a task, called with Python strings.

    Args:
        task: The task.
        signatures: Functions of string tensors by position, by name of the signature.
    """

    def __init__(
        self, task: Task, signatures: Mapping[str, tf.types.experimental.GenericFunction]
    ) -> None:
        self.task, self.signatures = task, signatures
        self._first_calls = FirstCalls()

    def call(
        self, signature: str, columns: Mapping[str, list], batch_size: int = ROWS_PER_CALL
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        Args:
            signature: Its name.
            columns: N strings, or lists of strings, by input name.
            batch_size: Rows per call.

        Returns:
            `{name: array (N, ...)}`, with `str` for strings. Batches of different widths are padded
            with "" and -1.
        """
        function = self.signatures[signature]
        parts = [
            {
                name: _with_str(values.numpy())
                for name, values in self._first_calls.call(
                    signature, function, *texts.values()
                ).items()
            }
            for texts in Examples(dict(columns), []).slices(batch_size)
        ]
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def predict_rows(self, columns: Mapping[str, list], batch_size: int) -> list[dict[str, Any]]:
        """Return the prediction per row as a dict of JSON types, without padding; see `call`."""
        outputs = self.call("serving_default", columns, batch_size)
        rows = zip(*(values.tolist() for values in outputs.values()), strict=True)
        return [self.task.strip_padding(dict(zip(outputs, row, strict=True))) for row in rows]

    def output_types(self) -> dict[str, tuple[str, int]]:
        """Return the name of the dtype and the number of list levels per predicted output."""
        function = self.signatures["serving_default"].get_concrete_function()
        return {
            name: (spec.dtype.name, spec.shape.rank - 1)
            for name, spec in function.structured_outputs.items()
        }


class ServingFunctions(Serving):
    """The signatures of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.task, pipeline.signatures)
        self.pipeline = pipeline

    def attention(self, columns: Mapping[str, list]) -> list[tuple[list[str], np.ndarray]]:
        """Return tokens and attention probabilities per sequence; see `TaskModel.attention`."""
        entries = self.pipeline.vocabulary.entries
        maps = []
        for texts in Examples(dict(columns), []).slices():
            packed = self.pipeline.encode(**texts).packed
            for row in range(int(packed.input_ids.nrows())):
                one = Packed(*(ragged[row : row + 1] for ragged in packed[:2]))
                inputs = to_padded(one, self.pipeline.vocabulary)
                tokens = [entries[number] for number in inputs["input_ids"][0].numpy()]
                maps.append((tokens, self._attention(inputs).numpy()))
        return maps

    @tf.function(reduce_retracing=True, autograph=False)
    def _attention(self, inputs: dict[str, tf.Tensor]) -> Any:
        outputs = self.pipeline.model.encoder(inputs, output_hidden_states=True)
        return tf.stack([of_layer[0] for of_layer in outputs["attentions"]])


def load_published(version: str | os.PathLike) -> Any:
    """Return `tf.saved_model.load` of a version, on the device that it was published for.

    Raises:
        UserError: If that is a GPU, and TensorFlow sees none.
        OSError: If there is no SavedModel.
        tf.errors.OpError: If it is damaged.
    """
    device = published_device(version)
    if device == "gpu" and not tf.config.get_visible_devices("GPU"):
        raise UserError(
            f"{version}: was exported with --device=gpu, and TensorFlow sees no GPU; export the "
            "run with --device=cpu"
        )
    # Otherwise a GPU would hold the variables of a graph for CPUs.
    with tf.device("CPU:0" if device == "cpu" else None):
        return load_saved_model(version)


class PublishedModel(Serving):
    """The default signature of a published version.

    Args:
        version: Directory of the version.

    Raises:
        UserError: If it cannot be loaded.
    """

    def __init__(self, version: str) -> None:
        task = task_from_dict(published_task(version))
        try:
            # Kept, since a signature does not keep the variables of its model alive.
            self._model = load_published(version)
            served = self._model.signatures["serving_default"]
        except (OSError, KeyError, tf.errors.OpError) as error:
            raise UserError(f"{version}: not a published model: {error}") from None
        names, specs = task.input_names, served.structured_input_signature[1]

        @tf.function(input_signature=[specs[name] for name in names], autograph=False)
        def by_position(*texts):
            return served(**dict(zip(names, texts, strict=True)))

        super().__init__(task, {"serving_default": by_position})


def _with_str(values):
    """Return an array with `str` for bytes."""
    if values.dtype != object:
        return values
    return np.array(jsonable(values), object).reshape(values.shape)


def _joined(parts):
    """Concatenate arrays along axis 0, padded to the largest of each other axis."""
    shape = np.max([part.shape for part in parts], axis=0)
    filler = "" if parts[0].dtype == object else -1

    def padded(part):
        missing = (shape - part.shape)[1:]
        return np.pad(part, [(0, 0), *((0, size) for size in missing)], constant_values=filler)

    return np.concatenate([padded(part) for part in parts])
