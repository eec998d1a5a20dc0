"""Client of a published model that is loaded into this process."""

import os
import pathlib

import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf.errors import UserError
from export.client import ClientSignature, ModelClient, TensorSpec
from export.publishing import versions
from tasks.examples import as_tensor
from tasks.prediction import jsonable


class LocalClient(ModelClient):
    """Client of the newest version of a published model, or of a given version."""

    def __init__(self, model_dir: os.PathLike | str) -> None:
        """Load the SavedModel.

        Args:
            model_dir: Directory of versions, or of one version.

        Raises:
            UserError: If there is no version, or if it cannot be loaded.
        """
        path = pathlib.Path(model_dir)
        if not path.is_dir():
            raise UserError(f"--model_dir={path}: no such directory")
        if (path / "saved_model.pb").exists():
            self.path = path
        elif numbers := versions(path):
            self.path = path / str(numbers[-1])
        else:
            raise UserError(
                f"--model_dir={path}: no published version; run export.export_saved_model"
            )
        try:
            self._model = tf.saved_model.load(str(self.path))
        except (OSError, tf.errors.OpError) as error:
            raise UserError(f"{self.path}: not a loadable SavedModel: {error}") from None
        self.signatures = {
            name: ClientSignature(
                _specs(function.structured_input_signature[1]), _specs(function.structured_outputs)
            )
            for name, function in self._model.signatures.items()
        }

    def _predict(self, inputs, signature):
        specs = self.signatures[signature].inputs
        try:
            outputs = self._model.signatures[signature](
                **{name: as_tensor(values, specs[name].rank) for name, values in inputs.items()}
            )
        except tf.errors.OpError as error:
            raise UserError(f"{self.path}: {error.message}") from None
        return {name: jsonable(values) for name, values in outputs.items()}


def _specs(specs):
    return {name: TensorSpec(spec.dtype.name, spec.shape.rank) for name, spec in specs.items()}
