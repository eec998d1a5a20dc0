"""Reference page of a model's signatures (SIGNATURES.md), with requests and responses."""

from __future__ import annotations

import json
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from export import field_docs
from export.tf_serving_config import printable

if TYPE_CHECKING:
    from export.signature_defs import SignatureInfo

SHOWN = 4  # Number of entries shown of a list that is longer than twice that.
DIGITS = 4  # Significant digits of numbers.

_PAGE = """\
# Signatures of {name}

Requests consist of UTF-8 strings. Responses are in the order of the request's rows. In shapes, B is
the number of rows and `*` a size that depends on the request; shorter rows are padded. Character
positions count Unicode code points from 0 in the string as it was sent.

TensorFlow Serving has REST at port 8501 and gRPC at 8500. In JSON, a string that is not UTF-8 is
sent as `{{"b64": "..."}}`. In the row form all rows need lists of the same length.

The responses below are this model's. Numbers are rounded to {digits} significant digits, and long
lists are cut after {shown} entries.

## Python, over gRPC

Run `pip install grpcio tensorflow tensorflow-serving-api`. The gRPC requests below start with this
code.

```python
import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

# -1: messages of any size. By default gRPC rejects responses of more than 4 MB.
unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
channel = grpc.insecure_channel("localhost:8500", unlimited)
stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
```
{sections}"""

_SECTION = """
## {signature}
{about}
| input | type | shape | description |
|---|---|---|---|
{inputs}

| output | type | shape | description |
|---|---|---|---|
{outputs}

REST, rows:

```
curl {url} -d {rows}
```
```json
{rows_response}
```

REST, columns:

```
curl {url} -d {columns}
```
```json
{columns_response}
```

gRPC:

```python
request = predict_pb2.PredictRequest()
request.model_spec.name = {name!r}
request.model_spec.signature_name = {signature!r}
{assignments}
response = stub.Predict(request, timeout=30)
outputs = {{name: tf.make_ndarray(tensor) for name, tensor in response.outputs.items()}}
```
"""


def signature_page(
    name: str,
    signatures: Sequence[SignatureInfo],
    kind: str,
    predictions: Mapping[str, Mapping[str, np.ndarray]],
) -> str:
    """Return the page as Markdown.

    Args:
        name: Name of the model.
        signatures: Signatures of the SavedModel.
        kind: Task type.
        predictions: The outputs for each signature's example request.
    """
    sections = [
        _section(name, signature, kind, predictions[signature.name]) for signature in signatures
    ]
    return _PAGE.format(
        name=printable(name), digits=DIGITS, shown=SHOWN, sections="".join(sections)
    )


def _section(name, signature, kind, prediction):
    inputs = signature.example()
    known = field_docs.of_outputs(kind, signature.name)
    order = {output: number for number, output in enumerate(known)}
    given = sorted(signature.outputs, key=lambda output: order.get(output.name, len(order)))
    outputs = {output.name: _shown(prediction[output.name].tolist()) for output in given}
    named = {} if signature.name == "serving_default" else {"signature_name": signature.name}
    # In the REST API, a single input or output has no name.
    rows = _rows(inputs) if len(inputs) > 1 else next(iter(inputs.values()))
    output_rows = _rows(outputs) if len(outputs) > 1 else next(iter(outputs.values()))
    output_columns = outputs if len(outputs) > 1 else next(iter(outputs.values()))
    about = field_docs.SIGNATURES.get(signature.name)
    if signature.name == "serving_default":
        about = field_docs.TASKS.get(kind, about)
    return _SECTION.format(
        name=name,
        signature=signature.name,
        about=f"\n{about}\n" if about else "",
        inputs=_table(signature.inputs, field_docs.INPUTS),
        outputs=_table(given, known),
        url=shlex.quote(
            f"http://localhost:8501/v1/models/{urllib.parse.quote(name, safe='')}:predict"
        ),
        rows=_as_argument({**named, "instances": rows}),
        rows_response=_json({"predictions": output_rows}),
        columns=_as_argument({**named, "inputs": inputs}),
        columns_response=_json({"outputs": output_columns}),
        assignments="\n".join(
            f'request.inputs["{key}"].CopyFrom(tf.make_tensor_proto({_python(values)}, tf.string))'
            for key, values in inputs.items()
        ),
    )


def _rows(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _table(tensors, known):
    return "\n".join(
        f"| `{tensor.name}` | {tensor.dtype} | {_shape(tensor.shape)} | "
        f"{known.get(tensor.name, '')} |"
        for tensor in tensors
    )


def _shape(shape):
    sizes = ["*" if size is None else str(size) for size in shape]
    return f"[{', '.join(['B', *sizes[1:]])}]"


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


def _json(value):
    """Return JSON with one line per row or column."""
    ((key, content),) = value.items()
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


def _python(values):
    return json.dumps(values)
