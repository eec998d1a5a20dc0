"""Reference page of a model's signatures (SIGNATURES.md), with requests and responses."""

import json
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence

import numpy as np

from export.clients.signatures import Signature
from export.package import documents
from tasks.base.task import SignatureSpec

SHOWN = 4  # Number of entries shown of a list that is longer than twice that.
DIGITS = 4  # Significant digits of numbers.


def signature_page(
    name: str,
    signatures: Sequence[Signature],
    specs: Mapping[str, SignatureSpec],
    predictions: Mapping[str, Mapping[str, np.ndarray]],
) -> str:
    """Return the page as Markdown, with the outputs for each signature's example request."""
    url = f"http://localhost:8501/v1/models/{urllib.parse.quote(name, safe='')}:predict"
    return documents.render(
        "SIGNATURES.md",
        name=name,
        digits=DIGITS,
        shown=SHOWN,
        url=shlex.quote(url),
        signatures=[
            _described(signature, specs[signature.name], predictions[signature.name])
            for signature in signatures
        ],
    )


def _described(signature, spec, prediction):
    """Return what the page shows of a signature, as strings."""
    descriptions = {name: output.description for name, output in spec.outputs.items()}
    given = [name for name in spec.outputs if name in signature.outputs]
    inputs = signature.example()
    outputs = {output: _shown(prediction[output].tolist()) for output in given}
    named = {} if signature.name == "serving_default" else {"signature_name": signature.name}
    return {
        "name": signature.name,
        "description": spec.description,
        "inputs": _table(signature.inputs.values(), spec.inputs),
        "outputs": _table([signature.outputs[output] for output in given], descriptions),
        "rows": {
            "request": _as_argument({**named, "instances": _unnamed(inputs) or _rows(inputs)}),
            "response": _json("predictions", _unnamed(outputs) or _rows(outputs)),
        },
        "columns": {
            "request": _as_argument({**named, "inputs": inputs}),
            "response": _json("outputs", _unnamed(outputs) or outputs),
        },
        "example": {key: json.dumps(values) for key, values in inputs.items()},
    }


def _table(tensors, descriptions):
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": ["B", *("*" if size is None else size for size in (tensor.shape or ())[1:])],
            "description": descriptions[tensor.name],
        }
        for tensor in tensors
    ]


def _unnamed(columns):
    """Return the only column, or `None`. In the REST API, a single input or output has no name."""
    return next(iter(columns.values())) if len(columns) == 1 else None


def _rows(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _shown(value, is_rows=True):
    """Prepare a nested list for JSON: decode text, round numbers and cut long rows."""
    if isinstance(value, list):
        shown = [_shown(entry, False) for entry in value]
        if is_rows or len(shown) <= 2 * SHOWN:
            return shown
        return [*shown[:SHOWN], f"... {len(shown) - SHOWN} more"]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return (
        float(np.format_float_positional(value, DIGITS, fractional=False))
        if isinstance(value, float)
        else value
    )


def _json(key, content):
    """Return a JSON object of one key, with one line per row or column."""
    if isinstance(content, dict):
        opening, closing = "{", "}"
        lines = [f"{json.dumps(name)}: {_dumps(entry)}" for name, entry in content.items()]
    else:
        opening, closing = "[", "]"
        lines = [_dumps(entry) for entry in content]
    return f'{{"{key}": {opening}\n  ' + ",\n  ".join(lines) + f"\n{closing}}}"


def _dumps(value):
    return json.dumps(value, ensure_ascii=False)


def _as_argument(value):
    return shlex.quote(_dumps(value))
