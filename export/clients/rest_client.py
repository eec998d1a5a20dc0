"""Client of TensorFlow Serving's REST API. TensorFlow is not imported."""

import base64
import concurrent.futures
import ctypes
import http.client
import re
import ssl
import threading
import urllib.parse

import requests
import requests.auth
import urllib3

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from bert_tf.storage import strict_json
from export.clients.client import ModelClient, check_timeout
from export.clients.signatures import Signature, Tensor, is_public_signature, to_shape

MODEL_URL = re.compile(r"https?://[^/]+(/.*)?/v1/models/[^/:]+(/versions/\d+|/labels/[^/:]+)?")
MAX_RESPONSE_BYTES = 256 << 20  # About 10,000 vectors of 768 numbers as JSON.
_CERTIFICATES = ssl.get_default_verify_paths()
_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError)
# Types whose name in TensorFlow is not that of the protocol buffer in lower case.
_DTYPES = {"DT_HALF": "float16", "DT_FLOAT": "float32", "DT_DOUBLE": "float64"}


class RestClient(ModelClient):
    """Client of a model on a TensorFlow Serving REST server."""

    @argument_names()
    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Read the model's signatures.

        Args:
            url: http://HOST:PORT/v1/models/NAME for the newest version, followed by /versions/N or
                /labels/LABEL for another one. USER:PASSWORD@ before HOST is sent as HTTP basic
                authentication, as a proxy may require.
            timeout: Time limit per request, in seconds.

        Raises:
            UserError: If an argument is malformed, or if the server does not respond as expected.
        """
        url, self._auth = _without_user(str(url))
        if not MODEL_URL.fullmatch(url.rstrip("/")):
            raise UserError(f"--url={url}: expected http://HOST:PORT/v1/models/NAME")
        self.url, self.timeout = url.rstrip("/"), check_timeout(timeout)
        super().__init__(self._read("/metadata", None, _signatures))

    def _predict(self, inputs, signature):
        if any(not values and signature.inputs[name].rank == 2 for name, values in inputs.items()):
            return {name: [] for name in signature.outputs}  # In JSON, [] has rank 1.
        columns = {
            name: [_as_json(value) for value in _filled_up(values)]
            for name, values in inputs.items()
        }
        # The column form; the row form allows neither zero rows nor lists of different lengths.
        request = {"signature_name": signature.name, "inputs": columns}
        return self._read(
            ":predict", request, lambda response: _outputs(response, signature.outputs)
        )

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
            message = tensorflow_reason(str(response["error"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(
                f"--url={self.url}: not a TensorFlow Serving API: HTTP status {status}, {kind}"
            ) from None
        raise UserError(f"--url={self.url}: {message}")

    def _exchanged(self, path: str, request: dict | None) -> tuple[int, str, bytes]:
        """Return (status, content type, body) of the server's response, also of errors."""
        try:
            response, body = _within(self.timeout, lambda: self._received(path, request))
        except (*_ERRORS, TimeoutError) as error:
            raise UserError(f"--url={self.url}: {_problem(error, self.timeout)}") from None
        if response.is_redirect:
            address = urllib.parse.urljoin(self.url + path, response.headers["Location"])
            raise UserError(
                f"--url={self.url}: {path} is redirected to {address:.200}; expected the address "
                "of the server itself"
            )
        if len(body) > MAX_RESPONSE_BYTES:
            raise UserError(
                f"--url={self.url}: the response exceeds {MAX_RESPONSE_BYTES} bytes; send fewer "
                "rows per request"
            )
        kind = response.headers.get("Content-Type", "text/plain").partition(";")[0]
        return response.status_code, kind, body

    def _received(self, path, request):
        """Return the server's response and its body, of which no more is read than is allowed."""
        with requests.request(
            "GET" if request is None else "POST",
            self.url + path,
            json=request,
            timeout=self.timeout,
            stream=True,
            auth=self._auth,
            allow_redirects=False,  # Most of them make a GET of a POST.
            proxies={"all": ""},  # Ignores ALL_PROXY, unlike http_proxy and https_proxy.
            # The certificates that the system trusts; those of requests are other ones.
            verify=_CERTIFICATES.cafile or _CERTIFICATES.capath or True,
        ) as response:
            return response, response.raw.read(MAX_RESPONSE_BYTES + 1, decode_content=True)


def _without_user(url):
    """Return a URL without user and password, which no message may show; and what sends them."""
    found = re.match(r"(\w+://)?([^/:]*):?([^/]*)@", url)
    if not found:
        return url, lambda prepared: prepared  # Unlike `None`, sends no password from ~/.netrc.
    user, password = map(urllib.parse.unquote_to_bytes, found.groups()[1:])
    return (found[1] or "") + url[found.end() :], requests.auth.HTTPBasicAuth(user, password)


def _within(seconds, function):
    """Return the result of a function, or raise TimeoutError and leave its thread behind.

    The time limits of sockets are those of one read: a server that sends a byte now and then would
    never reach them.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def _problem(error, timeout):
    """Return why there is no response, from the innermost cause of an error."""
    while isinstance(error, _ERRORS) and error.__context__:
        error = error.__context__
    if isinstance(error, TimeoutError):
        return f"no response within {timeout:g} seconds"
    detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if type(error) is http.client.BadStatusLine:
        detail = "the response is not HTTP"  # Its own text would contain all received bytes.
    return f"no response from a server: {detail}"


def _signatures(response):
    return [
        Signature(name, _tensors(definition["inputs"]), _tensors(definition["outputs"]))
        for name, definition in response["metadata"]["signature_def"]["signature_def"].items()
        if is_public_signature(name)
    ]


def _tensors(infos):
    return {
        name: Tensor(
            name,
            _DTYPES.get(info["dtype"]) or info["dtype"].removeprefix("DT_").lower(),
            to_shape(
                # An int64 is a string in JSON; a number is invalid.
                [int(dim["size"], 10) for dim in info["tensor_shape"]["dim"]],
                info["tensor_shape"]["unknown_rank"],
            ),
        )
        for name, info in infos.items()
    }


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
