"""Common base of the clients of published models, with the checks of requests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_tf.errors import UserError, argument_names
from bert_tf.system.scalars import to_python
from export.clients.signatures import Signature

MAX_TIMEOUT = 1_000_000  # 11 days. Sockets count milliseconds in 32 bits.


def check_timeout(timeout: Any) -> float:
    """Return a time limit in seconds.

    Raises:
        UserError: If it is not a number that sockets accept.
    """
    seconds = to_python(timeout)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= MAX_TIMEOUT:
        shown = f"{seconds:g}" if isinstance(seconds, float) else repr(seconds)
        raise UserError(
            f"--timeout={shown:.80}: expected a finite number > 0 of seconds, at most "
            f"{MAX_TIMEOUT:,}"
        )
    return seconds


class ModelClient:
    """Base class of clients. Subclasses implement `_predict`.

    Attributes:
        signatures: Signatures of the model by name.
    """

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self.signatures = {signature.name: signature for signature in signatures}

    @argument_names()
    def predict(
        self, inputs: Mapping[str, Sequence], signature: str = "serving_default"
    ) -> dict[str, Any]:
        """Send one request and return the response.

        Args:
            inputs: Input names with one string per row, as `str` or `bytes`. Inputs of shape (B, C)
                take one list of strings per row, of any length; a plain list of strings is one row.
            signature: Name of the signature.

        Returns:
            Output names, in alphabetical order, with their values as nested lists.

        Raises:
            UserError: If a name or the number of values is wrong, or if the request fails.
        """
        if signature not in self.signatures:
            raise UserError(
                f"--signature={signature}: expected one of {', '.join(sorted(self.signatures))}"
            )
        called = self.signatures[signature]
        outputs = self._predict(_checked(inputs, called), called)
        return {name: outputs[name] for name in sorted(outputs)}

    def _predict(self, inputs: dict[str, list], signature: Signature) -> dict[str, Any]:
        """Return the outputs for checked inputs, whose strings are bytes."""
        raise NotImplementedError


def _checked(inputs, signature):
    specs = signature.inputs
    if sorted(inputs) != sorted(specs):
        raise UserError(
            f"--input: signature {signature.name}: expected {', '.join(sorted(specs))}; received "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    for name, spec in specs.items():
        if spec.dtype != "string" or spec.rank not in (None, 1, 2):
            raise UserError(
                f"--signature={signature.name}: {name} is {spec.dtype} of rank {spec.rank}; only "
                "strings and lists of strings are supported"
            )
    for name, values in inputs.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise _wrong_type(name, "a list of strings", values)
    inputs = {
        name: [values] if specs[name].rank == 2 and _are_strings(values) else values
        for name, values in inputs.items()
    }
    if len({len(values) for values in inputs.values()}) > 1:
        raise UserError(
            "--input: expected the same number of values per name, received "
            + ", ".join(f"{len(values)} of {name}" for name, values in inputs.items())
        )
    return {name: _as_bytes(values, specs[name].rank, name) for name, values in inputs.items()}


def _are_strings(values):
    return isinstance(next(iter(values), None), str | bytes)


def _as_bytes(value, rank, where):
    """Return strings as bytes, in as many levels of lists as the rank, or any number if `None`."""
    if isinstance(value, str | bytes) and not rank:
        try:
            return value.encode("utf-8") if isinstance(value, str) else value
        except UnicodeEncodeError:
            raise UserError(f"--input: {where}: contains half of a surrogate pair") from None
    if isinstance(value, str | bytes) or rank == 0 or not hasattr(value, "__iter__"):
        raise _wrong_type(where, "a list of strings" if rank else "a string", value)
    inner = rank and rank - 1
    return [_as_bytes(entry, inner, f"{where}[{row}]") for row, entry in enumerate(value)]


def _wrong_type(where, expected, value):
    return UserError(
        f"--input: {where}: expected {expected}, received {type(value).__name__} {value!r:.60}"
    )
