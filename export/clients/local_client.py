"""Client of a published model that is loaded into this process."""

import os
import pathlib

import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from bert_tf.storage import paths
from bert_tf.system.processes import FirstCalls
from export.clients.client import ModelClient
from export.clients.signature_defs import read_signatures
from tasks.data.examples import as_tensor
from tasks.data.readers.memory import jsonable
from tasks.graph.pipeline import load_published
from tasks.graph.published import version_directories


class LocalClient(ModelClient):
    """Client of the newest version of a published model, or of a given version."""

    @argument_names()
    def __init__(self, model_dir: os.PathLike | str) -> None:
        """Load the SavedModel.

        Args:
            model_dir: Directory of versions, or of one version.

        Raises:
            UserError: If there is no version, if it cannot be loaded, or if it is for a GPU and
                there is none.
        """
        path = pathlib.Path(paths.path_argument("model_dir", model_dir))
        if not path.is_dir():
            raise UserError(f"--model_dir={path}: no such directory")
        if (path / "saved_model.pb").exists():
            self.path = path
        elif found := version_directories(path):
            self.path = pathlib.Path(found[max(found)])
        else:
            raise UserError(
                f"--model_dir={path}: no published version; run bert-tf export_saved_model"
            )
        try:
            self._model = load_published(self.path)
            self._first_calls = FirstCalls()
            super().__init__(read_signatures(self.path))
        except (OSError, tf.errors.OpError) as error:
            raise UserError(
                f"{self.path}: not a loadable SavedModel: {tensorflow_reason(error)}"
            ) from None

    def _predict(self, inputs, signature):
        specs = signature.inputs
        try:
            outputs = self._first_calls.call(
                signature.name,
                self._model.signatures[signature.name],
                **{name: as_tensor(values, specs[name].rank) for name, values in inputs.items()},
            )
        except tf.errors.OpError as error:
            raise UserError(f"{self.path}: {tensorflow_reason(error)}") from None
        return {name: jsonable(values) for name, values in outputs.items()}
