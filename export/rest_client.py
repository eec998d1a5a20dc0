"""A published model behind TF Serving's REST API, asked with nothing but Python's own library."""

import base64
import ctypes
import http.client
import json
import re
import urllib.error
import urllib.request

from bert_tf import strict_json
from bert_tf.errors import UserError
from export.client import ClientSignature, ModelClient, TensorSpec, is_public_signature

MODEL_URL = re.compile(r"https?://[^/]+(/.*)?/v1/models/[^/:]+(/versions/\d+|/labels/[^/:]+)?")
MAX_RESPONSE_BYTES = 256 << 20  # As JSON, 10,000 vectors of 768 numbers.
# TF Serving writes no other type as JSON.
DTYPES = {
    "DT_BOOL": "bool",
    "DT_DOUBLE": "float64",
    "DT_FLOAT": "float32",
    "DT_INT8": "int8",
    "DT_INT16": "int16",
    "DT_INT32": "int32",
    "DT_INT64": "int64",
    "DT_STRING": "string",
    "DT_UINT8": "uint8",
    "DT_UINT16": "uint16",
    "DT_UINT32": "uint32",
    "DT_UINT64": "uint64",
}


class RestClient(ModelClient):
    """A model of a server: http://HOST:PORT/v1/models/NAME, and /versions/N if not the newest."""

    def __init__(self, url, timeout=60.0):
        """Reads the signatures; `timeout` is in seconds."""
        if not MODEL_URL.fullmatch(url.rstrip("/")):
            raise UserError(f"--url={url}: wanted http://HOST:PORT/v1/models/NAME")
        self.url, self.timeout = url.rstrip("/"), timeout
        self.signatures = self._read("/metadata", None, _signatures)

    def _predict(self, inputs, signature):
        specs = self.signatures[signature]
        columns = {
            name: [_as_json(value) for value in _filled_up(values)]
            for name, values in inputs.items()
        }
        # Columns, not rows: those could be neither none nor lists of different lengths.
        request = {"signature_name": signature, "inputs": columns}
        return self._read(":predict", request, lambda response: _outputs(response, specs.outputs))

    def _read(self, path, request, read):
        """What `read` makes of the server's JSON. Raises UserError at any other answer."""
        status, kind, body = self._exchanged(path, request)
        try:
            # TF Serving writes NaN and Infinity as they are.
            response = strict_json.parse_object(
                body.decode("utf-8", "replace"), parse_constant=float
            )
            if status == 200:
                return read(response)
            message = str(response["error"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(
                f"--url={self.url}: no TF Serving answers there: HTTP status {status}, {kind}"
            ) from None
        raise UserError(f"--url={self.url}: {message}")

    def _exchanged(self, path, request):
        """(status, content type, body) of the server's answer, whatever its status."""
        data = None if request is None else json.dumps(request).encode("ascii")
        try:
            try:
                response = urllib.request.urlopen(
                    urllib.request.Request(
                        self.url + path, data, {"Content-Type": "application/json"}
                    ),
                    timeout=self.timeout,
                )
            except urllib.error.HTTPError as error:
                response = error  # An answer as well.
            with response:
                body = response.read(MAX_RESPONSE_BYTES + 1)
                if len(body) > MAX_RESPONSE_BYTES:
                    raise UserError(
                        f"--url={self.url}: the answer has over {MAX_RESPONSE_BYTES} bytes; ask "
                        "for fewer texts at a time"
                    )
                return response.status, response.headers.get_content_type(), body
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise UserError(
                    f"--url={self.url}: no answer within {self.timeout:g} seconds"
                ) from None
            detail = getattr(reason, "strerror", None) or reason or type(reason).__name__
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
                detail = "what came is not HTTP"  # Its text would be all bytes that came.
            raise UserError(f"--url={self.url}: no server answers there: {detail}") from None


def _signatures(response):
    return {
        name: ClientSignature(_specs(definition["inputs"]), _specs(definition["outputs"]))
        for name, definition in response["metadata"]["signature_def"]["signature_def"].items()
        if is_public_signature(name)
    }


def _specs(infos):
    specs = {}
    for name, info in infos.items():
        shape = info["tensor_shape"]
        specs[name] = TensorSpec(
            DTYPES.get(info["dtype"], info["dtype"]),
            None if shape["unknown_rank"] else len(shape["dim"]),
        )
    return specs


def _outputs(response, specs):
    outputs = response["outputs"]
    if len(specs) == 1:
        outputs = dict.fromkeys(specs, outputs)  # One output comes without its name.
    return {name: _value(outputs[name], specs[name].dtype) for name in specs}


def _value(value, dtype):
    """What another client would have got: a float32 comes in as few digits as tell it."""
    if isinstance(value, list):
        return [_value(entry, dtype) for entry in value]
    if dtype == "float32":
        return ctypes.c_float(value).value
    if isinstance(value, dict):  # Of outputs whose name ends in "_bytes".
        return base64.b64decode(value["b64"]).decode("utf-8", "replace")
    return value


def _filled_up(values):
    """Lists of strings as long as the longest, as JSON's have to be."""
    longest = max((len(value) for value in values if isinstance(value, list)), default=0)
    return [
        value + [b""] * (longest - len(value)) if isinstance(value, list) else value
        for value in values
    ]


def _as_json(value):
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode("ascii")}
