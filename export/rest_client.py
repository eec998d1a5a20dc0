"""Client of TensorFlow Serving's REST API, with the Python standard library only."""

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
MAX_RESPONSE_BYTES = 256 << 20  # About 10,000 vectors of 768 numbers as JSON.
# TensorFlow Serving writes no other type as JSON.
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
    """Client of a model on a TensorFlow Serving REST server."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Read the model's signatures.

        Args:
            url: http://HOST:PORT/v1/models/NAME for the newest version, followed by /versions/N or
                /labels/LABEL for another one.
            timeout: Time limit per request, in seconds.

        Raises:
            UserError: If `url` is malformed, or if the server does not respond as expected.
        """
        if not MODEL_URL.fullmatch(url.rstrip("/")):
            raise UserError(f"--url={url}: expected http://HOST:PORT/v1/models/NAME")
        self.url, self.timeout = url.rstrip("/"), timeout
        self.signatures = self._read("/metadata", None, _signatures)

    def _predict(self, inputs, signature):
        specs = self.signatures[signature]
        columns = {
            name: [_as_json(value) for value in _filled_up(values)]
            for name, values in inputs.items()
        }
        # The column form; the row form allows neither zero rows nor lists of different lengths.
        request = {"signature_name": signature, "inputs": columns}
        return self._read(":predict", request, lambda response: _outputs(response, specs.outputs))

    def _read(self, path, request, read):
        """Return `read(response)` of the server's JSON. Raises UserError for other responses."""
        status, kind, body = self._exchanged(path, request)
        try:
            # TensorFlow Serving writes NaN and Infinity, which are not valid JSON.
            response = strict_json.parse_object(
                body.decode("utf-8", "replace"), parse_constant=float
            )
            if status == 200:
                return read(response)
            message = str(response["error"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(
                f"--url={self.url}: not a TensorFlow Serving API: HTTP status {status}, {kind}"
            ) from None
        raise UserError(f"--url={self.url}: {message}")

    def _exchanged(self, path, request):
        """Return (status, content type, body) of the server's response, also of errors."""
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
                response = error  # Its body is TensorFlow Serving's error message.
            with response:
                body = response.read(MAX_RESPONSE_BYTES + 1)
                if len(body) > MAX_RESPONSE_BYTES:
                    raise UserError(
                        f"--url={self.url}: the response exceeds {MAX_RESPONSE_BYTES} bytes; send "
                        "fewer rows per request"
                    )
                return response.status, response.headers.get_content_type(), body
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise UserError(
                    f"--url={self.url}: no response within {self.timeout:g} seconds"
                ) from None
            detail = getattr(reason, "strerror", None) or reason or type(reason).__name__
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
                # The error's own text would contain all received bytes.
                detail = "the response is not HTTP"
            raise UserError(f"--url={self.url}: no response from a server: {detail}") from None


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
        outputs = dict.fromkeys(specs, outputs)  # A single output is sent without its name.
    return {name: _value(outputs[name], specs[name].dtype) for name in specs}


def _value(value, dtype):
    """Convert a JSON value to what the other clients return.

    The server writes a float32 in as few digits as identify it, which Python parses as a float64.
    """
    if isinstance(value, list):
        return [_value(entry, dtype) for entry in value]
    if dtype == "float32":
        return ctypes.c_float(value).value
    if isinstance(value, dict):  # The server encodes outputs whose name ends in "_bytes".
        return base64.b64decode(value["b64"]).decode("utf-8", "replace")
    return value


def _filled_up(values):
    """Pad lists of strings to the longest, since the server requires equal lengths."""
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
