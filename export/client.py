"""A published model as its clients see it, wherever it runs: what is checked before it is asked."""

import dataclasses

from bert_tf.errors import UserError


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor's type, by TensorFlow's name for it, and its rank, None if any will do."""

    dtype: str
    rank: int | None


@dataclasses.dataclass(frozen=True)
class ClientSignature:
    """The TensorSpecs of inputs and outputs by their names."""

    inputs: dict
    outputs: dict


class ModelClient:
    """What all kinds share. A kind has `signatures` and `_predict`."""

    signatures: dict

    def predict(self, inputs, signature="serving_default"):
        """{input: strings} -> {output: nested lists}. Raises UserError at wrong names.

        An input [B, C] takes lists of strings, of any length each; strings alone are one such list.
        """
        if signature not in self.signatures:
            raise UserError(
                f"--signature={signature}: there are {', '.join(sorted(self.signatures))}"
            )
        inputs = _checked(inputs, signature, self.signatures[signature].inputs)
        outputs = self._predict(inputs, signature)
        return {name: outputs[name] for name in sorted(outputs)}

    def _predict(self, inputs, signature):
        """The answer to checked inputs, {name: strings as bytes, or lists of them}."""
        raise NotImplementedError


def is_public_signature(signature_name):
    """Whether it is a signature: SavedModels keep their initialization among them."""
    return not signature_name.startswith("__saved_model_")


def _checked(inputs, signature, specs):
    if sorted(inputs) != sorted(specs):
        raise UserError(
            f"--input: {signature} wants {', '.join(sorted(specs))}, got "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    for name, spec in specs.items():
        if spec.dtype != "string" or spec.rank not in (None, 1, 2):
            raise UserError(
                f"--signature={signature}: {name} is {spec.dtype} of rank {spec.rank}; only "
                "strings and lists of strings can be asked here"
            )
    inputs = {
        name: [values] if specs[name].rank == 2 and _are_strings(values) else values
        for name, values in inputs.items()
    }
    if len({len(values) for values in inputs.values()}) > 1:
        raise UserError(
            "--input: every name wants the same number of values, got "
            + ", ".join(f"{len(values)} of {name}" for name, values in inputs.items())
        )
    return {name: _as_bytes(values) for name, values in inputs.items()}


def _are_strings(values):
    return bool(values) and isinstance(values[0], str | bytes)


def _as_bytes(value):
    if isinstance(value, str):
        return value.encode("utf-8")
    return value if isinstance(value, bytes) else [_as_bytes(entry) for entry in value]
