"""A published model, opened as a client sees it."""

import pathlib

import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf.errors import UserError
from export.publishing import versions
from tasks.examples import as_tensor
from tasks.prediction import jsonable


class ServedDirectory:
    """The newest version of a published model, loaded into this process."""

    def __init__(self, model_dir):
        path = pathlib.Path(model_dir)
        if not path.is_dir():
            raise UserError(f"--model_dir={path}: no such directory")
        numbers = versions(path)
        if not numbers:
            raise UserError(
                f"--model_dir={path}: no version there; export.export_saved_model makes one"
            )
        self.path = path / str(numbers[-1])
        try:
            self._model = tf.saved_model.load(str(self.path))
        except (OSError, tf.errors.OpError) as error:
            raise UserError(f"{self.path}: not a loadable SavedModel: {error}") from None

    def ask(self, inputs, signature="serving_default"):
        """{input: strings} -> {output: nested lists}. Raises UserError at wrong names.

        An input [B, C] takes lists of strings, of any length each; strings alone are one such list.
        """
        signatures = self._model.signatures
        if signature not in signatures:
            raise UserError(f"--signature={signature}: there are {', '.join(sorted(signatures))}")
        specs = signatures[signature].structured_input_signature[1]
        if sorted(inputs) != sorted(specs):
            raise UserError(
                f"--input: {signature} wants {', '.join(sorted(specs))}, got "
                f"{', '.join(sorted(inputs)) or 'none'}"
            )
        inputs = {
            name: [values] if specs[name].shape.rank == 2 and _are_strings(values) else values
            for name, values in inputs.items()
        }
        if len({len(values) for values in inputs.values()}) > 1:
            raise UserError(
                "--input: every name wants the same number of values, got "
                + ", ".join(f"{len(values)} of {name}" for name, values in inputs.items())
            )
        answer = signatures[signature](
            **{name: as_tensor(values, specs[name].shape.rank) for name, values in inputs.items()}
        )
        return {name: jsonable(answer[name]) for name in sorted(answer)}


def _are_strings(values):
    return bool(values) and isinstance(values[0], str | bytes)
