"""A small server for tests: the engine with the REST paths and PredictionService of TF Serving.

    python -m tests.export.server MODELS/name [MODELS/other ...]

It prints its two addresses in one line and serves the newest versions until its input ends. It is
not TF Serving: it shares the engine, paths, statuses, and the format of requests and responses.
"""

import concurrent.futures
import contextlib
import http.server
import json
import pathlib
import re
import sys
import threading
import typing

from tests.export.batching import Batching
from tests.export.c_engine import INVALID_ARGUMENT, Engine, EngineError
from tests.export.rest_json import predicted

NOT_FOUND = 5
STATUSES = {INVALID_ARGUMENT: 400, 4: 504, NOT_FOUND: 404, 8: 429, 9: 400, 11: 400, 12: 501}
TYPES = {
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "int32": "DT_INT32",
    "uint8": "DT_UINT8",
    "int16": "DT_INT16",
    "int8": "DT_INT8",
    "string": "DT_STRING",
    "int64": "DT_INT64",
    "bool": "DT_BOOL",
}
# TF Serving lists it among the signatures.
INIT_OP = {
    "inputs": {},
    "outputs": {
        "__saved_model_init_op": {
            "dtype": "DT_INVALID",
            "tensor_shape": {"dim": [], "unknown_rank": True},
            "name": "NoOp",
        }
    },
    "method_name": "",
}
PREDICT = re.compile(r"(?i)/v1/models/([^/:]+)(?:/versions/(\d+))?:predict")
STATUS = re.compile(r"(?i)/v1/models/([^/:]+)(?:/versions/(\d+))?(/metadata)?")


class Addresses(typing.NamedTuple):
    rest: str
    grpc: str


class Servable:
    """The newest version of MODELS/name; one with batching_params.pbtxt may be batched."""

    def __init__(self, directory, batches=False):
        self.name = pathlib.Path(directory).name
        self.path = max(
            (path for path in pathlib.Path(directory).iterdir() if path.name.isdecimal()),
            key=lambda path: int(path.name),
        )
        self.version = int(self.path.name)
        self.engine = Engine(self.path)
        parameters = self.path / "batching_params.pbtxt"
        if batches and parameters.exists():
            self.engine = Batching(self.engine, parameters.read_text())


@contextlib.contextmanager
def serving(*directories, batches=False):
    """Serve MODELS/name directories in threads, on free ports; yield their Addresses.

    Args:
        directories: The MODELS/name directories.
        batches: Whether to batch, like --enable_batching
            --enable_per_model_batching_parameters.
    """
    servables = {pathlib.Path(path).name: Servable(path, batches) for path in directories}

    class Handler(RestHandler):
        pass

    Handler.servables = servables
    rest = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    rest.daemon_threads = True
    thread = threading.Thread(target=rest.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    grpc_server, grpc_port = _start_grpc(servables)
    try:
        yield Addresses(f"http://127.0.0.1:{rest.server_port}", f"127.0.0.1:{grpc_port}")
    finally:
        grpc_server.stop(None).wait()
        rest.shutdown()
        thread.join()
        rest.server_close()


def found(servables, name, version):
    """Return the servable; `version` is a number or None. Raise EngineError if there is none."""
    servable = servables.get(name)
    if servable is None or version not in (None, servable.version):
        asked = f"Latest({name})" if version is None else f"Specific({name}, {version})"
        raise EngineError(f"Servable not found for request: {asked}", NOT_FOUND)
    return servable


class RestHandler(http.server.BaseHTTPRequestHandler):
    """REST handler; a subclass has the servables."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(lambda: self._status(STATUS.fullmatch(self.path)))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(lambda: self._predicted(PREDICT.fullmatch(self.path), body))

    def log_message(self, *_):
        """Log nothing."""

    def _found(self, match):
        if not match:
            raise EngineError(f"Malformed request: {self.command} {self.path}")
        return found(self.servables, match[1], int(match[2]) if match[2] else None)

    def _status(self, match):
        servable = self._found(match)
        if match[3]:
            return json.dumps(metadata(servable)).encode()
        status = {"error_code": "OK", "error_message": ""}
        version = {"version": str(servable.version), "state": "AVAILABLE", "status": status}
        return json.dumps({"model_version_status": [version]}).encode()

    def _predicted(self, match, body):
        return predicted(self._found(match).engine, body)

    def _answer(self, make):
        try:
            status, body = 200, make()
        except EngineError as error:
            status = STATUSES.get(error.code, 500)
            body = json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def metadata(servable):
    """Return the GetModelMetadataResponse as JSON."""

    def logged(spec):
        sizes = [{"size": str(size), "name": ""} for size in spec.shape or ()]
        return {
            "dtype": TYPES[spec.dtype],
            "tensor_shape": {"dim": sizes, "unknown_rank": spec.shape is None},
            "name": spec.tensor,
        }

    signatures = {
        name: {
            **{key: {tensor: logged(spec) for tensor, spec in parts[key].items()} for key in parts},
            "method_name": "tensorflow/serving/predict",
        }
        for name, parts in servable.engine.signatures.items()
    }
    signatures["__saved_model_init_op"] = INIT_OP
    return {
        "model_spec": {
            "name": servable.name,
            "signature_name": "",
            "version": str(servable.version),
        },
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _start_grpc(servables):
    """Return (server, port) of PredictionService."""
    import grpc
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2
    from tensorflow_serving.apis import (
        get_model_metadata_pb2,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    codes = {code.value[0]: code for code in grpc.StatusCode}

    def of(spec):
        return found(servables, spec.name, spec.version.value if spec.HasField("version") else None)

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request, context):
            response = predict_pb2.PredictResponse()
            try:
                servable = of(request.model_spec)
                inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
                signature = request.model_spec.signature_name or "serving_default"
                prediction = servable.engine.predict(inputs, signature)
            except EngineError as error:
                context.abort(codes[error.code], str(error))
            response.model_spec.name = servable.name
            response.model_spec.version.value = servable.version
            for name, values in prediction.items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(values))
            return response

        def GetModelMetadata(self, request, context):
            response = get_model_metadata_pb2.GetModelMetadataResponse()
            try:
                servable = of(request.model_spec)
                if list(request.metadata_field) != ["signature_def"]:
                    raise EngineError(f"Metadata field {request.metadata_field} is not supported")
            except EngineError as error:
                context.abort(codes[error.code], str(error))
            model = saved_model_pb2.SavedModel()
            model.ParseFromString((servable.path / "saved_model.pb").read_bytes())
            signatures = get_model_metadata_pb2.SignatureDefMap()
            for name, definition in model.meta_graphs[0].signature_def.items():
                signatures.signature_def[name].CopyFrom(definition)
            response.model_spec.name = servable.name
            response.model_spec.version.value = servable.version
            response.metadata["signature_def"].Pack(signatures)
            return response

    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(4),
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


if __name__ == "__main__":
    with serving(*sys.argv[1:]) as addresses:
        print(*addresses, flush=True)
        sys.stdin.read()
